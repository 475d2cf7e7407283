"""How a level topic stands: what is parked in each partition, and what is handed off when."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from delaylevel.cluster.port import PartitionStats, TopicAdmin
from delaylevel.errors import NotFoundError
from delaylevel.model.level_topic import (
    SUBSCRIPTION,
    FinalWindow,
    LevelTopicDescription,
    Member,
    Role,
)

_THREADS = 8


@dataclass(frozen=True)
class PartitionStatus:
    """One partition of a level topic's family.

    Attributes:
        topic: the partition's full name.
        role: what its topic is for.
        level: the index of its level, 0 for the coarsest; -1 outside the levels.
        level_name: the level's unit (``DAY``), or the role.
        partition: its number.
        backlog_entries: entries that wait in it. A batch is one entry.
        storage_bytes: what its ledgers take, what has been handed off and is still kept included.
        oldest_publish_ms: publish time of the oldest that waits; None where nothing does.
        oldest_hand_off_ms: when that one is (or was) to be handed off; for levels only.
        next_hand_off_ms: the next hand-off time that has not passed yet. It is the oldest's unless
            the mover is behind; None where nothing waits, or all that waits is overdue.
        consumers: names of those who hold the mover's subscription now.
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
    next_hand_off_ms: int | None
    consumers: tuple[str, ...]

    def behind_ms(self, now_ms: int) -> int:
        """Return for how long the oldest hand-off is overdue; 0 where none is."""
        if self.oldest_hand_off_ms is None:
            return 0
        return max(0, now_ms - self.oldest_hand_off_ms)


@dataclass(frozen=True)
class LevelTopicStatus:
    """A level topic at one moment.

    Attributes:
        description: what it says of itself.
        now_ms: the moment, ms since the epoch.
        partitions: a row for each partition of each level, coarse to fine.
        others: the same for held topic, dead letters, window and its release log.
        problems: what is not as it should be, a line each: topics or subscriptions that are gone.
    """

    description: LevelTopicDescription
    now_ms: int
    partitions: tuple[PartitionStatus, ...]
    others: tuple[PartitionStatus, ...]
    problems: tuple[str, ...]

    @property
    def backlog_entries(self) -> int:
        """Entries that are parked in all levels together."""
        return sum(row.backlog_entries for row in self.partitions)

    @property
    def held_entries(self) -> int:
        """Entries whose target could not be written."""
        return self._entries(Role.HELD)

    @property
    def dead_letter_entries(self) -> int:
        """Entries that could not be understood."""
        return self._entries(Role.DEAD_LETTER)

    @property
    def window_entries(self) -> int | None:
        """Entries that wait for their due time with ``tracker``; None with ``broker``."""
        return self._tracked(Role.WINDOW)

    @property
    def log_entries(self) -> int | None:
        """Entries of the release log that a takeover would read; None with ``broker``."""
        return self._tracked(Role.LOG)

    @property
    def dispatchers(self) -> tuple[str, ...]:
        """The names of those who consume from the window now, sorted."""
        rows = (row for row in self.others if row.role is Role.WINDOW)
        return tuple(sorted({name for row in rows for name in row.consumers}))

    @property
    def next_hand_off_ms(self) -> int | None:
        """The earliest of the partitions' next hand-offs."""
        times = (row.next_hand_off_ms for row in self.partitions)
        return min((time for time in times if time is not None), default=None)

    @property
    def behind_ms(self) -> int:
        """For how long the most overdue hand-off is overdue; 0 where none is."""
        return max((row.behind_ms(self.now_ms) for row in self.partitions), default=0)

    @property
    def mover_alive(self) -> bool:
        """Whether every partition of every level has a consumer now."""
        return bool(self.partitions) and all(row.consumers for row in self.partitions)

    @property
    def consumers(self) -> tuple[str, ...]:
        """The names of those who consume from any level now, sorted."""
        return tuple(sorted({name for row in self.partitions for name in row.consumers}))

    def _tracked(self, role: Role) -> int | None:
        if self.description.final_window is not FinalWindow.TRACKER:
            return None
        return self._entries(role)

    def _entries(self, role: Role) -> int:
        return sum(row.backlog_entries for row in self.others if row.role is role)


