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
    """Metadata of a topic.

    Attributes:
        partitions: number of partitions; 0 for a topic that is not partitioned.
        properties: the topic's own properties.
    """

    partitions: int
    properties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SchemaVersion:
    """One version of a topic's schema.

    Attributes:
        type: Pulsar's name of the type: ``AVRO``, ``JSON``, ``STRING`` …
        definition: the definition as text; empty for primitive types.
        version: the number of the version, from 0.
        properties: the schema's properties.
    """

    type: str
    definition: str
    version: int
    properties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LedgerInfo:
    """One ledger of a partition.

    Attributes:
        ledger: the ledger ID.
        entries: number of entries, including acknowledged ones.
        size: number of bytes of these entries; 0 if it is unknown.
    """

    ledger: int
    entries: int
    size: int = field(default=0, compare=False)


@dataclass(frozen=True)
class ClientStats:
    """One connected consumer or producer.

    Attributes:
        name: its name; generated unless the application sets it.
        address: the address of the client, ``host:port``; empty for a producer.
        connected_since: time of the connection as the broker writes it, ISO-8601; may be empty.
        properties: its own properties.
    """

    name: str
    address: str = ""
    connected_since: str = ""
    properties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SubscriptionStats:
    """One subscription of a partition.

    Attributes:
        backlog_entries: number of entries that are not acknowledged. A batch is one entry.
        oldest_publish_ms: publish time of the oldest entry that is not acknowledged, ms since the
            epoch; None without a backlog.
        type: ``Exclusive``, ``Shared``, ``Failover``, ``Key_Shared``; ``None`` if it had no
            consumer since the broker opened the partition.
        durable: True if it survives its consumers.
        consumers: the connected consumers.
        messages_out: number of messages delivered since the broker opened the partition.
        acknowledged_ms: time of the last cumulative progress since the broker opened the
            partition, ms since the epoch; None without any.
    """

    backlog_entries: int
    oldest_publish_ms: int | None = None
    type: str = "None"
    durable: bool = True
    consumers: tuple[ClientStats, ...] = ()
    messages_out: int = 0
    acknowledged_ms: int | None = None


@dataclass(frozen=True)
class PartitionStats:
    """Statistics of one partition, or of a topic that is not partitioned.

    Attributes:
        storage_bytes: size of its ledgers, including acknowledged entries that still exist.
        subscriptions: statistics of its subscriptions, by name.
        deduplication: True if the broker drops messages that a named producer sends twice; None
            if unknown.
        messages_in: number of messages published since the broker opened it.
        publishers: the connected producers, with their settings as far as the broker tells them.
        replicated: True if the broker copies its messages to another cluster.
    """

    storage_bytes: int
    subscriptions: Mapping[str, SubscriptionStats]
    deduplication: bool | None = None
    messages_in: int = 0
    publishers: tuple[ClientStats, ...] = ()
    replicated: bool = False


#: All types of subscriptions, as the broker calls them.
SUBSCRIPTION_TYPES = frozenset({"Exclusive", "Failover", "Shared", "Key_Shared"})


@dataclass(frozen=True, kw_only=True)
class ClientLimits:
    """Limits of the clients of a topic; None for the limit of the next higher place.

    A topic's own limits override those of its namespace, and these the broker's. 0 is no limit.

    Attributes:
        subscription_types: types of subscriptions that are allowed.
        max_producers: number of producers of a partition at the same time.
    """

    subscription_types: frozenset[str] | None = None
    max_producers: int | None = None


