"""Status of a level topic: the backlog and the next hand-off of each partition."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import NotFoundError
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow, LevelTopicDescription, Role

from .stats import MOVER_ROLES, LevelTopicStats, MemberPartition, read_stats

# Hand-offs of a healthy mover are up to this late: a trigger, grouped acknowledgements, the start
# of a Function's instance.
_USUAL_DELAY_MS = 5000
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
        next_hand_off_ms: the next hand-off time that has not passed. It is the oldest entry's
            unless the mover is behind; None if nothing is pending, or everything is overdue.
        consumers: names of the mover's or dispatcher's consumers.
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
        """Return for how long the oldest hand-off is overdue; 0 if it is not."""
        if self.oldest_hand_off_ms is None:
            return 0
        return max(0, now_ms - self.oldest_hand_off_ms)


@dataclass(frozen=True)
class LevelTopicStatus:
    """Status of a level topic at one moment.

    Attributes:
        description: the level topic.
        now_ms: the moment, ms since the epoch.
        partitions: a row for each partition of each level, coarse to fine.
        others: a row for each partition of held topic, dead letters, window and its log.
        problems: missing topics and subscriptions, a line each.
    """

    description: LevelTopicDescription
    now_ms: int
    partitions: tuple[PartitionStatus, ...]
    others: tuple[PartitionStatus, ...]
    problems: tuple[str, ...]

    def rows(self, *roles: Role) -> tuple[PartitionStatus, ...]:
        """Return the rows of the member topics with one of the roles."""
        return tuple(row for row in (*self.partitions, *self.others) if row.role in roles)

    @property
    def mover_rows(self) -> tuple[PartitionStatus, ...]:
        """The rows of the topics that the mover reads: levels and held topic."""
        return self.rows(*MOVER_ROLES)

    @property
    def backlog_entries(self) -> int:
        """Number of entries that are parked in all levels together."""
        return self._entries(Role.LEVEL)

    @property
    def held_entries(self) -> int:
        """Number of entries whose target could not be written."""
        return self._entries(Role.HELD)

    @property
    def dead_letter_entries(self) -> int:
        """Number of entries that could not be understood."""
        return self._entries(Role.DEAD_LETTER)

    @property
    def window_entries(self) -> int | None:
        """Number of entries in the window topic (``tracker``); None with ``broker``."""
        return self._tracked(Role.WINDOW)

    @property
    def log_entries(self) -> int | None:
        """Number of log entries that a takeover would read (``tracker``); None with ``broker``."""
        return self._tracked(Role.JOURNAL)

    @property
    def dispatchers(self) -> tuple[str, ...]:
        """The names of the window topic's consumers, sorted."""
        return self._consumers(Role.WINDOW)

    @property
    def next_hand_off_ms(self) -> int | None:
        """The earliest of the partitions' next hand-offs."""
        times = (row.next_hand_off_ms for row in self.partitions)
        return min((time for time in times if time is not None), default=None)

    @property
    def behind_ms(self) -> int:
        """For how long the most overdue hand-off is overdue; 0 if none is."""
        return max((row.behind_ms(self.now_ms) for row in self.partitions), default=0)

    @property
    def late(self) -> bool:
        """Whether hand-offs are so far behind that messages arrive late."""
        lead_ms = self.description.levels.smallest_lead_ms
        return self.behind_ms > max(lead_ms, _USUAL_DELAY_MS)

    @property
    def mover_alive(self) -> bool:
        """Whether every partition of every level has a consumer."""
        return bool(self.partitions) and all(row.consumers for row in self.partitions)

    @property
    def consumers(self) -> tuple[str, ...]:
        """The names of the levels' consumers, sorted."""
        return self._consumers(Role.LEVEL)

    def _tracked(self, role: Role) -> int | None:
        if self.description.final_window is not FinalWindow.TRACKER:
            return None
        return self._entries(role)

    def _entries(self, role: Role) -> int:
        return sum(row.backlog_entries for row in self.rows(role))

    def _consumers(self, role: Role) -> tuple[str, ...]:
        return tuple(sorted({name for row in self.rows(role) for name in row.consumers}))


def status(admin: TopicAdmin, description: LevelTopicDescription, now_ms: int) -> LevelTopicStatus:
    """Return the status of a level topic; nothing is acknowledged or moved.

    One request for each member topic, and three more for each partition whose mover is behind.
    Times are as accurate as the producers' clocks.

    Args:
        admin: the cluster.
        description: the level topic, e.g. from :func:`delaylevel.topics.describe`.
        now_ms: the present, ms since the epoch.
    """
    return status_of(admin, read_stats(admin, description, as_described=True), now_ms)


def status_of(admin: TopicAdmin, stats: LevelTopicStats, now_ms: int) -> LevelTopicStatus:
    """Return the status of a level topic whose statistics are read already.

    Args:
        admin: the cluster; it is used to search for the next hand-offs.
        stats: statistics of the described partitions.
        now_ms: the moment of the statistics, ms since the epoch.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        rows = list(pool.map(lambda item: _row(admin, item, now_ms), stats.partitions))
    problems = []
    for item in stats.partitions:
        if item.stats is None:
            problems.append(f"{item.name} does not exist, or the broker reports no statistics")
        elif item.subscription is None:
            problems.append(
                f"{item.name} has no subscription {SUBSCRIPTION!r}: nothing keeps what is parked "
                "there; create the level topic again to mend it"
            )
    return LevelTopicStatus(
        description=stats.description,
        now_ms=now_ms,
        partitions=tuple(row for row in rows if row.role is Role.LEVEL),
        others=tuple(row for row in rows if row.role is not Role.LEVEL),
        problems=tuple(problems),
    )


def _row(admin: TopicAdmin, item: MemberPartition, now_ms: int) -> PartitionStatus:
    next_hand_off_ms = item.oldest_hand_off_ms
    if next_hand_off_ms is not None and next_hand_off_ms < now_ms:
        next_hand_off_ms = _next_hand_off(admin, item, now_ms)
    return PartitionStatus(
        topic=item.name.full,
        role=item.member.role,
        level=item.member.level,
        level_name=item.level_name,
        partition=item.index,
        backlog_entries=item.backlog_entries,
        storage_bytes=0 if item.stats is None else item.stats.storage_bytes,
        oldest_publish_ms=item.oldest_publish_ms,
        oldest_hand_off_ms=item.oldest_hand_off_ms,
        next_hand_off_ms=next_hand_off_ms,
        consumers=tuple(consumer.name for consumer in item.consumers),
    )


def _next_hand_off(admin: TopicAdmin, item: MemberPartition, now_ms: int) -> int | None:
    """Return the first hand-off time from now on of a partition whose oldest one has passed."""
    after_ms = item.hand_off_after_ms
    if after_ms is None:
        return None
    try:
        position = admin.message_id_at(item.name, now_ms - after_ms)
        if position is None:
            return None
        published_ms = admin.entry_publish_time(item.name, position)
    except NotFoundError:
        return None  # deleted in the meantime
    if published_ms is None or published_ms + after_ms < now_ms:
        return None
    return published_ms + after_ms