def status(admin: TopicAdmin, description: LevelTopicDescription, now_ms: int) -> LevelTopicStatus:
    """Look at every partition of a level topic's family; nothing is acknowledged or moved.

    One request for each topic, and three more for each partition whose mover is behind. Times are
    as good as the producers' clocks.

    Args:
        admin: the cluster.
        description: of the level topic, e.g. from :func:`delaylevel.topics.describe`.
        now_ms: the present, ms since the epoch.
    """
    members = list(description.members())
    with ThreadPoolExecutor(_THREADS) as pool:
        figures = list(pool.map(lambda member: _figures(admin, member), members))
        asked = [
            (member, index, stats.get(index))
            for member, stats in zip(members, figures, strict=True)
            for index in range(member.partitions)
        ]
        rows = list(
            pool.map(
                lambda item: _row(admin, description, item[0], item[1], item[2], now_ms), asked
            )
        )
    problems = []
    for member, index, stats in asked:
        if stats is None:
            problems.append(f"{member.topic.partition(index)} does not exist or cannot be asked")
        elif SUBSCRIPTION not in stats.subscriptions:
            problems.append(
                f"{member.topic.partition(index)} has no subscription {SUBSCRIPTION!r}: nothing "
                "keeps what is parked there; create the level topic again to mend it"
            )
    return LevelTopicStatus(
        description=description,
        now_ms=now_ms,
        partitions=tuple(row for row in rows if row.role is Role.LEVEL),
        others=tuple(row for row in rows if row.role is not Role.LEVEL),
        problems=tuple(problems),
    )


def _figures(admin: TopicAdmin, member: Member) -> dict[int, PartitionStats]:
    try:
        figures = dict(admin.partitioned_stats(member.topic))
    except NotFoundError:
        return {}
    for index in range(member.partitions):
        if index not in figures:
            try:
                figures[index] = admin.partition_stats(member.topic.partition(index))
            except NotFoundError:
                continue
    return figures


def _row(
    admin: TopicAdmin,
    description: LevelTopicDescription,
    member: Member,
    index: int,
    stats: PartitionStats | None,
    now_ms: int,
) -> PartitionStatus:
    subscription = stats.subscriptions.get(SUBSCRIPTION) if stats is not None else None
    oldest = subscription.oldest_publish_ms if subscription is not None else None
    oldest_hand_off = next_hand_off = None
    if oldest is not None and member.role is Role.LEVEL:
        after_ms = description.levels[member.level].hand_off_after_ms(index)
        oldest_hand_off = next_hand_off = oldest + after_ms
        if oldest_hand_off < now_ms:
            next_hand_off = _next_hand_off(admin, member, index, after_ms, now_ms)
    is_level = member.role is Role.LEVEL
    return PartitionStatus(
        topic=member.topic.partition(index).full,
        role=member.role,
        level=member.level,
        level_name=description.levels[member.level].name if is_level else member.role.value,
        partition=index,
        backlog_entries=subscription.backlog_entries if subscription is not None else 0,
        storage_bytes=stats.storage_bytes if stats is not None else 0,
        oldest_publish_ms=oldest,
        oldest_hand_off_ms=oldest_hand_off,
        next_hand_off_ms=next_hand_off,
        consumers=tuple(consumer.name for consumer in subscription.consumers)
        if subscription is not None
        else (),
    )


def _next_hand_off(
    admin: TopicAdmin, member: Member, index: int, after_ms: int, now_ms: int
) -> int | None:
    """Return the first hand-off time from now on, of a partition whose oldest one has passed."""
    partition = member.topic.partition(index)
    try:
        position = admin.message_id_at(partition, now_ms - after_ms)
        if position is None:
            return None
        published = admin.entry_publish_time(partition, position)
    except NotFoundError:
        return None  # deleted meanwhile
    if published is None or published + after_ms < now_ms:
        return None
    return published + after_ms
