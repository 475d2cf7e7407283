"""Counts of a listener."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, fields
from typing import NamedTuple

#: Upper bounds of the duration histogram, in seconds; one more bucket has the longer ones.
BOUNDS_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
_SHORTEST_S = BOUNDS_S[0]


@dataclass(frozen=True)
class ListenerCounts:
    """Counts of a listener at one time.

    Attributes:
        received: messages and retried copies that were received.
        handled: attempts that succeeded.
        failed: attempts that failed.
        retried: copies that were stored for another attempt.
        dead: messages that were moved to the dead-letter topic.
        filtered: messages that the filter left out.
        duplicates: messages that were handled before.
        in_progress: messages that a handler has now.
        duration_s: total time in handlers, in seconds.
        durations: number of calls of the handler by duration, one for each bucket of
            :data:`BOUNDS_S` and one for longer ones.
    """

    received: int = 0
    handled: int = 0
    failed: int = 0
    retried: int = 0
    dead: int = 0
    filtered: int = 0
    duplicates: int = 0
    in_progress: int = 0
    duration_s: float = 0.0
    durations: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)


class ListenerHealth(NamedTuple):
    """The state of a listener.

    Attributes:
        alive: True while everything that calls the handler runs.
        subscribed: True while all consumers are open and connected.
    """

    alive: bool
    subscribed: bool


class Tally:
    """Counts that one thread updates; the attributes are those of :class:`ListenerCounts`."""

    __slots__ = tuple(field.name for field in fields(ListenerCounts))

    def __init__(self) -> None:
        self.received = self.handled = self.failed = self.retried = self.dead = 0
        self.filtered = self.duplicates = self.in_progress = 0
        self.duration_s = 0.0
        self.durations = [0] * (len(BOUNDS_S) + 1)

    def took(self, seconds: float) -> None:
        """Count a call of the handler by its duration."""
        self.duration_s += seconds
        # Most handlers of a listener that is in a hurry are that short.
        self.durations[0 if seconds <= _SHORTEST_S else bisect_left(BOUNDS_S, seconds)] += 1


class ListenerStats:
    """Counts of a listener, as the sum over its threads."""

    def __init__(self) -> None:
        self._tallies: list[Tally] = []

    def tally(self) -> Tally:
        """Return new counts for one thread. A sum of integers needs no lock."""
        tally = Tally()
        self._tallies.append(tally)
        return tally

    def counts(self) -> ListenerCounts:
        """Return the counts of now."""
        tallies = list(self._tallies)
        found = {
            field.name: sum(getattr(tally, field.name) for tally in tallies)
            for field in fields(ListenerCounts)
            if field.name != "durations"
        }
        columns = zip(*(tally.durations for tally in tallies), strict=True)
        durations = tuple(map(sum, columns)) or ListenerCounts.durations
        return ListenerCounts(**found, durations=durations)