@dataclass(frozen=True)
class TopicPolicies(ClientLimits):
    """Policies of a single topic; None for a policy that is unset, or left unchanged.

    Attributes:
        max_consumers: number of consumers and readers of a partition.
        max_consumers_per_subscription: number of consumers of one subscription.
        max_subscriptions: number of subscriptions of a partition; each reader has one.
        message_ttl_s: seconds after which unacknowledged messages expire; 0 for never.
        delete_while_inactive: True if the broker may delete the topic while nobody is connected.
        replication_clusters: the clusters that have its messages, including its own.
        deduplication: True to drop messages that a named producer sends twice. It takes effect
            later: see :class:`PartitionStats`. ``topic_policies()`` does not return it.
    """

    message_ttl_s: int | None = None
    delete_while_inactive: bool | None = None
    replication_clusters: frozenset[str] | None = None
    deduplication: bool | None = None
    max_consumers: int | None = None
    max_consumers_per_subscription: int | None = None
    max_subscriptions: int | None = None


#: The type of a backlog quota that limits the size.
BY_SIZE = "destination_storage"


@dataclass(frozen=True)
class BacklogQuota:
    """Limit of the unacknowledged messages in each topic of a namespace.

    Attributes:
        type: ``destination_storage`` (by size) or ``message_age`` (by time).
        limit: maximum size in bytes, or maximum age in seconds.
        policy: ``producer_request_hold``, ``producer_exception`` or ``consumer_backlog_eviction``.
    """

    type: str
    limit: int
    policy: str

    @property
    def by_size(self) -> bool:
        """True if it limits the size."""
        return self.type == BY_SIZE


@dataclass(frozen=True)
class NamespacePolicies(ClientLimits):
    """Policies of a namespace; None for the broker's default.

    Attributes:
        subscription_expiration_min: minutes after which an unused subscription is deleted; 0 for
            never.
        backlog_quotas: the namespace's own quotas, without those that limit nothing.
        replication_clusters: the clusters that have its messages, including its own.
        encryption_required: True if producers that do not encrypt are refused.
        subscription_prefix: True if the name of a subscription must begin with the consumer's role.
    """

    subscription_expiration_min: int | None = None
    backlog_quotas: tuple[BacklogQuota, ...] = ()
    replication_clusters: frozenset[str] = frozenset()
    encryption_required: bool = False
    subscription_prefix: bool = False


@dataclass(frozen=True)
class BrokerSettings(ClientLimits):
    """The relevant part of the broker's own configuration; None without permission to read it.

    Attributes:
        cluster: the name of the cluster.
        topic_policies: True if policies can be set for single topics.
        max_partitions: maximum number of partitions of a topic; 0 for no limit.
        subscription_expiration_min: the default for namespaces; 0 for never.
        backlog_quotas: the defaults for namespaces, without those that limit nothing.
        encryption_required: True if producers that do not encrypt are refused.
        authorization: True if roles have rights only where they were granted.
    """

    cluster: str | None = None
    topic_policies: bool | None = None
    max_partitions: int | None = None
    subscription_expiration_min: int | None = None
    backlog_quotas: tuple[BacklogQuota, ...] = ()
    encryption_required: bool | None = None
    authorization: bool | None = None


@dataclass(frozen=True)
class DelayedDelivery:
    """Delayed-delivery policy of a topic.

    Attributes:
        active: False if the broker delivers delayed messages at once.
        tick_ms: precision of the delivery time, ms.
        max_delay_ms: longest delay that the broker accepts, ms; 0 for no limit.
        fixed_delay_ms: delay of every message, whatever its own delivery time, ms; 0 for none.
    """

    active: bool
    tick_ms: int
    max_delay_ms: int = 0
    fixed_delay_ms: int = 0


