"""Status of a level topic: the backlog and the next hand-off of each partition."""

from __future__ import annotations

from dataclasses import dataclass

from delaylevel.cluster.port import TopicAdmin
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow, LevelTopicDescription, Role

from .stats import LevelTopicStats, PartitionStatus, read_stats
from .subscriptions import ForeignSubscription, foreign_subscriptions

__all__ = ["LevelTopicStatus", "PartitionStatus", "status", "status_of"]

# Lateness of a healthy mover: one trigger, grouped acknowledgements, the start of a Function.
_USUAL_DELAY_MS = 5000


@dataclass(frozen=True)
class LevelTopicStatus:
    """Status of a level topic at one moment.

    Attributes:
        description: the level topic.
        now_ms: the moment, ms since the epoch.
        partitions: a row for each partition of each level, coarse to fine.
        others: a row for each partition of the held topic, dead letters, window, journal and
            outcomes.
        problems: missing topics and subscriptions, a line each.
        foreign: subscriptions of the member topics that are not ours.
    """

    description: LevelTopicDescription
    now_ms: int
    partitions: tuple[PartitionStatus, ...]
    others: tuple[PartitionStatus, ...]
    problems: tuple[str, ...]
    foreign: tuple[ForeignSubscription, ...] = ()

    def rows(self, *roles: Role) -> tuple[PartitionStatus, ...]:
        """Return the rows of the member topics with one of the roles."""
        return tuple(row for row in (*self.partitions, *self.others) if row.role in roles)

    @property
    def mover_rows(self) -> tuple[PartitionStatus, ...]:
        """The rows of the topics that the mover reads: levels and held topic."""
        return self.rows(Role.LEVEL, Role.HELD)

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
        """Number of journal entries for a takeover to read (``tracker``); None with ``broker``."""
        return self._tracked(Role.JOURNAL)

    @property
    def outcome_entries(self) -> int | None:
        """Number of outcomes that are kept (``tracker``); None with ``broker``."""
        return self._tracked(Role.OUTCOMES)

    @property
    def dispatchers(self) -> tuple[str, ...]:
        """The names of the window topic's consumers, sorted."""
        return self._consumers(Role.WINDOW)

    @property
    def next_hand_off_ms(self) -> int | None:
        """The earliest hand-off of what is pending; it has passed if the mover is behind."""
        times = (row.oldest_hand_off_ms for row in self.partitions)
        return min((time for time in times if time is not None), default=None)

    @property
    def behind_ms(self) -> int:
        """For how long the most overdue hand-off is overdue; 0 if none is."""
        return max((row.behind_ms(self.now_ms) for row in self.partitions), default=0)

    @property
    def late(self) -> bool:
        """True if hand-offs are so far behind that messages arrive late."""
        lead_ms = self.description.levels.smallest_lead_ms
        return self.behind_ms > max(lead_ms, _USUAL_DELAY_MS)

    @property
    def mover_alive(self) -> bool:
        """True if every partition of every level has a consumer."""
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

    One request for each member topic. Times are as accurate as the producers' clocks.

    Args:
        description: the level topic, e.g. from :func:`delaylevel.topics.describe`.
        now_ms: the present, ms since the epoch.
    """
    return status_of(read_stats(admin, description, as_described=True), now_ms)


def status_of(stats: LevelTopicStats, now_ms: int) -> LevelTopicStatus:
    """Return the status of a level topic whose statistics are read already.

    Args:
        stats: statistics of the described partitions.
        now_ms: the moment of the statistics, ms since the epoch.
    """
    problems = []
    for row in stats.partitions:
        if row.stats is None:
            problems.append(f"{row.topic} does not exist, or the broker reports no statistics")
        elif row.subscription is None:
            problems.append(
                f"{row.topic} has no subscription {SUBSCRIPTION!r}, so nothing keeps the messages "
                "that are parked there; create the level topic again to repair it"
            )
    return LevelTopicStatus(
        description=stats.description,
        now_ms=now_ms,
        partitions=tuple(row for row in stats.partitions if row.role is Role.LEVEL),
        others=tuple(row for row in stats.partitions if row.role is not Role.LEVEL),
        problems=tuple(problems),
        foreign=tuple(
            found
            for item in stats.members
            for found in foreign_subscriptions(item.member, item.broker_stats)
        ),
    )
