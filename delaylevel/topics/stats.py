"""Statistics of a topic, and of all member topics of a level topic, as the broker reports them.

This is the one place that requests and interprets them. Status, inspection, doctor, the metrics of
the Spark job, deletion and the dispatchers derive their values from these classes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from delaylevel.cluster.port import ConsumerStats, PartitionStats, SubscriptionStats, TopicAdmin
from delaylevel.errors import NotFoundError
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription, Member, Role
from delaylevel.model.strategy import Level

#: Properties of a dispatcher's consumers: its name in the group, and the URL of its HTTP service.
NAME_PROPERTY = "delaylevel.dispatcher"
ADDRESS_PROPERTY = "delaylevel.http"

_THREADS = 8


@dataclass(frozen=True)
class PartitionStatus:
    """Status of one partition of a member topic.

    Attributes:
        topic: the partition's full name.
        role: the role of its topic.
        level: the index of its level, 0 for the coarsest; -1 outside the levels.
        level_name: the level's unit (``DAY``), or the role.
        partition: its number.
        backlog_entries: number of pending entries. A batch is one entry.
        storage_bytes: size of its ledgers, including entries that are handed off and still kept.
        oldest_publish_ms: publish time of the oldest pending entry; None if nothing is pending.
        oldest_hand_off_ms: hand-off time of that entry; None outside the levels.
        consumers: names of the mover's or dispatcher's consumers.
        stats: the broker's statistics; None if the partition is missing or was not reported.
    """

    topic: str
    role: Role
    level: int
    level_name: str
    partition: int
    backlog_entries: int
    storage_bytes: int
    oldest_publish_ms: int | None
    oldest_hand_off_ms: int | None
    consumers: tuple[str, ...]
    stats: PartitionStats | None = None

    @property
    def subscription(self) -> SubscriptionStats | None:
        """The durable subscription that keeps the messages; None if it is missing."""
        return None if self.stats is None else self.stats.subscriptions.get(SUBSCRIPTION)

    @property
    def owner(self) -> ConsumerStats | None:
        """The consumer that owns the partition: the first one, as the subscription is exclusive."""
        return next(iter(self.subscription.consumers), None) if self.subscription else None

    def behind_ms(self, now_ms: int) -> int:
        """Return for how long the oldest hand-off is overdue; 0 if it is not."""
        hand_off_ms = self.oldest_hand_off_ms
        return 0 if hand_off_ms is None else max(0, now_ms - hand_off_ms)


@dataclass(frozen=True)
class MemberStats:
    """Statistics of one member topic.

    Attributes:
        member: the topic.
        partitions: its partitions, by number; at least one.
    """

    member: Member
    partitions: tuple[PartitionStatus, ...]

    @property
    def level_name(self) -> str:
        """The level's unit (``DAY``), or the role."""
        return self.partitions[0].level_name

    @property
    def reported(self) -> tuple[PartitionStatus, ...]:
        """The partitions with statistics; none of them if the topic does not exist."""
        return tuple(item for item in self.partitions if item.stats is not None)

    @property
    def unreported(self) -> tuple[PartitionStatus, ...]:
        """The partitions without statistics."""
        return tuple(item for item in self.partitions if item.stats is None)

    @property
    def broker_stats(self) -> tuple[PartitionStats, ...]:
        """The broker's own statistics of the partitions that it reported."""
        return tuple(item.stats for item in self.partitions if item.stats is not None)

    @property
    def backlog_entries(self) -> int:
        """Number of entries that are not acknowledged."""
        return sum(item.backlog_entries for item in self.partitions)

    @property
    def messages_in(self) -> int:
        """Number of messages published since the broker opened the topic."""
        return sum(stats.messages_in for stats in self.broker_stats)

    @property
    def producers(self) -> frozenset[str]:
        """Names of the connected producers."""
        return frozenset(name for stats in self.broker_stats for name in stats.producers)

    @property
    def consumers(self) -> frozenset[str]:
        """Names of the connected movers or dispatchers."""
        return frozenset(name for item in self.partitions for name in item.consumers)

    @property
    def owners(self) -> Mapping[int, str]:
        """Names of the owners, by partition; partitions without one are left out."""
        return {item.partition: item.consumers[0] for item in self.partitions if item.consumers}

    @property
    def hand_offs_ms(self) -> tuple[int, ...]:
        """Hand-off times of each partition's oldest entry, sorted."""
        times = (item.oldest_hand_off_ms for item in self.partitions)
        return tuple(sorted(time for time in times if time is not None))

    def behind_ms(self, now_ms: int) -> int:
        """Return for how long the earliest hand-off is overdue; 0 if none is."""
        return max(0, now_ms - min(self.hand_offs_ms, default=now_ms))


