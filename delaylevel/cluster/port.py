"""The port to the admin interface of a cluster.

Two adapters implement it: :class:`~delaylevel.cluster.admin.Admin` over the admin REST interface,
and the in-memory Pulsar of :mod:`delaylevel.testing`. The contract suite tests both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from delaylevel.model.position import Position
from delaylevel.model.topic_name import TopicName

from .values import (
    AcknowledgedRange,
    BrokerSettings,
    LedgerInfo,
    NamespacePolicies,
    PartitionStats,
    SchemaVersion,
    TopicMetadata,
    TopicPolicies,
)


class TopicAdmin(Protocol):
    """Calls of a cluster's admin interface that producers, movers and dispatchers need.

    Any number of threads may use an implementation at once. No call acknowledges, moves or expires
    a message, except ``expire_messages``, and only the ``create_…`` calls create a topic. Unless a
    method documents otherwise, calls raise :class:`~delaylevel.errors.NotFoundError` for a topic,
    namespace or position that does not exist, and
    :class:`~delaylevel.errors.BrokerUnreachableError` without an answer.

    A "topic" is any persistent topic without a partition number. A "partition" is one partition
    (``…-partition-3``), or a topic that is not partitioned.
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

    def list_topics(self, namespace: str) -> list[TopicName]:
        """Return all partitions and all non-partitioned topics of a namespace, sorted."""

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


class OperatorAdmin(TopicAdmin, Protocol):
    """Further calls, for operators: expanding, inspecting and deleting topics."""

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
