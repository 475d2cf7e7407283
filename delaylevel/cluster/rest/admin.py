"""Client of the admin REST interface: everything except messages.

A broker asks the others for the statistics of the partitions that they own. If one of them has just
died, there is no answer for half a minute (seen with 4.0.8), and in the end those partitions may be
left out. So after a few seconds the partitions are asked one by one: a dead owner is known at once
by its redirects. A partition without an answer is not one that does not exist.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.port import (
    BY_SIZE,
    AcknowledgedRange,
    BacklogQuota,
    BrokerSettings,
    ClientStats,
    DelayedDelivery,
    LedgerInfo,
    NamespacePolicies,
    PartitionStats,
    SchemaVersion,
    SubscriptionStats,
    TopicAdmin,
    TopicMetadata,
    TopicPolicies,
)
from delaylevel.cluster.threads import in_parallel
from delaylevel.errors import (
    AdminError,
    BrokerUnreachableError,
    ConflictError,
    NotFoundError,
)
from delaylevel.model.clock import instant_ms
from delaylevel.model.position import Position
from delaylevel.model.topic_name import TopicName

from .http import Rest, RestOptions, encoded, options_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

# The broker needs some milliseconds for each partition.
_ALL_S = 5.0
# After a request for all partitions that took longer, they are asked one by one for this time.
_ONE_BY_ONE_S = 30.0
_ONE_S = 10.0

# Parameters of requests for statistics.
_STATS = {
    "getPreciseBacklog": "true",
    "subscriptionBacklogSize": "false",
    "getEarliestTimeInBacklog": "true",
}
_METADATA = "application/vnd.partitioned-topic-metadata+json"
_EARLIEST = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1}
_LATEST = {"ledgerId": (1 << 63) - 1, "entryId": (1 << 63) - 1, "partitionIndex": -1}
_TYPES = "subscriptionTypesEnabled"
# Policies of a topic, by the field of `TopicPolicies`.
_LIMITS = {
    "max_producers": "maxProducers",
    "max_consumers": "maxConsumers",
    "max_consumers_per_subscription": "maxConsumersPerSubscription",
    "max_subscriptions": "maxSubscriptionsPerTopic",
}
_REFUSED = (401, 403, 404, 405)  # 405: the broker has no policies for single topics
# A part of "[(7:1..7:3],(7:6..7:7]]": entries 2 and 3 of ledger 7.
_RANGE = re.compile(r"\((-?\d+):(-?\d+)\.\.(-?\d+):(-?\d+)\]")
# A subscription that another client creates at this moment (soon it exists: 409), or the broker's
# store of metadata on a machine that is too busy.
_BUSY = re.compile("Subscription Busy|BadVersion|Error while using MetaStore")
_BUSY_S = 20.0
_BUSY_PAUSE_S = 0.05
_VISIBLE_S = 10.0


class Admin(TopicAdmin):
    """Client of a cluster's admin REST interface.

    One instance may be used by many threads; it opens connections when it needs them. Errors:
    NotFoundError (404), ConflictError (409, 412), PermissionDeniedError (401, 403),
    BrokerUnreachableError (no answer), else AdminError. None of them contains the token.

    Args:
        admin_url: ``http://host:port``, several hosts separated by commas. The one that answered
            last is tried first.
        options: ``token``, TLS settings and ``timeout_s``: see
            :class:`~delaylevel.cluster.rest.http.RestOptions`.

    Raises:
        ConfigError: the address or a certificate file cannot be used.
    """

    def __init__(self, admin_url: str, **options: Unpack[RestOptions]) -> None:
        self.admin_url = admin_url
        self._rest = Rest(admin_url, **options)
        self._one_by_one_until_s = 0.0

    @classmethod
    def from_connection(cls, connection: Connection, *, for_service: bool = False) -> Admin:
        """Return a client for the cluster of a connection.

        Args:
            connection: the cluster's addresses and credentials.
            for_service: see :class:`~delaylevel.cluster.rest.http.RestOptions`.

        Raises:
            ConfigError: the token file cannot be read, or is empty. If a later call cannot read
                it, the client uses the token that it read before.
        """
        options = options_of(connection)
        options["for_service"] = for_service
        return cls(connection.admin_url, **options)

    def close(self) -> None:
        """Close all connections; a later call opens new ones."""
        self._rest.close()

    def within(self, timeout_s: float) -> Admin:
        # Not a new client: the copy has the same connections.
        found = copy.copy(self)
        found._rest = self._rest.within(timeout_s)
        return found

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the cluster -----------------------------------------------------------------------

    def version(self) -> str:
        """Return the broker's version, e.g. ``4.0.8``."""
        return self._rest.request("GET", "brokers/version").data.decode().strip().strip('"')

    def broker_settings(self) -> BrokerSettings:
        # All its values are strings.
        value = self._get_if("brokers/configuration/runtime", _REFUSED) or {}
        policies = (_flag(value, "topicLevelPoliciesEnabled"), _flag(value, "systemTopicEnabled"))
        types = re.findall(r"\w+", value.get(_TYPES, ""))  # "[Shared, Failover]"
        return BrokerSettings(
            cluster=value.get("clusterName") or None,
            topic_policies=None if None in policies else all(policies),
            max_partitions=_number(value, "maxNumPartitionsPerPartitionedTopic"),
            subscription_expiration_min=_number(value, "subscriptionExpirationTimeMinutes"),
            backlog_quotas=_default_quotas(value),
            encryption_required=_flag(value, "encryptionRequireOnProducer"),
            authorization=_flag(value, "authorizationEnabled"),
            subscription_types=frozenset(types) or None,
            max_producers=_number(value, "maxProducersPerTopic"),
        )

    def runtime_configuration(self) -> dict[str, str]:
        """Return all settings of the running broker.

        Raises:
            PermissionDeniedError: only superusers may.
        """
        return dict(self._rest.get("brokers/configuration/runtime"))

    def clock_ms(self) -> int | None:
        """Return the time of the broker's clock, ms since the epoch; None if the answer has none.

        It is the ``Date`` of an answer, in whole seconds: late by a second plus the answer's time.
        """
        date = self._rest.request("GET", "brokers/version").headers.get("Date")
        return instant_ms(parsedate_to_datetime(date)) if date else None

    def delayed_delivery(self, topic: TopicName) -> DelayedDelivery | None:
        """Return the delayed-delivery policy in force for a topic; None if it is not known."""
        value = self._get_if(f"{topic.rest_path}/delayedDelivery", (405,), applied="true")
        if not value:
            value = self._rest.get(f"namespaces/{encoded(topic.namespace_path)}/delayedDelivery")
        if not value:
            return None
        return DelayedDelivery(  # brokers omit fields that they do not know
            active=bool(value["active"]),
            tick_ms=int(value["tickTime"]),
            max_delay_ms=int(value.get("maxDeliveryDelayInMillis") or 0),
            fixed_delay_ms=int(value.get("fixedDeliveryDelayInMillis") or 0),
        )

    # --- namespaces ------------------------------------------------------------------------

    def namespace_policies(self, namespace: str) -> NamespacePolicies:
        value = self._rest.get(f"namespaces/{encoded(namespace)}")
        quotas = []
        for kind, quota in (value.get("backlog_quota_map") or {}).items():
            limit = quota.get("limitSize" if kind == BY_SIZE else "limitTime", -1)
            if limit > 0 or (limit == 0 and kind == BY_SIZE):  # others limit nothing
                quotas.append(BacklogQuota(kind, limit, str(quota.get("policy", ""))))
        return NamespacePolicies(
            subscription_expiration_min=value.get("subscription_expiration_time_minutes"),
            backlog_quotas=tuple(sorted(quotas, key=lambda quota: quota.type)),
            replication_clusters=frozenset(value.get("replication_clusters") or ()),
            encryption_required=bool(value.get("encryption_required")),
            subscription_prefix=value.get("subscription_auth_mode") == "Prefix",
            subscription_types=frozenset(value.get("subscription_types_enabled") or ()) or None,
            max_producers=value.get("max_producers_per_topic"),
        )

    def list_topics(self, namespace: str) -> list[TopicName]:
        """Return all partitions and all non-partitioned topics of a namespace, sorted."""
        return self._topics_at(f"persistent/{encoded(namespace)}")

    def list_partitioned_topics(self, namespace: str) -> list[TopicName]:
        return self._topics_at(f"persistent/{encoded(namespace)}/partitioned")

    def _topics_at(self, path: str) -> list[TopicName]:
        return sorted(map(TopicName.parse, self._rest.get(path) or ()))

    def list_namespaces(self, tenant: str) -> list[str]:
        return sorted(self._rest.get(f"namespaces/{encoded(tenant)}") or ())

    # --- topics ----------------------------------------------------------------------------

    def topic_exists(self, topic: TopicName) -> bool:
        try:
            # Brokers before 4.0 also report "0 partitions" for a topic that does not exist.
            if not self.partitioned_metadata(topic).partitions:
                self._rest.get(f"{topic.rest_path}/stats")
        except NotFoundError:
            return False
        return True

    def create_partitioned(
        self, topic: TopicName, partitions: int, properties: Mapping[str, str] | None = None
    ) -> None:
        if not partitions:
            self._rest.put(topic.rest_path, dict(properties or {}))
            return
        body = {"partitions": partitions, "properties": dict(properties or {})}
        self._rest.put(f"{topic.rest_path}/partitions", body, kind=_METADATA)

    def expand(self, topic: TopicName, partitions: int) -> None:
        self.partitioned_metadata(topic)  # for a missing topic the broker would answer 409
        self._rest.post(f"{topic.rest_path}/partitions", partitions)

    def delete(self, topic: TopicName, *, force: bool = False) -> None:
        end = "/partitions" if self.partitioned_metadata(topic).partitions else ""
        self._rest.delete(f"{topic.rest_path}{end}", force=str(force).lower())

    def terminate(self, topic: TopicName) -> None:
        end = "/partitions" if self.partitioned_metadata(topic).partitions else ""
        self._rest.post(f"{topic.rest_path}/terminate{end}")

    def unload(self, topic: TopicName) -> None:
        """Unload a topic or partition; the broker opens it again when it is used."""
        self._rest.put(f"{topic.rest_path}/unload")

    def properties(self, topic: TopicName) -> dict[str, str]:
        """Return the properties of a topic."""
        return dict(self._rest.get(f"{topic.rest_path}/properties") or {})

    def set_properties(self, topic: TopicName, properties: Mapping[str, str]) -> None:
        # Broker 4.0.8 never answers a request to set properties of a missing topic.
        self.partitioned_metadata(topic)
        self._rest.put(f"{topic.rest_path}/properties", dict(properties))
        # The broker that owns the topic has written them. The one that answers reads may not know
        # them for a moment.
        wanted, deadline = properties.items(), time.monotonic() + _VISIBLE_S
        while not wanted <= self.partitioned_metadata(topic).properties.items():
            if time.monotonic() > deadline:
                return  # another client has written meanwhile
            time.sleep(_BUSY_PAUSE_S)

    def topic_policies(self, topic: TopicName) -> TopicPolicies:
        path = topic.rest_path
        inactive = self._rest.get(f"{path}/inactiveTopicPolicies")
        clusters = self._rest.get(f"{path}/replication")
        return TopicPolicies(
            message_ttl_s=self._rest.get(f"{path}/messageTTL"),
            delete_while_inactive=inactive["deleteWhileInactive"] if inactive else None,
            replication_clusters=frozenset(clusters) if clusters else None,
            subscription_types=frozenset(self._rest.get(f"{path}/{_TYPES}") or ()) or None,
            **{field: self._rest.get(f"{path}/{name}") for field, name in _LIMITS.items()},
        )

    def retains(self, topic: TopicName) -> bool:
        value = (
            self._get_if(f"{topic.rest_path}/retention", _REFUSED, applied="true")
            or self._get_if(f"namespaces/{encoded(topic.namespace_path)}/retention", _REFUSED)
            or self._get_if("brokers/configuration/runtime", _REFUSED)
            or {}
        )
        age = value.get("retentionTimeInMinutes", value.get("defaultRetentionTimeInMinutes", 0))
        size = value.get("retentionSizeInMB", value.get("defaultRetentionSizeInMB", 0))
        return int(age) != 0 and int(size) != 0

    def max_message_size(self, topic: TopicName) -> int | None:
        return int(self._get_if(f"{topic.rest_path}/maxMessageSize", _REFUSED) or 0) or None

    def set_topic_policies(self, topic: TopicName, policies: TopicPolicies) -> None:
        path = topic.rest_path
        if policies.message_ttl_s is not None:
            # As a parameter: the broker would ignore a body, and still answer 204.
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
        if policies.subscription_types is not None:
            self._rest.post(f"{path}/{_TYPES}", sorted(policies.subscription_types))
        for field, name in _LIMITS.items():
            limit = getattr(policies, field)
            if limit is not None:
                self._rest.post(f"{path}/{name}", limit)

    # --- subscriptions and statistics --------------------------------------------------------

    def create_subscription(
        self, topic: TopicName, subscription: str, *, earliest: bool = True
    ) -> None:
        # With automatic topic creation the call itself would create a missing topic, unpartitioned.
        self.partitioned_metadata(topic)
        body = _EARLIEST if earliest else _LATEST
        path = topic.subscription_path(subscription)
        deadline = time.monotonic() + _BUSY_S
        while True:
            try:
                self._rest.put(path, body)
                return
            except AdminError as error:
                if not _BUSY.search(error.reason) or time.monotonic() > deadline:
                    raise
            time.sleep(_BUSY_PAUSE_S)

    def subscriptions(self, topic: TopicName) -> list[str]:
        """Return the names of a topic's subscriptions, sorted."""
        return sorted(self._rest.get(f"{topic.rest_path}/subscriptions") or ())

    def expire_messages(self, partition: TopicName, subscription: str, older_than_s: int) -> None:
        path = partition.subscription_path(subscription)
        with suppress(ConflictError):  # the broker is doing it already
            self._rest.post(f"{path}/expireMessages/{older_than_s}")

    def delete_subscription(
        self, topic: TopicName, subscription: str, *, force: bool = False
    ) -> None:
        """Delete a subscription of a topic, with the messages that only it has retained."""
        self._rest.delete(topic.subscription_path(subscription), force=str(force).lower())

    def partition_stats(self, partition: TopicName) -> PartitionStats:
        return _partition_stats(self._rest.get(f"{partition.rest_path}/stats", **_STATS))

    def partitioned_stats(self, topic: TopicName) -> dict[int, PartitionStats]:
        found: dict[int, PartitionStats] = {}
        partitions = None
        if time.monotonic() >= self._one_by_one_until_s:
            path = f"{topic.rest_path}/partitioned-stats"
            try:
                value = self._rest.within(_ALL_S).get(path, perPartition="true", **_STATS)
            except BrokerUnreachableError:
                self._one_by_one_until_s = time.monotonic() + _ONE_BY_ONE_S
            else:
                partitions = int((value.get("metadata") or {}).get("partitions", 0))
                for name, stats in value["partitions"].items():
                    index = TopicName.parse(name).partition_index
                    if index is not None and stats:
                        found[index] = _partition_stats(stats)
        if partitions is None:
            partitions = self.partitioned_metadata(topic).partitions
            if not partitions:
                raise NotFoundError(f"{topic.full} has no partitions", status=404)

        def ask(index: int) -> PartitionStats | None:
            try:
                return self.within(_ONE_S).partition_stats(topic.partition(index))
            except NotFoundError:
                return None

        missing = [index for index in range(partitions) if index not in found]
        answers = zip(missing, in_parallel(ask, missing), strict=True)
        return found | {index: stats for index, stats in answers if stats}

    # --- stored messages ---------------------------------------------------------------------

    def partitioned_metadata(self, topic: TopicName) -> TopicMetadata:
        value = self._rest.get(f"{topic.rest_path}/partitions", checkAllowAutoCreation="false")
        return TopicMetadata(int(value["partitions"]), value.get("properties") or {})

    def internal_stats(self, partition: TopicName) -> dict[str, Any]:
        """Return the broker's own description of the ledgers and cursors of one partition.

        An open ledger has 0 entries there; ``currentLedgerEntries`` has their number.
        """
        return dict(self._rest.get(f"{partition.rest_path}/internalStats"))

    def contents(self, partition: TopicName) -> tuple[list[LedgerInfo], int]:
        value = self.internal_stats(partition)
        found = [
            LedgerInfo(item["ledgerId"], item["entries"], size=item.get("size", 0))
            for item in value["ledgers"]
        ]
        if found:
            # The open ledger has 0 entries and bytes in the list.
            last = found[-1]
            entries = max(last.entries, value.get("currentLedgerEntries", 0))
            size = max(last.size, value.get("currentLedgerSize", 0))
            found[-1] = LedgerInfo(last.ledger, entries, size=size)
        return found, int(value.get("entriesAddedCounter", 0))

    def mark_delete_position(self, partition: TopicName, subscription: str) -> Position:
        return Position.parse(self._cursor(partition, subscription)["markDeletePosition"])

    def acknowledged_ranges(
        self, partition: TopicName, subscription: str
    ) -> tuple[AcknowledgedRange, ...]:
        text = self._cursor(partition, subscription).get("individuallyDeletedMessages", "")
        return tuple(
            AcknowledgedRange(int(ledger), int(before) + 1 if ledger == first else 0, int(last))
            for first, before, ledger, last in _RANGE.findall(text)
        )

    def _cursor(self, partition: TopicName, subscription: str) -> Mapping[str, Any]:
        cursors = self.internal_stats(partition)["cursors"]
        if subscription not in cursors:
            reason = f"{partition} has no subscription {subscription!r}"
            raise NotFoundError(reason, status=404, reason=reason)
        return dict(cursors[subscription])

    def last_message_id(self, partition: TopicName) -> Position | None:
        position = _position(self._rest.get(f"{partition.rest_path}/lastMessageId"))
        return position if position.entry >= 0 else None

    def open_transaction_at(self, partition: TopicName) -> Position | None:
        stats = self._rest.get(f"{partition.rest_path}/stats", **_STATS)
        if not stats.get("ongoingTxnCount"):
            return None
        path = partition.rest_path.removeprefix("persistent/")
        path = f"transactions/transactionBufferStats/{path}"
        answer = self._rest.request("GET", path, api="v3")
        return Position.parse(answer.json()["maxReadPosition"]).next_entry

    def message_id_at(self, partition: TopicName, publish_ms: int) -> Position | None:
        path = f"{partition.rest_path}/messageid/{max(publish_ms, 0)}"
        position = _position(self._rest.get(path)).entry_start
        # Past the end the broker returns the position of the next message.
        last = self.last_message_id(partition)
        return position if last is not None and position <= last else None

    # --- schemas -----------------------------------------------------------------------------

    def schemas(self, topic: TopicName) -> list[SchemaVersion]:
        path = topic.rest_path.removeprefix("persistent/")
        try:
            value = self._rest.get(f"schemas/{path}/schemas")
        except NotFoundError:
            return []
        versions = [
            SchemaVersion(item["type"], item.get("data") or "", int(item["version"]))
            for item in value["getSchemaResponses"]
        ]
        return sorted(versions, key=lambda schema: schema.version)

    def _get_if(self, path: str, refused: tuple[int, ...], **query: str) -> Any:
        """Return an answer; None if its status is one of ``refused``."""
        try:
            return self._rest.get(path, **query)
        except AdminError as error:
            if error.status in refused:
                return None
            raise


