"""The numbers of messages by time until due: totals, rates and a profile; no I/O.

They come from distributions of due times, which are counted message by message or estimated from
samples. A message that was published at p and is due at d has the offset d - p. Between two sampled
entries of a partition, publish times are assumed to rise evenly, and offsets to be those of the
sampled messages. Such a stretch of a partition is a :class:`Stratum`: its sampled due times, the
number of messages that each of them represents, and the time over which these are spread.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from delaylevel.model.envelope import TARGET
from delaylevel.model.level_topic import LevelTopicDescription, Role
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import SourcePartition
from delaylevel.topics.scan import PendingRange, Window

_MARGIN = 500


class Stratum:
    """A stretch of a partition: each due time is ``weight`` messages, spread evenly behind it."""

    def __init__(self, due_ms: Iterable[int], weight: float = 1.0, spread_ms: int = 0) -> None:
        self._dues = sorted(due_ms)
        self._sums = [0, *accumulate(self._dues)]
        self._weight = weight
        self._spread_ms = max(0, spread_ms)

    @property
    def total(self) -> float:
        """The number of messages."""
        return self._weight * len(self._dues)

    def before(self, time_ms: int) -> float:
        """Return the number of messages that are due before a time."""
        begun = bisect_left(self._dues, time_ms)
        if not self._spread_ms:
            return self._weight * begun
        ended = bisect_right(self._dues, time_ms - self._spread_ms)
        elapsed_ms = (begun - ended) * time_ms - (self._sums[begun] - self._sums[ended])
        return self._weight * (ended + elapsed_ms / self._spread_ms)


@dataclass
class Distribution:
    """The distribution of due times in some partitions, sampled or counted."""

    own: str = ""  # the target of messages that name none: the topic in which they wait
    strata: list[Stratum] = field(default_factory=list)
    damaged: float = 0.0  # no other count includes those whose due time cannot be read
    looked_at: int = 0
    targets: dict[str, float] = field(default_factory=dict)
    last_due_ms: int | None = None
    counted: Counter[int] = field(default_factory=Counter)  # by due time

    def add(
        self, messages: Iterable[ParkedMessage], weight: float = 1.0, spread_ms: int = 0
    ) -> None:
        """Add sampled messages as a stratum, or sampled cancellations with a negative weight."""
        # The messages that these name are due at the same times, whatever part they wait in.
        dues = self._note(messages, weight, spread_ms)
        if dues:
            self.strata.append(Stratum(dues, weight, spread_ms))

    def count(self, messages: Iterable[ParkedMessage], edges_ms: Sequence[int]) -> None:
        """Add messages in constant memory; then only the edges may be given to ``before``."""
        # Messages between two edges are on the same side of all of them.
        for due_ms in self._note(messages):
            index = bisect_right(edges_ms, due_ms)
            self.counted[edges_ms[index - 1] if index else edges_ms[0] - 1] += 1

    def merge(self, *others: Distribution) -> Distribution:
        """Add the messages of other distributions, and return this one."""
        for other in others:
            self.strata += other.strata
            self.counted.update(other.counted)
            self.damaged += other.damaged
            self.looked_at += other.looked_at
            self._reach(other.last_due_ms)
            for target, messages in other.targets.items():
                self.targets[target] = self.targets.get(target, 0.0) + messages
        return self

    @property
    def total(self) -> float:
        """The number of messages."""
        return sum(stratum.total for stratum in self.strata) + self.counted.total()

    def before(self, time_ms: int) -> float:
        """Return the number of messages that are due before a time."""
        counted = sum(number for due_ms, number in self.counted.items() if due_ms < time_ms)
        return sum(stratum.before(time_ms) for stratum in self.strata) + counted

    def _note(
        self, messages: Iterable[ParkedMessage], weight: float = 1.0, spread_ms: int = 0
    ) -> list[int]:
        """Take note of messages, and return their due times."""
        dues = []
        for message in messages:
            if (due_ms := message.due_ms) is None:
                self.damaged += weight
            else:
                dues.append(due_ms)
                target = message.properties.get(TARGET) or self.own
                self.targets[target] = self.targets.get(target, 0.0) + weight
        if dues and weight > 0:
            self._reach(max(dues) + max(0, spread_ms))
        return dues

    def _reach(self, due_ms: int | None) -> None:
        times = [time for time in (self.last_due_ms, due_ms) if time is not None]
        self.last_due_ms = max(times, default=None)


def leading_window(partitions: Iterable[Distribution], due: Window, limit: int) -> Window | None:
    """Return the beginning of a window that probably has ``limit`` messages; None for all of it."""
    found = Distribution().merge(*partitions)
    last_ms = found.last_due_ms
    if last_ms is None:
        return None
    first_ms = due.from_ms if due.from_ms is not None else 0
    end_ms = last_ms if due.before_ms is None else min(last_ms, due.before_ms)
    # More than the limit: where the estimate is too high, everything has to be read a second time.
    wanted = found.before(first_ms) + limit * 1.5 + _MARGIN
    times = range(first_ms, end_ms + 1)
    index = bisect_left(times, wanted, key=found.before)
    return Window(due.from_ms, times[index]) if index < len(times) else None


SECOND, MINUTE, HOUR, DAY = 1000, 60_000, 3_600_000, 86_400_000
WEEK = 7 * DAY
WITHIN = ((MINUTE, "1 minute"), (HOUR, "1 hour"), (DAY, "1 day"), (WEEK, "1 week"))
_BUCKETS = (
    *(n * SECOND for n in (1, 5, 10)),
    *(n * MINUTE for n in (1, 5, 15)),
    *(n * HOUR for n in (1, 3, 6)),
    *(n * DAY for n in (1, 2, 7, 30, 91, 365, 3650, 365_000)),
)
_MOST_BUCKETS = 16


@dataclass(frozen=True)
class DueWithin:
    """The number of messages that are due within a duration from now, or overdue.

    Attributes:
        label: ``overdue``, ``1 hour`` …, ``any time``.
        within_ms: the duration in ms; 0 for overdue messages only, None for all messages.
        messages: number of messages.
        parts: number of messages by where they wait: the unit of a level (``DAY``), ``window`` or
            ``held``; levels coarse to fine.
        per_second: the mean rate of what is due within the duration and not overdue, in messages
            per second; None without a duration.
        exact: True if the messages were counted, False for an estimate.
    """

    label: str
    within_ms: int | None
    messages: int
    parts: Mapping[str, int]
    per_second: float | None
    exact: bool


@dataclass(frozen=True)
class Bucket:
    """The number of messages that are due in a range of times.

    Attributes:
        from_ms: its beginning, ms since the epoch.
        before_ms: its end, excluded.
        messages: number of messages.
        parts: number of messages by the name of the part.
    """

    from_ms: int
    before_ms: int
    messages: int
    parts: Mapping[str, int]


@dataclass(frozen=True)
class Horizon:
    """The numbers of pending messages by time until due.

    Attributes:
        topic: the level topic.
        target: the only business topic that is included; None for all.
        now_ms: the moment, ms since the epoch.
        within: a row for overdue, a minute, an hour, a day, a week, and any time.
        profile: buckets from now on; empty if nothing is due from now on.
        bucket_ms: their length in ms. The first one is shorter: it begins now, and ends at a whole
            multiple of the length.
        targets: number of messages for each business topic.
        last_due_ms: the last due time; None if nothing is pending.
        damaged: number of messages whose due time cannot be read; no other count includes them.
        looked_at: number of messages that were read.
        exact: True if all messages were counted, False for an estimate.
    """

    topic: str
    target: str | None
    now_ms: int
    within: tuple[DueWithin, ...]
    profile: tuple[Bucket, ...]
    bucket_ms: int
    targets: Mapping[str, int]
    last_due_ms: int | None
    damaged: int
    looked_at: int
    exact: bool

    @property
    def messages(self) -> int:
        """The number of pending messages."""
        return self.within[-1].messages


def by_part(
    description: LevelTopicDescription, found: Iterable[tuple[PendingRange, Distribution]]
) -> dict[str, Distribution]:
    """Return the distribution of each part: levels coarse to fine, window, held messages."""
    levels = (level.name for level in description.levels)
    parts = {name: Distribution() for name in (*levels, Role.WINDOW.value, Role.HELD.value)}
    for item, distribution in found:
        parts[_part_of(description, item.source)].merge(distribution)
    return parts


def _part_of(description: LevelTopicDescription, source: SourcePartition) -> str:
    in_level = source.role is Role.LEVEL
    return description.levels[source.level].name if in_level else source.role.value


def place_of(description: LevelTopicDescription, source: SourcePartition) -> str:
    """Return the name of a partition for people: ``DAY 3``, ``window 0``."""
    return f"{_part_of(description, source)} {source.partition}"


def bucket_edges(now_ms: int, last_due_ms: int | None) -> tuple[int, list[int]]:
    """Return the length of a profile's buckets, and their edges; none if nothing is due later."""
    if last_due_ms is None or last_due_ms <= now_ms:
        return _BUCKETS[0], []
    for length in _BUCKETS:
        first = now_ms // length * length
        end = last_due_ms // length * length + length
        if (end - first) // length <= _MOST_BUCKETS:
            break
    return length, [now_ms, *range(first + length, end + 1, length)]


