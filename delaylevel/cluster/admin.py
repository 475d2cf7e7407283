"""The admin REST client: what the package asks a cluster, and does to it, beside messages."""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote

from delaylevel.errors import AdminError, ConflictError, NotFoundError, PermissionDeniedError
from delaylevel.model.clock import instant_ms
from delaylevel.model.position import Position
from delaylevel.model.topic_name import TopicName

from . import parsing as read
from .connection import Connection
from .http import Rest, Token
from .token import TokenSource
from .values import (
    AcknowledgedRange,
    BrokerSettings,
    DelayedDelivery,
    LedgerInfo,
    NamespacePolicies,
    PartitionStats,
    SchemaVersion,
    TopicMetadata,
    TopicPolicies,
)

_METADATA = "application/vnd.partitioned-topic-metadata+json"
_EARLIEST = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1}
_LATEST = {"ledgerId": (1 << 63) - 1, "entryId": (1 << 63) - 1, "partitionIndex": -1}
_STATS = {
    "getPreciseBacklog": "true",
    "subscriptionBacklogSize": "false",
    "getEarliestTimeInBacklog": "true",
}
_BUSY_TRIES = 40
_BUSY_PAUSE_S = 0.05


class Admin:
    """A cluster's admin REST interface, as :class:`~delaylevel.cluster.port.TopicAdmin` and beyond.

    One instance may be used by many threads; it opens connections when it needs them. Errors:
    NotFoundError (404), ConflictError (409, 412), PermissionDeniedError (401, 403),
    BrokerUnreachableError (no answer), else AdminError. None of them contains the token.

    Args:
        admin_url: ``http://host:port``; several hosts separated by commas are tried in turn.
        token: the token, or what returns the one that is valid now.
        tls_trust_certs_file: certificates to trust (PEM); without it, those of ``certifi``.
        tls_certificate_file, tls_private_key_file: the client's own certificate and key (PEM).
        tls_allow_insecure: accept certificates that nobody vouches for.
        tls_validate_hostname: compare the certificate's name with the host's.
        timeout_s: seconds to wait for an answer.

    Raises:
        ConfigError: the address or a certificate file cannot be used.
    """

    def __init__(
        self,
        admin_url: str,
        *,
        token: Token = None,
        tls_trust_certs_file: str | None = None,
        tls_certificate_file: str | None = None,
        tls_private_key_file: str | None = None,
        tls_allow_insecure: bool = False,
        tls_validate_hostname: bool = True,
        timeout_s: float = 30.0,
    ) -> None:
        self._rest = Rest(
            admin_url,
            token=token,
            tls_trust_certs_file=tls_trust_certs_file,
            tls_certificate_file=tls_certificate_file,
            tls_private_key_file=tls_private_key_file,
            tls_allow_insecure=tls_allow_insecure,
            tls_validate_hostname=tls_validate_hostname,
            timeout_s=timeout_s,
        )

    @classmethod
    def from_connection(cls, connection: Connection) -> Admin:
        """Return the admin interface of the cluster that a connection names.

        Raises:
            ConfigError: the token file cannot be read, or is empty. A later call goes by the token
                that was read before where it cannot be read then.
        """
        has_token = connection.token is not None or connection.token_file is not None

        def path(value: object) -> str | None:
            return None if value is None else str(value)

        return cls(
            connection.admin_url,
            token=TokenSource(connection.read_token) if has_token else None,
            tls_trust_certs_file=path(connection.tls_trust_certs_file),
            tls_certificate_file=path(connection.tls_certificate_file),
            tls_private_key_file=path(connection.tls_private_key_file),
            tls_allow_insecure=connection.tls_allow_insecure,
            tls_validate_hostname=connection.tls_validate_hostname,
            timeout_s=connection.operation_timeout_seconds,
        )

    @property
    def admin_url(self) -> str:
        """The address it was made with."""
        return self._rest.admin_url

    def close(self) -> None:
        """Close all connections; a later call opens new ones."""
        self._rest.close()

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the cluster -----------------------------------------------------------------------

    def health(self) -> bool:
        """Say whether the broker can store and deliver messages now.

        Raises:
            BrokerUnreachableError: nothing answers at all.
            PermissionDeniedError: it tells superusers only.
        """
        try:
            self._rest.request("GET", "brokers/health", patient=False)
        except PermissionDeniedError:
            raise
        except AdminError:
            return False
        return True

    def version(self) -> str:
        """Return the broker's version, e.g. ``4.0.8``."""
        return self._rest.request("GET", "brokers/version").data.decode().strip().strip('"')

    def broker_settings(self) -> BrokerSettings:
        """Return the broker's own configuration; all None where it may not be read."""
        try:
            value = self._rest.get("brokers/configuration/runtime")
        except AdminError as error:
            if error.status in (401, 403, 404, 405):
                return BrokerSettings()  # only superusers may
            raise
        return read.broker_settings(value)

    def runtime_configuration(self) -> dict[str, str]:
        """Return every setting that the broker runs with.

        Raises:
            PermissionDeniedError: only superusers may.
        """
        return dict(self._rest.get("brokers/configuration/runtime"))

    def clock_ms(self) -> int | None:
        """Return what the broker's clock says, in whole seconds; None where it does not.

        The time is that of the answer's ``Date``: behind the true one by less than a second and
        the answer's way.
        """
        said = self._rest.request("GET", "brokers/version").headers.get("Date")
        return instant_ms(parsedate_to_datetime(said)) if said else None

    def delayed_delivery(self, topic: TopicName) -> DelayedDelivery | None:
        """Return how a topic delays messages, where that is set for it or for its namespace."""
        value = self._rest.get(f"{topic.rest_path}/delayedDelivery", applied="false")
        if not value:
            value = self._rest.get(f"namespaces/{_namespace(topic.namespace_path)}/delayedDelivery")
        return DelayedDelivery(bool(value["active"]), int(value["tickTime"])) if value else None

    # --- namespaces ------------------------------------------------------------------------

    def namespace_policies(self, namespace: str) -> NamespacePolicies:
        """Return what applies to the topics of a namespace (``tenant/namespace``)."""
        return read.namespace_policies(self._rest.get(f"namespaces/{_namespace(namespace)}"))

    def list_topics(self, namespace: str) -> list[TopicName]:
        """Return the topics of a namespace that hold data, partitions one by one, sorted."""
        names = self._rest.get(f"persistent/{_namespace(namespace)}") or ()
        return sorted(TopicName.parse(name) for name in names)

    def list_partitioned_topics(self, namespace: str) -> list[TopicName]:
        """Return the partitioned topics of a namespace (``tenant/namespace``), sorted."""
        names = self._rest.get(f"persistent/{_namespace(namespace)}/partitioned") or ()
        return sorted(TopicName.parse(name) for name in names)

    # --- topics ----------------------------------------------------------------------------

    def topic_exists(self, topic: TopicName) -> bool:
        """Say whether the topic exists, partitioned or not; never creates it."""
        try:
            metadata = self.partitioned_metadata(topic)
        except NotFoundError:
            return False
        if metadata.partitions:
            return True
        # Brokers before 4.0 say "0 partitions" of a topic that does not exist, too.
        try:
            self._rest.get(f"{topic.rest_path}/stats")
        except NotFoundError:
            return False
        return True

    def partitioned_metadata(self, topic: TopicName) -> TopicMetadata:
        """Return partitions (0: not partitioned) and properties of a topic that exists."""
        value = self._rest.get(f"{topic.rest_path}/partitions", checkAllowAutoCreation="false")
        return TopicMetadata(int(value["partitions"]), value.get("properties") or {})

    def create_partitioned(
        self, topic: TopicName, partitions: int, properties: Mapping[str, str] | None = None
    ) -> None:
        """Create a partitioned topic and all its partitions, with its properties at once.

        Raises:
            ConflictError: a topic of that name exists, partitioned or not.
            AdminError: 406 where the broker's limit of partitions is exceeded.
        """
        body = {"partitions": partitions, "properties": dict(properties or {})}
        self._rest.put(f"{topic.rest_path}/partitions", body, kind=_METADATA)

    def expand(self, topic: TopicName, partitions: int) -> None:
        """Give a partitioned topic more partitions; the new ones get its subscriptions.

        Raises:
            AdminError: 422 where it has more already.
        """
        self.partitioned_metadata(topic)  # of a missing topic the broker says 409
        self._rest.post(f"{topic.rest_path}/partitions", partitions)

    def delete(self, topic: TopicName, *, force: bool = False) -> None:
        """Delete a topic, partitioned or not, with its data and subscriptions.

        Args:
            force: disconnect producers and consumers first; without it they make it fail.
        """
        end = "/partitions" if self.partitioned_metadata(topic).partitions else ""
        self._rest.delete(f"{topic.rest_path}{end}", force="true" if force else "false")

    def terminate(self, topic: TopicName) -> None:
        """Let nothing be published to the topic any more; what is stored can still be read."""
        end = (
            "/terminate/partitions" if self.partitioned_metadata(topic).partitions else "/terminate"
        )
        self._rest.post(f"{topic.rest_path}{end}")

    def unload(self, topic: TopicName) -> None:
        """Let the broker close the topic (or partition), and open it anew when it is needed."""
        self._rest.put(f"{topic.rest_path}/unload")

    def properties(self, topic: TopicName) -> dict[str, str]:
        """Return the properties of a topic."""
        return dict(self._rest.get(f"{topic.rest_path}/properties") or {})

    def set_properties(self, topic: TopicName, properties: Mapping[str, str]) -> None:
        """Set properties of a topic; those that are not named stay as they are."""
        # Asked to set properties of a missing topic, a 4.0.8 broker never answers.
        self.partitioned_metadata(topic)
        self._rest.put(f"{topic.rest_path}/properties", dict(properties))

    def remove_property(self, topic: TopicName, key: str) -> None:
        """Remove a property of a topic, if it has it."""
        self.partitioned_metadata(topic)
        self._rest.delete(f"{topic.rest_path}/properties", key=key)

    def topic_policies(self, topic: TopicName) -> TopicPolicies:
        """Return the policies that are set for this very topic."""
        path = topic.rest_path
        inactive = self._rest.get(f"{path}/inactiveTopicPolicies")
        clusters = self._rest.get(f"{path}/replication")
        return TopicPolicies(
            message_ttl_s=self._rest.get(f"{path}/messageTTL"),
            delete_while_inactive=inactive["deleteWhileInactive"] if inactive else None,
            replication_clusters=frozenset(clusters) if clusters else None,
        )

    def set_topic_policies(self, topic: TopicName, policies: TopicPolicies) -> None:
        """Set policies of a topic; they show soon after, not at once.

        Raises:
            AdminError: 405 where the broker has no policies for single topics.
        """
        path = topic.rest_path
        if policies.message_ttl_s is not None:
            # As a parameter: a body is ignored, and the answer is 204 all the same.
            self._rest.post(f"{path}/messageTTL", messageTTL=str(policies.message_ttl_s))
        if policies.delete_while_inactive is not None:
            value = {
                "inactiveTopicDeleteMode": "delete_when_no_subscriptions",
                "maxInactiveDurationSeconds": 60,
                "deleteWhileInactive": policies.delete_while_inactive,
            }
            self._rest.post(f"{path}/inactiveTopicPolicies", value)
        if policies.replication_clusters is not None:
            self._rest.post(f"{path}/replication", sorted(policies.replication_clusters))
        if policies.deduplication is not None:
            self._rest.post(f"{path}/deduplicationEnabled", policies.deduplication)

    # --- subscriptions and figures -----------------------------------------------------------

    def create_subscription(
        self, topic: TopicName, subscription: str, *, earliest: bool = True
    ) -> None:
        """Create a durable subscription on every partition of a topic that exists.

        Raises:
            ConflictError: every partition has it already.
            NotFoundError: there is no such topic; it is not created.
        """
        # The call itself would create a missing topic, unpartitioned, where the broker may.
        self.partitioned_metadata(topic)
        body = _EARLIEST if earliest else _LATEST
        path = f"{topic.rest_path}/subscription/{quote(subscription, safe='')}"
        for attempt in range(_BUSY_TRIES):
            try:
                self._rest.put(path, body)
                return
            except ConflictError as error:
                # Somebody else makes it at this moment; soon it exists (409).
                if "Subscription Busy" not in error.reason or attempt == _BUSY_TRIES - 1:
                    raise
            time.sleep(_BUSY_PAUSE_S)

    def subscriptions(self, topic: TopicName) -> list[str]:
        """Return the names of a topic's subscriptions, sorted."""
        return sorted(self._rest.get(f"{topic.rest_path}/subscriptions") or ())

    def delete_subscription(
        self, topic: TopicName, subscription: str, *, force: bool = False
    ) -> None:
        """Delete a subscription of a topic: what it alone kept is gone."""
        path = f"{topic.rest_path}/subscription/{quote(subscription, safe='')}"
        self._rest.delete(path, force="true" if force else "false")

    def partition_stats(self, partition: TopicName) -> PartitionStats:
        """Return the figures of one partition."""
        return read.partition_stats(self._rest.get(f"{partition.rest_path}/stats", **_STATS))

    def partitioned_stats(self, topic: TopicName) -> dict[int, PartitionStats]:
        """Return the figures of all partitions of a partitioned topic, by number.

        A partition that could not be asked is missing.
        """
        path = f"{topic.rest_path}/partitioned-stats"
        value = self._rest.get(path, perPartition="true", **_STATS)
        figures = {}
        for name, stats in value["partitions"].items():
            index = TopicName.parse(name).partition_index
            if index is not None and stats:
                figures[index] = read.partition_stats(stats)
        return figures

    def internal_stats(self, partition: TopicName) -> dict[str, Any]:
        """Return the ledgers and cursors of one partition, as the broker says them.

        An open ledger shows 0 entries: ``currentLedgerEntries`` has them.
        """
        return dict(self._rest.get(f"{partition.rest_path}/internalStats"))

    def ledgers(self, partition: TopicName) -> list[LedgerInfo]:
        """Return the ledgers that a partition still has, oldest first, with what is in each."""
        return read.ledgers(self.internal_stats(partition))

    def contents(self, partition: TopicName) -> tuple[list[LedgerInfo], int]:
        """Return a partition's ledgers, and the entries it has got since the broker opened it."""
        value = self.internal_stats(partition)
        return read.ledgers(value), int(value.get("entriesAddedCounter", 0))

    def messages_in(self, topic: TopicName) -> dict[TopicName, int]:
        """Return the messages that each partition has got since the broker opened it.

        A topic that has no partitions is its only one. Nothing for one that does not exist.
        """
        try:
            value = self._rest.get(f"{topic.rest_path}/partitioned-stats", perPartition="true")
            found = {TopicName.parse(name): stats for name, stats in value["partitions"].items()}
        except NotFoundError:
            try:
                found = {topic: self._rest.get(f"{topic.rest_path}/stats")}
            except NotFoundError:
                return {}
        return {name: int(stats.get("msgInCounter", 0)) for name, stats in found.items() if stats}

    def mark_delete_position(self, partition: TopicName, subscription: str) -> Position:
        """Return the last position up to which a subscription has acknowledged everything.

        Raises:
            NotFoundError: the partition or the subscription does not exist.
        """
        return Position.parse(self._cursor(partition, subscription)["markDeletePosition"])

    def acknowledged_ranges(
        self, partition: TopicName, subscription: str
    ) -> tuple[AcknowledgedRange, ...]:
        """Return what a subscription has acknowledged behind the front that it has reached.

        Raises:
            NotFoundError: the partition or the subscription does not exist.
        """
        return read.acknowledged_ranges(
            self._cursor(partition, subscription).get("individuallyDeletedMessages", "")
        )

    def _cursor(self, partition: TopicName, subscription: str) -> Mapping[str, Any]:
        cursors = self.internal_stats(partition)["cursors"]
        if subscription not in cursors:
            reason = f"{partition} has no subscription {subscription!r}"
            raise NotFoundError(reason, status=404, reason=reason)
        found: Mapping[str, Any] = cursors[subscription]
        return found

    # --- messages ----------------------------------------------------------------------------

    def last_message_id(self, partition: TopicName) -> Position | None:
        """Return the position of a partition's last message; None where nothing is stored."""
        position = read.position(self._rest.get(f"{partition.rest_path}/lastMessageId"))
        return position if position.entry >= 0 else None

    def message_id_at(self, partition: TopicName, publish_ms: int) -> Position | None:
        """Return the front of the first entry published at or after a time, or None for none."""
        path = f"{partition.rest_path}/messageid/{max(publish_ms, 0)}"
        position = read.position(self._rest.get(path)).entry_start
        # Past the end the broker names the entry that the next message will get.
        last = self.last_message_id(partition)
        return position if last is not None and position <= last else None

    def entry_publish_time(self, partition: TopicName, position: Position) -> int | None:
        """Return when an entry was published (ms since the epoch), or None if it is not there."""
        path = f"{partition.rest_path}/ledger/{position.ledger}/entry/{position.entry}"
        if position.ledger < 0 or position.entry < 0:
            return None
        try:
            answer = self._rest.request("GET", path, patient=False)
        except NotFoundError:
            self.partitioned_metadata(partition)  # no such entry, or no such partition?
            return None
        except AdminError as error:
            if error.status == 500 and read.says_no_such_entry(error.reason):
                return None
            raise
        said = answer.headers.get("X-Pulsar-publish-time")
        return read.instant(said) if said else None

    def schemas(self, topic: TopicName) -> list[SchemaVersion]:
        """Return every version of the topic's schema, oldest first; empty if it has none."""
        path = topic.rest_path.removeprefix("persistent/")
        try:
            value = self._rest.get(f"schemas/{path}/schemas")
        except NotFoundError:
            return []
        return read.schema_versions(value)


def _namespace(namespace: str) -> str:
    return "/".join(quote(part, safe="") for part in namespace.split("/"))