# --- values of the port from the answers ----------------------------------------------------


def _position(value: Mapping[str, int]) -> Position:
    return Position(value["ledgerId"], value["entryId"], value.get("batchIndex", -1))


# Other states are transitions.
_DEDUPLICATION = {"Enabled": True, "Disabled": False}


def _partition_stats(value: Mapping[str, Any]) -> PartitionStats:
    """Read the statistics of one partition."""
    subscriptions = {}
    for name, item in value["subscriptions"].items():
        oldest = item.get("earliestMsgPublishTimeInBacklog", -1)
        backlog = item["msgBacklog"]
        subscriptions[name] = SubscriptionStats(
            backlog_entries=backlog,
            oldest_publish_ms=oldest if oldest > 0 and backlog > 0 else None,
            type=item.get("type") or "None",
            durable=item.get("isDurable", True),
            consumers=tuple(
                ClientStats(
                    name=consumer.get("consumerName") or "",
                    address=(consumer.get("address") or "").removeprefix("/"),
                    properties=dict(consumer.get("metadata") or {}),
                )
                for consumer in item.get("consumers") or ()
            ),
            acknowledged_ms=item.get("lastMarkDeleteAdvancedTimestamp") or None,
        )
    return PartitionStats(
        storage_bytes=value["storageSize"],
        subscriptions=subscriptions,
        deduplication=_DEDUPLICATION.get(value.get("deduplicationStatus") or ""),
        messages_in=value.get("msgInCounter", 0),
        publishers=tuple(
            ClientStats(
                name=item.get("producerName") or "",
                properties=dict(item.get("metadata") or {}),
            )
            for item in value.get("publishers") or ()
        ),
        replicated=bool(value.get("replication")),
    )


def _default_quotas(value: Mapping[str, str]) -> tuple[BacklogQuota, ...]:
    if _flag(value, "backlogQuotaCheckEnabled") is False:
        return ()
    policy = value.get("backlogQuotaDefaultRetentionPolicy", "")
    size = _number(value, "backlogQuotaDefaultLimitBytes") or 0
    if size <= 0:
        size = int(float(value.get("backlogQuotaDefaultLimitGB") or 0) * (1 << 30))
    age = _number(value, "backlogQuotaDefaultLimitSecond") or 0
    quotas = []
    if size > 0:
        quotas.append(BacklogQuota(BY_SIZE, size, policy))
    if age > 0:
        quotas.append(BacklogQuota("message_age", age, policy))
    return tuple(quotas)


def _flag(value: Mapping[str, str], name: str) -> bool | None:
    text = value.get(name)
    return None if text is None else text == "true"


def _number(value: Mapping[str, str], name: str) -> int | None:
    text = value.get(name)
    return int(text) if text and text.lstrip("-").isdigit() else None
