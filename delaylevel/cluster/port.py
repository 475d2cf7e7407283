"""The port to the admin interface of a cluster, and the values that it returns.

Two adapters implement it: :class:`~delaylevel.cluster.rest.admin.Admin` over the admin REST
interface, and the in-memory Pulsar of :mod:`delaylevel.testing`. The contract suite tests both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from delaylevel.model.position import Position
from delaylevel.model.topic_name import TopicName


@dataclass(frozen=True)
class TopicMetadata:
    """Number of partitions (0 if it is not partitioned) and own properties of a topic."""

    partitions: int
    properties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SchemaVersion:
    """One version of a topic's schema."""

    type: str  # Pulsar's name: `AVRO`, `JSON`, `STRING` …
    definition: str  # empty for primitive types
    version: int  # from 0


@dataclass(frozen=True)
class LedgerInfo:
    """One ledger of a partition; acknowledged entries count, too."""

    ledger: int
    entries: int
    size: int = field(default=0, compare=False)  # bytes; 0 if it is unknown


@dataclass(frozen=True)
class ClientStats:
    """One connected consumer or producer."""

    name: str  # generated unless the application sets it
    address: str = ""  # `host:port`; empty for a producer
    properties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SubscriptionStats:
    """One subscription of a partition."""

    backlog_entries: int  # that are not acknowledged; a batch is one entry
    oldest_publish_ms: int | None = None  # of these entries
    type: str = "None"  # if it had no consumer since the broker opened the partition
    durable: bool = True
    consumers: tuple[ClientStats, ...] = ()
    acknowledged_ms: int | None = None  # last cumulative progress since the broker opened it


@dataclass(frozen=True)
class PartitionStats:
    """Statistics of one partition, or of a topic that is not partitioned."""

    storage_bytes: int  # of its ledgers, including acknowledged entries that still exist
    subscriptions: Mapping[str, SubscriptionStats]
    deduplication: bool | None = None  # of what a named producer sends twice; None if unknown
    messages_in: int = 0  # published since the broker opened it
    publishers: tuple[ClientStats, ...] = ()
    replicated: bool = False  # to another cluster


#: All types of subscriptions, as the broker calls them.
SUBSCRIPTION_TYPES = frozenset({"Exclusive", "Failover", "Shared", "Key_Shared"})


@dataclass(frozen=True)
class TopicPolicies:
    """Policies of a single topic; None is unset, or left unchanged, and a maximum of 0 no limit."""

    subscription_types: frozenset[str] | None = None
    max_producers: int | None = None  # of a partition, as the others
    message_ttl_s: int | None = None  # 0: messages never expire
    delete_while_inactive: bool | None = None  # True: it may be deleted while nobody is connected
    replication_clusters: frozenset[str] | None = None  # including its own
    max_consumers: int | None = None  # readers count, too
    max_consumers_per_subscription: int | None = None
    max_subscriptions: int | None = None  # each reader has one


#: The type of a backlog quota that limits the size.
BY_SIZE = "destination_storage"


@dataclass(frozen=True)
class BacklogQuota:
    """Limit of the unacknowledged messages in each topic of a namespace."""

    type: str  # `destination_storage` (by size) or `message_age` (by time)
    limit: int  # bytes or seconds
    policy: str  # `producer_request_hold`, `producer_exception` or `consumer_backlog_eviction`


@dataclass(frozen=True)
class NamespacePolicies:
    """Policies of a namespace; None for the broker's default."""

    subscription_expiration_min: int | None = None  # 0: unused subscriptions are never deleted
    backlog_quotas: tuple[BacklogQuota, ...] = ()  # its own, without those that limit nothing
    replication_clusters: frozenset[str] = frozenset()  # including its own
    encryption_required: bool = False  # of producers
    subscription_prefix: bool = False  # a subscription's name must begin with the consumer's role
    subscription_types: frozenset[str] | None = None
    max_producers: int | None = None


@dataclass(frozen=True)
class BrokerSettings:
    """The relevant part of the broker's own configuration; None without permission to read it."""

    cluster: str | None = None
    topic_policies: bool | None = None  # True if policies can be set for single topics
    max_partitions: int | None = None  # 0: no limit
    # Defaults for namespaces.
    subscription_expiration_min: int | None = None  # 0: unused subscriptions are never deleted
    backlog_quotas: tuple[BacklogQuota, ...] = ()
    encryption_required: bool | None = None
    subscription_types: frozenset[str] | None = None
    max_producers: int | None = None
    authorization: bool | None = None  # True if roles have rights only where they were granted


@dataclass(frozen=True)
class DelayedDelivery:
    """Delayed-delivery policy of a topic."""

    active: bool  # False: delayed messages are delivered at once
    tick_ms: int  # precision of the delivery time
    max_delay_ms: int = 0  # 0 for no limit
    fixed_delay_ms: int = 0  # of every message, whatever its own delivery time; 0 for none


@dataclass(frozen=True)
class AcknowledgedRange:
    """Range of entries, with its ends, that are acknowledged after the mark-delete position."""

    ledger: int
    first: int
    last: int

    def __contains__(self, position: Position) -> bool:
        return position.ledger == self.ledger and self.first <= position.entry <= self.last


