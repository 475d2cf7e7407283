"""Identity of a business topic: the topic that was opened, or a new one of the same name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
        if not admin.partitioned_metadata(topic).partitions:
            return {topic: admin.partition_stats(topic)}
        found = admin.partitioned_stats(topic)
    except NotFoundError:
        return None
    return {topic.partition(index): stats for index, stats in found.items()}


@dataclass(frozen=True)
class TopicIdentity:
    """Properties of a topic that differ after it was deleted and created again.

    Attributes:
        partitions: number of partitions; 0 if it is not partitioned.
        subscriptions: names of the durable subscriptions.
        deduplication: True if the broker deduplicates on every partition.
    """

    partitions: int
    subscriptions: frozenset[str]
    deduplication: bool = True

    def has_all_of(self, earlier: TopicIdentity) -> bool:
        """Return True if nothing is missing that the topic had earlier."""
        return earlier.partitions <= self.partitions and earlier.subscriptions <= self.subscriptions


def identify(admin: TopicAdmin, topic: TopicName) -> TopicIdentity:
    """Return the identity that a topic has now.

    Raises:
        NotFoundError: the topic does not exist.
    """
    found = topic_stats(admin, topic)
    if not found:
        raise NotFoundError(f"{topic.full} does not exist", status=404)
    durable = (
        name
        for stats in found.values()
        for name, subscription in stats.subscriptions.items()
        if subscription.durable
    )
    return TopicIdentity(
        partitions=0 if topic in found else len(found),
        subscriptions=frozenset(durable),
        deduplication=all(stats.deduplication for stats in found.values()),
    )


def is_same_topic(
    admin: TopicAdmin,
    topic: TopicName,
    opened: TopicIdentity,
    ledgers: Iterable[tuple[int, int]],
) -> bool:
    """Return False if a topic was deleted and created again since it was opened.

    A broker does not tell when a topic was created. A new topic has none of the subscriptions and
    none of the ledgers of the former one. Applications may remove a subscription, and brokers
    remove ledgers that are consumed, but hardly both between two looks.

    Args:
        ledgers: partition and ID of ledgers that the topic is known to have had.

    Raises:
        BrokerError: the admin interface does not answer.
    """
    try:
        if identify(admin, topic).has_all_of(opened):
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
