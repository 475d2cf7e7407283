"""Identity of a business topic: the topic that was opened, or a new one of the same name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass

from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.values import PartitionStats
from delaylevel.errors import NotFoundError
from delaylevel.model.topic_name import TopicName


def topic_stats(admin: TopicAdmin, topic: TopicName) -> dict[TopicName, PartitionStats] | None:
    """Request the statistics of any topic, e.g. a business topic.

    Returns:
        The statistics by partition; by the topic's own name if it is not partitioned. None if
        the topic does not exist.
    """
    try:
        return _stats(admin, topic, admin.partitioned_metadata(topic).partitions)
    except NotFoundError:
        return None


def _stats(admin: TopicAdmin, topic: TopicName, partitions: int) -> dict[TopicName, PartitionStats]:
    if not partitions:
        return {topic: admin.partition_stats(topic)}
    found = admin.partitioned_stats(topic)
    return {topic.partition(index): stats for index, stats in found.items()}


@dataclass(frozen=True)
class TopicIdentity:
    """Properties of a topic that differ after it was deleted and created again.

    Attributes:
        partitions: number of partitions; 0 if it is not partitioned.
        subscriptions: names of the durable subscriptions.
        deduplication: True if the broker deduplicates.
    """

    partitions: int
    subscriptions: frozenset[str]
    deduplication: bool = True

    def has_all_of(self, earlier: TopicIdentity) -> bool:
        """Return True if nothing is missing that the topic had earlier."""
        return earlier.partitions <= self.partitions and earlier.subscriptions <= self.subscriptions


def identify(admin: TopicAdmin, topic: TopicName, partition: int = -1) -> TopicIdentity:
    """Return the identity that a topic has now.

    Args:
        partition: the partition that is looked at, whatever becomes of the others; -1 for all.

    Raises:
        NotFoundError: the topic does not exist.
        BrokerError: no broker serves it, or one of these partitions, now; among other reasons.
    """
    partitions = admin.partitioned_metadata(topic).partitions
    found = _looked_at(admin, topic, partitions, partition)
    durable = (
        name
        for stats in found
        for name, subscription in stats.subscriptions.items()
        if subscription.durable
    )
    return TopicIdentity(
        partitions=partitions,
        subscriptions=frozenset(durable),
        deduplication=all(stats.deduplication for stats in found),
    )


def _looked_at(
    admin: TopicAdmin, topic: TopicName, partitions: int, partition: int
) -> Collection[PartitionStats]:
    if partitions and partition >= 0:
        # Brokers delete single partitions that are not used, and create them again.
        with suppress(NotFoundError):
            return [admin.partition_stats(topic.partition(partition))]
    found = _stats(admin, topic, partitions)
    if not found:
        raise NotFoundError(f"{topic.full} does not exist", status=404)
    return found.values()


def is_same_topic(
    admin: TopicAdmin,
    topic: TopicName,
    opened: TopicIdentity,
    ledgers: Iterable[tuple[int, int]],
    partition: int = -1,
) -> bool:
    """Return False if a topic was deleted and created again since it was opened.

    A broker does not tell when a topic was created. A new topic has none of the subscriptions and
    none of the ledgers of the former one. Applications may remove a subscription, and brokers
    remove ledgers that are consumed, but hardly both between two looks.

    Args:
        ledgers: partition and ID of ledgers that the topic is known to have had.
        partition: as for `identify`.

    Raises:
        BrokerError: the admin interface does not answer.
    """
    try:
        if identify(admin, topic, partition).has_all_of(opened):
            return True
        if opened.partitions:
            return _any_left(admin, topic.partition, ledgers)
        return _any_left(admin, lambda _: topic, ledgers)
    except NotFoundError:
        return False


def _any_left(
    admin: TopicAdmin,
    partition: Callable[[int], TopicName],
    ledgers: Iterable[tuple[int, int]],
) -> bool:
    return any(
        ledger in {found.ledger for found in admin.ledgers(partition(index))}
        for index, ledger in ledgers
    )