class TopicAdmin(Protocol):
    """Calls of a cluster's admin interface that all parts but `doctor` need.

    Any number of threads may use an implementation at once. No call acknowledges, moves or expires
    a message, except ``expire_messages``, and only the ``create_…`` calls create a topic. Unless a
    method documents otherwise, calls raise :class:`~delaylevel.errors.NotFoundError` for a topic,
    namespace, subscription or position that does not exist, and
    :class:`~delaylevel.errors.BrokerUnreachableError` without an answer.

    A "topic" is any persistent topic without a partition number. A "partition" is one partition
    (``…-partition-3``), or a topic that is not partitioned.
    """

    def within(self, timeout_s: float) -> TopicAdmin:
        """Return the same interface for callers that wait no longer than this for an answer."""

    def contents(self, partition: TopicName) -> tuple[list[LedgerInfo], int]:
        """Return a partition's ledgers, and its number of entries since the broker opened it."""

    def topic_exists(self, topic: TopicName) -> bool:
        """Return True if the topic, partitioned or not, or the partition exists; never create it.

        The answer is also False if the namespace does not exist.
        """

    def partitioned_metadata(self, topic: TopicName) -> TopicMetadata:
        """Return the number of partitions (0 if not partitioned) and the properties of a topic."""

    def create_partitioned(
        self, topic: TopicName, partitions: int, properties: Mapping[str, str] | None = None
    ) -> None:
        """Create a partitioned topic with all its partitions and properties, in one step.

        With 0 partitions, create a topic that is not partitioned. If several callers do it at the
        same time, one succeeds.

        Raises:
            ConflictError: a topic of that name exists, partitioned or not; nothing was changed.
            NotFoundError: the namespace does not exist.
            AdminError: 406 if the broker's limit of partitions is exceeded.
        """

    def delete(self, topic: TopicName, *, force: bool = False) -> None:
        """Delete a topic, partitioned or not, with its data and subscriptions.

        With ``force``, disconnect producers and consumers first.

        Raises:
            ConflictError: a client is connected, and ``force`` is False. Partitions without a
                client may be deleted already.
        """

    def set_properties(self, topic: TopicName, properties: Mapping[str, str]) -> None:
        """Set properties of a topic; keep the others.

        Two callers that set different properties at the same time both succeed. Later reads
        through the same implementation return the new values, unless another caller changes them.
        """

    def create_subscription(
        self, topic: TopicName, subscription: str, *, earliest: bool = True
    ) -> None:
        """Create a durable subscription on every partition of a topic.

        It begins at the first stored message, or after the last one if not ``earliest``.
        Partitions that have it already keep its position.

        Raises:
            ConflictError: every partition has it already; nothing was changed.
            NotFoundError: the topic does not exist; it is not created.
        """

    def last_message_id(self, partition: TopicName) -> Position | None:
        """Return the position of a partition's last message (batch -1: unbatched), if any.

        The message may be acknowledged already.
        """

    def open_transaction_at(self, partition: TopicName) -> Position | None:
        """Return the end of what readers get of a partition because a transaction is open.

        None if none is. The broker delivers nothing that was stored after the first message of an
        open transaction, of other producers either.
        """

    def message_id_at(self, partition: TopicName, publish_ms: int) -> Position | None:
        """Return the start of the first entry published at or after a time (ms), if any.

        Publish times are the producers' own, and the search is binary: if they are not in order,
        the result may be off by the difference of the clocks. A batch has the publish time of its
        first message. The entry may be acknowledged already.
        """

    def ledgers(self, partition: TopicName) -> list[LedgerInfo]:
        """Return the existing ledgers of a partition with their numbers of entries, oldest first.

        The open ledger has the entries that are in it now.
        """
        return self.contents(partition)[0]

    def mark_delete_position(self, partition: TopicName, subscription: str) -> Position:
        """Return the position up to which a subscription has acknowledged everything.

        Its entry is -1 if nothing of the ledger is acknowledged.
        """

    def expire_messages(self, partition: TopicName, subscription: str, older_than_s: int) -> None:
        """Acknowledge a subscription's messages of at least this age, up to the first newer one."""

    def schemas(self, topic: TopicName) -> list[SchemaVersion]:
        """Return every version of the topic's schema, oldest first; none if there is no topic."""

    def partition_stats(self, partition: TopicName) -> PartitionStats:
        """Return the statistics of one partition."""

    def partitioned_stats(self, topic: TopicName) -> Mapping[int, PartitionStats]:
        """Return the statistics of all partitions of a partitioned topic, by partition number.

        Partitions that the broker does not report are missing.
        """

    def list_partitioned_topics(self, namespace: str) -> list[TopicName]:
        """Return the partitioned topics of a namespace (``tenant/namespace``), sorted."""

    def list_namespaces(self, tenant: str) -> list[str]:
        """Return the namespaces of a tenant (``tenant/namespace``), sorted."""

    def namespace_policies(self, namespace: str) -> NamespacePolicies:
        """Return the policies of a namespace (``tenant/namespace``)."""

    def broker_settings(self) -> BrokerSettings:
        """Return the broker's own configuration; all None without permission to read it."""

    def topic_policies(self, topic: TopicName) -> TopicPolicies:
        """Return the policies that are set for the topic itself."""

    def retains(self, topic: TopicName) -> bool:
        """Return True if a topic has a retention, so that it keeps messages without subscriptions.

        False, too, if this role may not read it.
        """

    def max_message_size(self, topic: TopicName) -> int | None:
        """Return the topic's own limit for an entry, in bytes; None without one."""

    def set_topic_policies(self, topic: TopicName, policies: TopicPolicies) -> None:
        """Set policies of a topic; :meth:`topic_policies` returns them a moment later.

        Raises:
            AdminError: 405 if the broker has no policies for single topics.
        """

    def expand(self, topic: TopicName, partitions: int) -> None:
        """Expand a partitioned topic, with its subscriptions, to this number of partitions.

        Raises:
            AdminError: 422 if it has more already.
        """

    def terminate(self, topic: TopicName) -> None:
        """Let a topic, partitioned or not, refuse messages for ever; stored ones can be read."""

    def acknowledged_ranges(
        self, partition: TopicName, subscription: str
    ) -> tuple[AcknowledgedRange, ...]:
        """Return the entries acknowledged after the mark-delete position, in order."""
