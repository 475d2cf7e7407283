"""Receivers of a business topic: what is published to a topic without any is gone.

A client that is connected to a topic creates it again when it is deleted by force, without its
subscriptions. A broker does not tell when a topic was created, so a process could only remember
what the topic had before, and its successor could not. The rule therefore needs no memory: a topic
that nobody can receive from is not written to.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from delaylevel.cluster.failures import may_pass
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.values import PartitionStats
from delaylevel.errors import AdminError, NotFoundError
from delaylevel.model.topic_name import TopicName

#: The reason for holding a message whose business topic does not exist.
NO_TOPIC = "the topic does not exist"
#: The reason for holding a message whose business topic exists, without receivers.
NO_RECEIVER = "nobody can receive from it: it has no durable subscription and no retention"


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


def has_receivers(admin: TopicAdmin, topic: TopicName, stats: Collection[PartitionStats]) -> bool:
    """Return True if somebody can receive what is published to a topic now, or is to.

    Each partition needs a durable subscription or a copy in another cluster; or the topic has a
    retention; or its own policy keeps it while nobody subscribes (``--keep-target``), which says
    that it is meant to be without.

    Args:
        stats: statistics of its partitions; empty if one of them does not exist.

    Raises:
        BrokerError: this cannot be known now.
    """
    if stats and all(map(_is_received, stats)):
        return True
    return admin.retains(topic) or is_kept(admin, topic)


def _is_received(stats: PartitionStats) -> bool:
    return stats.replicated or any(each.durable for each in stats.subscriptions.values())


def is_kept(admin: TopicAdmin, topic: TopicName) -> bool:
    """Return True if the topic's own policy keeps it while nobody subscribes to it.

    Raises:
        BrokerError: this cannot be known now.
    """
    try:
        return admin.topic_policies(topic).delete_while_inactive is False
    except AdminError as error:
        if may_pass(error):
            raise
        return False  # no policies for single topics, or none that this role may read


@dataclass(frozen=True)
class TargetState:
    """State of a business topic that exists.

    Attributes:
        partitions: number of partitions; 0 if it is not partitioned.
        received: True if somebody can receive from it: see `has_receivers`.
        deduplication: True if the broker deduplicates.
    """

    partitions: int
    received: bool
    deduplication: bool = True


def read_state(admin: TopicAdmin, topic: TopicName, partition: int = -1) -> TargetState:
    """Return the present state of a topic.

    Args:
        partition: the partition that is looked at, whatever becomes of the others; -1 for all.

    Raises:
        NotFoundError: the topic does not exist.
        BrokerError: no broker serves it, or one of these partitions, now; among other reasons.
    """
    partitions = admin.partitioned_metadata(topic).partitions
    found: Mapping[TopicName, PartitionStats] = {}
    if partitions and partition >= 0:
        # Brokers delete single partitions that have no subscription, and create them again.
        with suppress(NotFoundError):
            name = topic.partition(partition)
            found = {name: admin.partition_stats(name)}
        expected = 1
    else:
        found = _stats(admin, topic, partitions)
        expected = max(1, partitions)
    stats = found.values() if len(found) == expected else ()
    return TargetState(
        partitions=partitions,
        received=has_receivers(admin, topic, stats),
        deduplication=all(each.deduplication for each in found.values()),
    )


def is_still_received(
    admin: TopicAdmin, topic: TopicName, partitions: int, partition: int = -1
) -> bool:
    """Return False if nobody can receive what was just stored in a topic.

    Args:
        partitions: number of partitions at the opening of the producer that has stored it.
        partition: as for `read_state`.

    Raises:
        BrokerError: the admin interface does not answer.
    """
    try:
        state = read_state(admin, topic, partition)
    except NotFoundError:
        return False
    return state.received and partitions <= state.partitions
