"""Distributions of due times, estimated from samples or counted message by message; no I/O.

A message that was published at p and is due at d has the offset d - p. Between two sampled entries
of a partition, publish times are assumed to rise evenly, and offsets to be those of the sampled
messages. Such a stretch of a partition is a :class:`Stratum`: its sampled due times, the number of
messages that each of them represents, and the time over which these are spread. What is read
completely is counted instead.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from delaylevel.model.message import ParkedMessage
from delaylevel.topics.scan import Window

_MARGIN = 500


class Observation(NamedTuple):
    """The facts about a message that decide when, where and for whom it is pending.

    Attributes:
        ledger, entry, batch: its position; batch is -1 for an unbatched entry.
    """

    ledger: int
    entry: int
    batch: int
    due_ms: int | None
    target: str
    key: str
    properties: Mapping[str, str]


#: Messages of a partition, or cancellations.
Messages: TypeAlias = Sequence[Observation | ParkedMessage]


class Stratum:
    """A stretch of a partition, represented by sampled due times.

    Args:
        weight: the number of messages that each of them represents.
        spread_ms: the time after each due time over which these are spread evenly.
    """

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
    """The distribution of due times in some partitions, sampled or counted.

    Attributes:
        damaged: number of messages whose due time cannot be read; no other count includes them.
        last_due_ms: the last due time; None if there is no message.
        counted: number of messages by due time, from :meth:`count`.
    """

    strata: list[Stratum] = field(default_factory=list)
    damaged: float = 0.0
    looked_at: int = 0
    targets: dict[str, float] = field(default_factory=dict)
    last_due_ms: int | None = None
    counted: Counter[int] = field(default_factory=Counter)

    def add(self, messages: Iterable[Observation], weight: float = 1.0, spread_ms: int = 0) -> None:
        """Add sampled messages as a stratum; for the arguments see :class:`Stratum`.

        With a negative weight, they are sampled cancellations: the messages that these name are due
        at the same times, and need not be in the same sample, or part of the level topic.
        """
        dues = self._note(messages, weight, spread_ms)
        if dues:
            self.strata.append(Stratum(dues, weight, spread_ms))

    def count(self, messages: Iterable[Observation], edges_ms: Sequence[int]) -> None:
        """Add messages in constant memory.

        Args:
            edges_ms: the only times for which :meth:`before` can be called then, ascending.
        """
        # Messages between two edges are on the same side of all of them.
        for due_ms in self._note(messages):
            index = bisect_right(edges_ms, due_ms)
            self.counted[edges_ms[index - 1] if index else edges_ms[0] - 1] += 1

    def merge(self, other: Distribution) -> None:
        """Add the messages of another distribution."""
        self.strata += other.strata
        self.counted.update(other.counted)
        self.damaged += other.damaged
        self.looked_at += other.looked_at
        self._reach(other.last_due_ms)
        for target, messages in other.targets.items():
            self.targets[target] = self.targets.get(target, 0.0) + messages

    @property
    def total(self) -> float:
        """The number of messages."""
        return sum(stratum.total for stratum in self.strata) + self.counted.total()

    def before(self, time_ms: int) -> float:
        """Return the number of messages that are due before a time."""
        counted = sum(number for due_ms, number in self.counted.items() if due_ms < time_ms)
        return sum(stratum.before(time_ms) for stratum in self.strata) + counted

    def _note(
        self, messages: Iterable[Observation], weight: float = 1.0, spread_ms: int = 0
    ) -> list[int]:
        """Take note of messages, and return their due times."""
        dues = []
        for message in messages:
            if message.due_ms is None:
                self.damaged += weight
            else:
                dues.append(message.due_ms)
                self.targets[message.target] = self.targets.get(message.target, 0.0) + weight
        if dues and weight > 0:
            self._reach(max(dues) + max(0, spread_ms))
        return dues

    def _reach(self, due_ms: int | None) -> None:
        times = [time for time in (self.last_due_ms, due_ms) if time is not None]
        self.last_due_ms = max(times, default=None)


def leading_window(partitions: Iterable[Distribution], due: Window, limit: int) -> Window | None:
    """Return the beginning of a window of due times that probably has ``limit`` messages.

    None if the whole window should be read.
    """
    found = Distribution()
    for one in partitions:
        found.merge(one)
    last_ms = found.last_due_ms
    if last_ms is None:
        return None
    first_ms = due.from_ms if due.from_ms is not None else 0
    end_ms = last_ms if due.before_ms is None else min(last_ms, due.before_ms)
    wanted = found.before(first_ms) + limit * 1.5 + _MARGIN
    times = range(first_ms, end_ms + 1)
    index = bisect_left(times, wanted, key=found.before)
    return Window(due.from_ms, times[index]) if index < len(times) else None