def edges(now_ms: int) -> list[int]:
    """Return every time for which :func:`build` may call ``before`` of a distribution."""
    times = {now_ms, *(now_ms + within for within, _ in WITHIN)}
    for length in _BUCKETS:
        first = now_ms // length * length
        times.update(range(first + length, first + _MOST_BUCKETS * length + 1, length))
    return sorted(times)


def build(
    topic: str,
    now_ms: int,
    parts: Mapping[str, Distribution],
    *,
    exact: bool,
    target: str | None = None,
) -> Horizon:
    """Build a horizon from the distributions of its parts."""
    whole = Distribution().merge(*parts.values())

    def between(from_ms: int | None, before_ms: int | None) -> dict[str, int]:
        """Return the messages of each part that are due in a period; None for no bound."""
        counts = {}
        for name, one in parts.items():
            until = one.total if before_ms is None else one.before(before_ms)
            counts[name] = round(until - (0 if from_ms is None else one.before(from_ms)))
        return _settled(counts)

    overdue = sum(between(None, now_ms).values())

    def due_within(label: str, within_ms: int | None) -> DueWithin:
        by_part = between(None, None if within_ms is None else now_ms + within_ms)
        messages = sum(by_part.values())
        # What is overdue is no part of the rate at which messages become due.
        rate = max(0, messages - overdue) / within_ms * SECOND if within_ms else None
        return DueWithin(label, within_ms, messages, by_part, rate, exact)

    length, times_ms = bucket_edges(now_ms, whole.last_due_ms)
    buckets = [(period, between(*period)) for period in pairwise(times_ms)]
    return Horizon(
        topic=topic,
        target=target,
        now_ms=now_ms,
        within=(
            due_within("overdue", 0),
            *(due_within(label, within_ms) for within_ms, label in WITHIN),
            due_within("any time", None),
        ),
        profile=tuple(Bucket(*period, sum(found.values()), found) for period, found in buckets),
        bucket_ms=length,
        targets={name: max(0, round(count)) for name, count in sorted(whole.targets.items())},
        last_due_ms=whole.last_due_ms,
        damaged=round(whole.damaged),
        looked_at=whole.looked_at,
        exact=exact,
    )


def _settled(counts: dict[str, int]) -> dict[str, int]:
    """Return counts without negative ones, which reduce those of the other parts."""
    # A cancellation may wait in another part than its message, usually a finer one.
    debt = -sum(count for count in counts.values() if count < 0)
    if not debt:
        return counts
    settled = {}
    for name, count in counts.items():
        taken = min(debt, max(count, 0))
        settled[name], debt = max(count, 0) - taken, debt - taken
    return settled