@dataclass(frozen=True)
class LevelTopicStats:
    """Statistics of all member topics of a level topic at one moment.

    Attributes:
        description: the level topic.
        members: its member topics: levels coarse to fine, held, dead letters, window, journal,
            outcomes.
    """

    description: LevelTopicDescription
    members: tuple[MemberStats, ...]

    @property
    def partitions(self) -> tuple[PartitionStatus, ...]:
        """The partitions of all member topics."""
        return tuple(item for member in self.members for item in member.partitions)

    def of(self, role: Role) -> tuple[MemberStats, ...]:
        """Return the member topics with a role; none if the level topic has no such topic."""
        return tuple(item for item in self.members if item.member.role is role)

    def backlog_entries(self, role: Role) -> int:
        """Return the number of entries that are not acknowledged in topics with a role."""
        return sum(item.backlog_entries for item in self.of(role))

    def behind_ms(self, now_ms: int) -> int:
        """Return for how long the earliest hand-off is overdue; 0 if none is."""
        return max(item.behind_ms(now_ms) for item in self.partitions)


def read_stats(
    admin: TopicAdmin,
    description: LevelTopicDescription,
    *,
    as_described: bool = False,
    roles: Collection[Role] = tuple(Role),
) -> LevelTopicStats:
    """Request the statistics of member topics: one request for each, eight at a time.

    A topic that does not exist has partitions without statistics.

    Args:
        as_described: return exactly the partitions that the description names, and request those
            that the broker left out one by one. Otherwise return the additional partitions of an
            unfinished expansion too.
        roles: the roles of the member topics; all by default.

    Raises:
        BrokerError: a topic's statistics cannot be read.
    """

    def look(member: Member) -> MemberStats:
        try:
            return _member_stats(admin, description, member, as_described)
        except NotFoundError:
            return _interpreted(description, member, {})

    with ThreadPoolExecutor(_THREADS, "delaylevel-stats") as pool:
        members = [member for member in description.members() if member.role in roles]
        return LevelTopicStats(description, tuple(pool.map(look, members)))


def window_stats(admin: TopicAdmin, description: LevelTopicDescription) -> MemberStats:
    """Request the statistics of the window topic alone.

    Raises:
        NotFoundError: it does not exist.
    """
    member = Member(description.window_topic, Role.WINDOW, description.window_partitions)
    return _member_stats(admin, description, member, False)


def pending_entries_in(stats: PartitionStats) -> int:
    """Return the number of entries that the durable subscription has not acknowledged."""
    subscription = stats.subscriptions.get(SUBSCRIPTION)
    return 0 if subscription is None else subscription.backlog_entries


def _member_stats(
    admin: TopicAdmin, description: LevelTopicDescription, member: Member, as_described: bool
) -> MemberStats:
    found = dict(admin.partitioned_stats(member.topic))
    if as_described:
        described = range(member.partitions)
        found = {index: stats for index, stats in found.items() if index in described}
        for index in described:
            if index not in found:
                try:
                    found[index] = admin.partition_stats(member.topic.partition(index))
                except NotFoundError:
                    continue
    return _interpreted(description, member, found)


def _interpreted(
    description: LevelTopicDescription, member: Member, found: Mapping[int, PartitionStats]
) -> MemberStats:
    level = description.levels[member.level] if member.role is Role.LEVEL else None
    indices = sorted({*range(member.partitions), *found})
    return MemberStats(
        member, tuple(_partition(member, level, index, found.get(index)) for index in indices)
    )


def _partition(
    member: Member, level: Level | None, index: int, stats: PartitionStats | None
) -> PartitionStatus:
    subscription = None if stats is None else stats.subscriptions.get(SUBSCRIPTION)
    publish_ms = None if subscription is None else subscription.oldest_publish_ms
    hand_off_ms = None
    if level is not None and publish_ms is not None:
        hand_off_ms = publish_ms + level.hand_off_after_ms(index)
    return PartitionStatus(
        topic=member.topic.partition(index).full,
        role=member.role,
        level=member.level,
        level_name=member.role.value if level is None else level.name,
        partition=index,
        backlog_entries=0 if subscription is None else subscription.backlog_entries,
        storage_bytes=0 if stats is None else stats.storage_bytes,
        oldest_publish_ms=publish_ms,
        oldest_hand_off_ms=hand_off_ms,
        consumers=tuple(item.name for item in subscription.consumers) if subscription else (),
        stats=stats,
    )
