"""The port through which the package asks a cluster about topics, and makes them.

Two adapters implement it: :class:`~delaylevel.cluster.admin.Admin` over the admin REST interface,
and the in-memory Pulsar of :mod:`delaylevel.testing`. The contract suite holds both to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from delaylevel.model.position import Position
from delaylevel.model.topic_name import TopicName

from .values import (
    NO_PROPERTIES,
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
    """What the package needs to know of topics, and to do with them.

    An implementation may be used by many threads at once. No call acknowledges, moves or expires
    a message, and none but the ``create_…`` calls makes a topic. Where a topic, namespace or
    position does not exist, :class:`~delaylevel.errors.NotFoundError` is raised unless the method
    says otherwise; where nothing answers, :class:`~delaylevel.errors.BrokerUnreachableError`.

    "Topic" is any persistent topic without a partition's number. "Partition" is one partition
    (``…-partition-3``), or a topic that is not partitioned.
    """

    def topic_exists(self, topic: TopicName) -> bool:
        """Say whether the topic exists, partitioned or not; never creates it.

        A partition exists when the topic has been made with it. False, too, where the namespace
        does not exist.
        """
        ...

    def partitioned_metadata(self, topic: TopicName) -> TopicMetadata:
        """Return partitions (0: not partitioned) and properties of a topic that exists."""
        ...

    def create_partitioned(
        self, topic: TopicName, partitions: int, properties: Mapping[str, str] = NO_PROPERTIES
    ) -> None:
        """Create a partitioned topic and all its partitions, with its properties at once.

        Of several callers at the same time one succeeds.

        Raises:
            ConflictError: a topic of that name exists, partitioned or not; nothing was changed.
            NotFoundError: the namespace does not exist.
            AdminError: 406 where the broker's limit of partitions is exceeded.
        """
        ...

    def set_properties(self, topic: TopicName, properties: Mapping[str, str]) -> None:
        """Set properties of a topic; those that are not named stay as they are.

        Two callers that set different properties at the same time both succeed.
        """
        ...

    def create_subscription(
        self, topic: TopicName, subscription: str, *, earliest: bool = True
    ) -> None:
        """Create a durable subscription on every partition of a topic that exists.

        Partitions that have it already keep it where it is; the others get it.

        Args:
            earliest: it starts at the first message that is stored; otherwise behind the last.

        Raises:
            ConflictError: every partition has it already; nothing was changed.
            NotFoundError: there is no such topic; it is not created.
        """
        ...

    def last_message_id(self, partition: TopicName) -> Position | None:
        """Return the position of a partition's last message (batch -1: unbatched).

        None where nothing is stored. What it names may be acknowledged already.
        """
        ...

    def message_id_at(self, partition: TopicName, publish_ms: int) -> Position | None:
        """Return the front of the first entry published at or after a time, or None for none.

        Publish times are the producers' own, and the search is binary: where they do not rise it
        may be off by as much as the clocks differ. A batch counts with its first message. The
        entry may be acknowledged already. Only for one partition.

        Args:
            publish_ms: milliseconds since the epoch.
        """
        ...

    def entry_publish_time(self, partition: TopicName, position: Position) -> int | None:
        """Return when an entry was published (ms since the epoch), or None if it is not there.

        The batch index of the position does not count.
        """
        ...

    def ledgers(self, partition: TopicName) -> list[LedgerInfo]:
        """Return the ledgers that a partition still has, oldest first, with what is in each.

        The open ledger counts with the entries that it holds now.
        """
        ...

    def mark_delete_position(self, partition: TopicName, subscription: str) -> Position:
        """Return the last position up to which a subscription has acknowledged everything.

        Its entry is -1 where nothing of the ledger is acknowledged.

        Raises:
            NotFoundError: the partition or the subscription does not exist.
        """
        ...

    def schemas(self, topic: TopicName) -> list[SchemaVersion]:
        """Return every version of the topic's schema, oldest first; empty if it has none.

        Empty, too, where there is no such topic.
        """
        ...

    def partition_stats(self, partition: TopicName) -> PartitionStats:
        """Return the figures of one partition."""
        ...

    def partitioned_stats(self, topic: TopicName) -> Mapping[int, PartitionStats]:
        """Return the figures of all partitions of a partitioned topic, by number.

        A partition that could not be asked is missing.
        """
        ...

    def list_partitioned_topics(self, namespace: str) -> list[TopicName]:
        """Return the partitioned topics of a namespace (``tenant/namespace``), sorted."""
        ...

    def namespace_policies(self, namespace: str) -> NamespacePolicies:
        """Return what applies to the topics of a namespace (``tenant/namespace``)."""
        ...

    def broker_settings(self) -> BrokerSettings:
        """Return the broker's own configuration; all None where it may not be read."""
        ...

    def topic_policies(self, topic: TopicName) -> TopicPolicies:
        """Return the policies that are set for this very topic."""
        ...

    def set_topic_policies(self, topic: TopicName, policies: TopicPolicies) -> None:
        """Set policies of a topic; they show in :meth:`topic_policies` soon after, not at once.

        Raises:
            AdminError: 405 where the broker has no policies for single topics.
        """
        ...


class OperatorAdmin(TopicAdmin, Protocol):
    """What operators do beyond that: they widen level topics, look into them, and delete them."""

    def expand(self, topic: TopicName, partitions: int) -> None:
        """Give a partitioned topic more partitions; the new ones get its subscriptions.

        Raises:
            AdminError: 422 where it has more already.
        """
        ...

    def delete(self, topic: TopicName, *, force: bool = False) -> None:
        """Delete a topic, partitioned or not, with its data and subscriptions.

        Raises:
            ConflictError: somebody is connected, and ``force`` is not given. Partitions that
                nobody is connected to may be gone all the same.
        """
        ...

    def acknowledged_ranges(
        self, partition: TopicName, subscription: str
    ) -> tuple[AcknowledgedRange, ...]:
        """Return what a subscription has acknowledged behind the front it has reached, in order.

        Raises:
            NotFoundError: the partition or the subscription does not exist.
        """
        ...
