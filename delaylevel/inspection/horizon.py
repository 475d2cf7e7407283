"""How much is due when: counts, rates and a profile, from samples or from everything; no I/O.

A message that was published at p and is due at d has the offset d - p. Of a stretch of a
partition that lies between two places that were looked at, the publish times are taken to rise
evenly from one to the other, and the offsets to be those of the messages that were seen. So a
stretch is a :class:`Piece`: due times, how many messages each of them stands for, and over how
long a time those are spread. A partition that was read whole has pieces without a spread.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Protocol

from delaylevel.model.level_topic import Role

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


class Piece:
    """A stretch of a partition.

    Args:
        due_ms: due times of the messages that were seen.
        each: for how many messages each of them stands.
        spread_ms: over how long behind each due time those are spread evenly; 0 for not at all.
    """

    __slots__ = ("_dues", "_sums", "each", "spread_ms")

    def __init__(self, due_ms: Iterable[int], each: float = 1.0, spread_ms: int = 0) -> None:
        self._dues = sorted(due_ms)
        self._sums = [0, *accumulate(self._dues)]
        self.each = each
        self.spread_ms = max(0, spread_ms)

    @property
    def total(self) -> float:
        """How many messages it stands for."""
        return self.each * len(self._dues)

    @property
    def last_due_ms(self) -> int | None:
        """When the last of them is due; None where there is none."""
        return self._dues[-1] + self.spread_ms if self._dues else None

    def before(self, time_ms: int) -> float:
        """Return how many are due before a time."""
        behind = bisect_left(self._dues, time_ms)
        if not self.spread_ms:
            return self.each * behind
        whole = bisect_right(self._dues, time_ms - self.spread_ms)
        part = (behind - whole) * time_ms - (self._sums[behind] - self._sums[whole])
        return self.each * (whole + part / self.spread_ms)


class Spread(Protocol):
    """When the messages of a part are due."""

    @property
    def exact(self) -> bool:
        """Whether every message was counted."""
        ...

    @property
    def total(self) -> float:
        """How many there are."""
        ...

    @property
    def last_due_ms(self) -> int | None:
        """When the last is due; None where there is none."""
        ...

    def before(self, time_ms: int) -> float:
        """Return how many are due before a time."""
        ...


@dataclass
class Pieces:
    """The spread of a part that was sampled, partition by partition.

    Attributes:
        pieces: its stretches.
        exact: whether they hold every message.
        damaged: messages whose due time cannot be read; they are in no count.
        looked_at: messages that were read.
    """

    pieces: list[Piece] = field(default_factory=list)
    exact: bool = True
    damaged: float = 0.0
    looked_at: int = 0

    @property
    def total(self) -> float:
        """How many messages there are."""
        return sum(piece.total for piece in self.pieces)

    @property
    def last_due_ms(self) -> int | None:
        """When the last is due; None where there is none."""
        times = (piece.last_due_ms for piece in self.pieces)
        return max((time for time in times if time is not None), default=None)

    def before(self, time_ms: int) -> float:
        """Return how many are due before a time."""
        return sum(piece.before(time_ms) for piece in self.pieces)


class Tally:
    """The spread of a part that is read message by message, in constant memory.

    Counts are right at the edges that it is made with, and nowhere else.

    Args:
        edges_ms: the times that will be asked for.
    """

    exact = True

    def __init__(self, edges_ms: Iterable[int]) -> None:
        self._edges = sorted(set(edges_ms))
        self._counts = [0] * (len(self._edges) + 1)
        self.damaged = 0
        self.last_due_ms: int | None = None

    def add(self, due_ms: int) -> None:
        """Count a message."""
        self._counts[bisect_right(self._edges, due_ms)] += 1
        if self.last_due_ms is None or due_ms > self.last_due_ms:
            self.last_due_ms = due_ms

    def merge(self, other: Tally) -> None:
        """Add what another one with the same edges has counted."""
        self._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]
        self.damaged += other.damaged
        times = [time for time in (self.last_due_ms, other.last_due_ms) if time is not None]
        self.last_due_ms = max(times, default=None)

    @property
    def total(self) -> float:
        """How many messages there are."""
        return sum(self._counts)

    def before(self, time_ms: int) -> float:
        """Return how many are due before one of the edges."""
        return sum(self._counts[: self._edges.index(time_ms) + 1])


@dataclass(frozen=True)
class Part:
    """Where messages wait: a level, the final window, or the held topic.

    Attributes:
        name: the level's unit (``DAY``), ``window`` or ``held``.
        role: what it is.
        level: the level's index; -1 for the others.
    """

    name: str
    role: Role
    level: int = -1


@dataclass(frozen=True)
class DueWithin:
    """How many messages are due within some time from now on.

    Attributes:
        label: ``overdue``, ``1 hour`` …, ``any time``.
        within_ms: the time; 0 for what is overdue, None for all.
        messages: how many, what is overdue included.
        parts: the same by the name of the part.
        per_second: the mean rate, what is overdue included; None where there is no time to divide
            by.
        exact: whether it was counted; otherwise it is an estimate.
    """

    label: str
    within_ms: int | None
    messages: int
    parts: Mapping[str, int]
    per_second: float | None
    exact: bool


@dataclass(frozen=True)
class Bucket:
    """How many messages are due in a stretch of time.

    Attributes:
        from_ms: its first millisecond.
        before_ms: the first one behind it; None for the last stretch of an exact count, if it
            has no end.
        messages: how many.
        parts: the same by the name of the part.
    """

    from_ms: int
    before_ms: int | None
    messages: int
    parts: Mapping[str, int]


@dataclass(frozen=True)
class Horizon:
    """What is pending, by when it is due.

    Attributes:
        topic: the level topic.
        target: the business topic that it is limited to; None for all.
        now_ms: the moment, ms since the epoch.
        parts: where messages wait, coarse to fine, then the window, then held ones.
        within: a row for overdue, a minute, an hour, a day, a week, and any time.
        profile: what is due from now on in stretches of equal length; empty where nothing is.
        bucket_ms: that length.
        targets: how many messages there are for each business topic; empty where not counted.
        last_due_ms: when the last message is due; None where nothing is pending.
        damaged: messages whose due time cannot be read, in no other count.
        looked_at: how many messages were read for it.
        exact: whether everything was counted.
        exact_parts: names of the parts that were counted.
        window_by_clock: what is pending in the final window was told by the clock, because its
            release log is too long for an estimate, or the extra that reads it is missing.
    """

    topic: str
    target: str | None
    now_ms: int
    parts: tuple[Part, ...]
    within: tuple[DueWithin, ...]
    profile: tuple[Bucket, ...]
    bucket_ms: int
    targets: Mapping[str, int]
    last_due_ms: int | None
    damaged: int
    looked_at: int
    exact: bool
    exact_parts: frozenset[str]
    window_by_clock: bool = False

    @property
    def messages(self) -> int:
        """How many are pending."""
        return self.within[-1].messages


def bucket_edges(now_ms: int, last_due_ms: int | None) -> tuple[int, list[int]]:
    """Return the length of a profile's stretches, and their edges from now on.

    Edges after the first lie on whole multiples of the length (UTC), at most 17 of them.

    Args:
        now_ms: the present.
        last_due_ms: when the last message is due; None where nothing is pending.
    """
    if last_due_ms is None or last_due_ms <= now_ms:
        return _BUCKETS[0], []
    for length in _BUCKETS:
        first = now_ms // length * length
        behind = last_due_ms // length * length + length
        if (behind - first) // length <= _MOST_BUCKETS:
            break
    return length, [now_ms, *range(first + length, behind + 1, length)]


def edges(now_ms: int, last_due_ms: int | None) -> list[int]:
    """Return every time for which :func:`build` asks a spread."""
    times = {now_ms + within for within, _ in WITHIN}
    return sorted(times | {now_ms, *bucket_edges(now_ms, last_due_ms)[1]})


def build(
    topic: str,
    now_ms: int,
    spreads: Sequence[tuple[Part, Spread]],
    *,
    target: str | None = None,
    targets: Mapping[str, float] | None = None,
    last_due_ms: int | None = None,
    damaged: float = 0,
    looked_at: int = 0,
    window_by_clock: bool = False,
) -> Horizon:
    """Put a horizon together.

    Args:
        topic: the level topic.
        now_ms: the present.
        spreads: the parts, and when what waits there is due.
        target: the business topic that it is limited to.
        targets: messages for each business topic.
        last_due_ms: what the profile is made for; by default the last due time of all parts. A
            :class:`Tally` needs the one that its edges were made with.
        damaged, looked_at, window_by_clock: as in :class:`Horizon`.
    """
    times = [spread.last_due_ms for _, spread in spreads if spread.last_due_ms is not None]
    last = max(times, default=None)
    planned = last if last_due_ms is None else last_due_ms
    all_exact = all(spread.exact for _, spread in spreads)

    def row(label: str, within_ms: int | None) -> DueWithin:
        counts = {
            part.name: round(
                spread.total if within_ms is None else spread.before(now_ms + within_ms)
            )
            for part, spread in spreads
        }
        messages = sum(counts.values())
        rate = messages / within_ms * SECOND if within_ms else None
        return DueWithin(label, within_ms, messages, counts, rate, all_exact)

    length, times_ms = bucket_edges(now_ms, planned)
    profile = []
    for from_ms, before_ms in pairwise(times_ms):
        counts = {
            part.name: round(spread.before(before_ms) - spread.before(from_ms))
            for part, spread in spreads
        }
        profile.append(Bucket(from_ms, before_ms, sum(counts.values()), counts))
    if times_ms and last is not None and last >= times_ms[-1]:
        counts = {
            part.name: round(spread.total - spread.before(times_ms[-1])) for part, spread in spreads
        }
        profile.append(Bucket(times_ms[-1], None, sum(counts.values()), counts))
    return Horizon(
        topic=topic,
        target=target,
        now_ms=now_ms,
        parts=tuple(part for part, _ in spreads),
        within=(
            row("overdue", 0),
            *(row(label, within_ms) for within_ms, label in WITHIN),
            row("any time", None),
        ),
        profile=tuple(profile),
        bucket_ms=length,
        targets={name: round(count) for name, count in sorted((targets or {}).items())},
        last_due_ms=last,
        damaged=round(damaged),
        looked_at=looked_at,
        exact=all_exact,
        exact_parts=frozenset(part.name for part, spread in spreads if spread.exact),
        window_by_clock=window_by_clock,
    )
