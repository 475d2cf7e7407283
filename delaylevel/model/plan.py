"""Capacity planning: the partitions, storage and memory for a load of delayed messages.

The arithmetic assumes a steady state. The rates are rounded results of the project's benchmarks on
two shared cores (docs/benchmarks.md): plans are orders of magnitude.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, combinations

from delaylevel.errors import InvalidInputError, InvalidStrategyError

from .clock import duration_ms
from .level_topic import FinalWindow
from .strategy import Levels, PartitionBy, PartitionStrategy

# Messages per second that a restarted dispatcher, or broker, reads until it knows them again.
_RESTART_RATE, _NATIVE_REBUILD_RATE = 80_000, 15_000
# Bytes of a pending message: in the dispatcher's tracker, and in the broker's index of one
# subscription.
_TRACKER_BYTES, _NATIVE_INDEX_BYTES = 4, 34
# Number of bookies that store each message, by default (managedLedgerDefaultWriteQuorum).
_COPIES = 2
# Approximate size of the envelope and the broker's metadata of a parked message.
_OVERHEAD_BYTES = 200
# Longest restart that is no reason for a finer level, in s: as long as messages may be late then.
_LONGEST_RESTART_S = 60
# Number of partitions that cost as much as storing each message once more, which a level does.
_PARTITIONS_PER_LEVEL = 100


@dataclass(frozen=True)
class Load:
    """A load of delayed messages.

    Attributes:
        rate: delayed messages per second.
        size: size of a message in bytes.
        mean_delay: half of the longest by default.

    Raises:
        InvalidInputError: a value is out of range.
    """

    rate: float
    maximum_delay: timedelta
    size: int
    mean_delay: timedelta | None = None
    final_window: FinalWindow = FinalWindow.TRACKER

    def __post_init__(self) -> None:
        if not (self.rate > 0 and math.isfinite(self.rate)):
            raise InvalidInputError(f"a rate of {self.rate} messages a second cannot be planned")
        if self.size < 0:
            raise InvalidInputError("a size must not be negative")
        if self.maximum_delay <= timedelta(0):
            raise InvalidInputError("the longest delay must be more than zero")
        if not timedelta(0) < self.mean <= self.maximum_delay:
            raise InvalidInputError("the mean delay must be between zero and the longest delay")

    @property
    def mean(self) -> timedelta:
        """The mean delay."""
        return self.mean_delay if self.mean_delay is not None else self.maximum_delay / 2

    @property
    def pending(self) -> int:
        """Number of messages that are pending at any time (Little's law)."""
        return round(self.rate * self.mean.total_seconds())

    @property
    def stored_bytes(self) -> int:
        """Size of the pending messages on all bookies together."""
        return self.pending * (self.size + _OVERHEAD_BYTES) * _COPIES


@dataclass(frozen=True)
class Plan:
    """The requirements of a load with one list of levels.

    Attributes:
        window: number of messages in the final window.
        window_bytes: their size, on one bookie or in the dispatcher's spill files.
        memory_bytes: memory for their due times: in the dispatcher's tracker, or with ``broker`` in
            the broker's index of one subscription.
        restart_s: time until a restarted dispatcher, or broker, knows them again.
    """

    levels: Levels
    window: int
    window_bytes: int
    memory_bytes: int
    restart_s: float

    @property
    def needs_finer_level(self) -> bool:
        """True if reading the window after a restart takes too long."""
        return self.restart_s > _LONGEST_RESTART_S


def plan(load: Load, levels: Levels) -> Plan:
    """Return the requirements of a load with a list of levels that covers its longest delay."""
    finest = levels[-1]
    # A message enters the window with a remaining delay between the lead and a unit more than
    # that, or at once if its whole delay is less than a unit.
    window_ms = min(finest.unit_ms / 2 + finest.lead_ms, duration_ms(load.maximum_delay))
    window = round(load.rate * window_ms / 1000)
    tracked = load.final_window is FinalWindow.TRACKER
    return Plan(
        levels=levels,
        window=window,
        window_bytes=window * (load.size + _OVERHEAD_BYTES),
        memory_bytes=window * (_TRACKER_BYTES if tracked else _NATIVE_INDEX_BYTES),
        restart_s=window / (_RESTART_RATE if tracked else _NATIVE_REBUILD_RATE),
    )


def plans(load: Load) -> list[Plan]:
    """Return a plan for each finest unit, from coarse to fine.

    Raises:
        InvalidInputError: no list of levels fits the longest delay.
    """
    units = [by.unit for by in PartitionBy if by.unit < load.maximum_delay]
    best: dict[timedelta, Levels] = {}
    refusal = InvalidInputError("no list of levels fits: a minute or less needs none")
    for chosen in chain.from_iterable(combinations(units, n + 1) for n in range(len(units))):
        bounds = zip(chosen, (load.maximum_delay, *chosen), strict=False)
        try:
            levels = Levels(
                PartitionStrategy(partition_by=u, maximum_delay=top) for u, top in bounds
            )
        except InvalidStrategyError as error:
            refusal = error
            continue  # most likely too many partitions
        finest = chosen[-1]
        if finest not in best or _cost(levels) < _cost(best[finest]):
            best[finest] = levels
    if not best:
        raise refusal
    return [plan(load, best[unit]) for unit in sorted(best, reverse=True)]


def recommended(found: list[Plan]) -> Plan:
    """Return the coarsest of some plans that needs no finer level; the finest if all need one."""
    return next((item for item in found if not item.needs_finer_level), found[-1])


def _cost(levels: Levels) -> int:
    return levels.partitions + _PARTITIONS_PER_LEVEL * len(levels)