@dataclass(frozen=True)
class AcknowledgedRange:
    """Range of entries that are acknowledged individually, after the mark-delete position.

    Attributes:
        ledger: the ledger of the entries.
        first, last: the first and the last entry.
    """

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
    namespace or position that does not exist, and
    :class:`~delaylevel.errors.BrokerUnreachableError` without an answer.

    A "topic" is any persistent topic without a partition number. A "partition" is one partition
    (``…-partition-3``), or a topic that is not partitioned.
    """

    def within(self, timeout_s: float) -> TopicAdmin:
        """Return the same interface for callers that wait no longer than this for an answer."""

    def contents(self, partition: TopicName) -> tuple[list[LedgerInfo], int]:
        """Return a partition's ledgers, and its number of entries since the broker opened it."""

    def messages_in(self, topic: TopicName) -> dict[TopicName, int]:
        """Return the number of messages published to each partition since the broker opened it.

        A topic without partitions counts as its own partition; a missing topic has none.
        """

    def topic_exists(self, topic: TopicName) -> bool:
        """Return true if the topic exists, partitioned or not; never create it.

        A partition exists if the topic was created or expanded with it. The answer is also False
        if the namespace does not exist.
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

        Args:
            force: True to disconnect producers and consumers first.

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

        Partitions that have it already keep its position.

        Args:
            earliest: True to start at the first stored message; otherwise after the last one.

        Raises:
            ConflictError: every partition has it already; nothing was changed.
            NotFoundError: the topic does not exist; it is not created.
        """

    def last_message_id(self, partition: TopicName) -> Position | None:
        """Return the position of a partition's last message (batch -1: unbatched).

        None if nothing is stored. The message may be acknowledged already.
        """

    def open_transaction_at(self, partition: TopicName) -> Position | None:
        """Return the end of what readers get of a partition because a transaction is open.

        None if none is. The broker delivers nothing that was stored after the first message of an
        open transaction, of other producers either.
        """

    def message_id_at(self, partition: TopicName, publish_ms: int) -> Position | None:
        """Return the start of the first entry published at or after a time; None if there is none.

        Publish times are the producers' own, and the search is binary: if they are not in order,
        the result may be off by the difference of the clocks. A batch has the publish time of its
        first message. The entry may be acknowledged already.

        Args:
            publish_ms: the time, ms since the epoch.
        """

    def ledgers(self, partition: TopicName) -> list[LedgerInfo]:
        """Return the existing ledgers of a partition with their numbers of entries, oldest first.

        The open ledger has the entries that are in it now.
        """

    def mark_delete_position(self, partition: TopicName, subscription: str) -> Position:
        """Return the position up to which a subscription has acknowledged everything.

        Its entry is -1 if nothing of the ledger is acknowledged.

        Raises:
            NotFoundError: the partition or the subscription does not exist.
        """

    def expire_messages(self, partition: TopicName, subscription: str, older_than_s: int) -> None:
        """Acknowledge the messages of a subscription that were published long ago.

        Args:
            older_than_s: least age of a message, in s. The broker stops at the first newer one.
        """

    def schemas(self, topic: TopicName) -> list[SchemaVersion]:
        """Return every version of the topic's schema, oldest first.

        Empty if the topic has no schema or does not exist.
        """

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
        """Return True if the broker keeps what is published to a topic without subscriptions.

        That is its retention. False, too, if this role may not read it.
        """

    def max_message_size(self, topic: TopicName) -> int | None:
        """Return the topic's own limit for an entry, in bytes; None without one."""

    def set_topic_policies(self, topic: TopicName, policies: TopicPolicies) -> None:
        """Set policies of a topic; :meth:`topic_policies` returns them a moment later.

        Raises:
            AdminError: 405 if the broker has no policies for single topics.
        """

    def expand(self, topic: TopicName, partitions: int) -> None:
        """Add partitions to a partitioned topic, with its subscriptions.

        Args:
            partitions: the new number of partitions.

        Raises:
            AdminError: 422 if it has more already.
        """

    def terminate(self, topic: TopicName) -> None:
        """Terminate a topic, partitioned or not: for ever, it refuses messages.

        Raises:
            NotFoundError: it does not exist.
        """

    def acknowledged_ranges(
        self, partition: TopicName, subscription: str
    ) -> tuple[AcknowledgedRange, ...]:
        """Return the entries acknowledged after the mark-delete position, in order.

        Raises:
            NotFoundError: the partition or the subscription does not exist.
        """
