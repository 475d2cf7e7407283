"""How much a load of delayed messages takes: partitions, storage, memory and movers.

Pure arithmetic over :mod:`delaylevel.model.benchmarked`. Delays are taken as spread evenly from
nothing up to the longest one, unless a mean is given; everything is a steady state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations

from delaylevel.errors import InvalidInputError

from . import benchmarked as seen
from .clock import duration_ms
from .level_topic import FinalWindow, Mover
from .strategy import (
    DEFAULT_PARTITION_LIMIT,
    Levels,
    PartitionBy,
    PartitionStrategy,
    partition_count,
)

# What the envelope and the broker add to each parked message, about: due time, target, id.
OVERHEAD_BYTES = 200
# A mover that is always busy has nothing left for what an outage leaves behind.
HEADROOM = 0.5
# More than that in a final window makes a restart of it slow, and a broker's timer too.
COMFORTABLE_WINDOW = 1_000_000
_MOST_LEVELS = 3


@dataclass(frozen=True)
class Load:
    """What is to be carried.

    Attributes:
        rate: delayed messages a second.
        maximum_delay: the longest delay.
        size: bytes of a message.
        mean_delay: the mean delay; half of the longest by default.
        copies: how many bookies keep each message (managedLedgerDefaultWriteQuorum).
        subscriptions: of the business topic; each has an index of its own in the broker.
        mover: who moves.
        final_window: who holds a message in the end.
        partition_limit: the most partitions of a level.

    Raises:
        InvalidInputError: a value cannot be.
    """

    rate: float
    maximum_delay: timedelta
    size: int
    mean_delay: timedelta | None = None
    copies: int = 2
    subscriptions: int = 1
    mover: Mover = Mover.SPARK
    final_window: FinalWindow = FinalWindow.TRACKER
    partition_limit: int = DEFAULT_PARTITION_LIMIT

    def __post_init__(self) -> None:
        if not (self.rate > 0 and math.isfinite(self.rate)):
            raise InvalidInputError(f"a rate of {self.rate} messages a second cannot be planned")
        if self.size < 0 or self.copies < 1 or self.subscriptions < 1:
            raise InvalidInputError(
                "sizes are not negative, and copies and subscriptions at least 1"
            )
        if self.maximum_delay <= timedelta(0):
            raise InvalidInputError("the longest delay has to be more than nothing")
        if not timedelta(0) < self.mean <= self.maximum_delay:
            raise InvalidInputError("the mean delay lies between nothing and the longest delay")

    @property
    def mean(self) -> timedelta:
        """The mean delay."""
        return self.mean_delay if self.mean_delay is not None else self.maximum_delay / 2

    @property
    def pending(self) -> int:
        """How many messages are pending at any time (Little's law)."""
        return round(self.rate * self.mean.total_seconds())

    @property
    def native_index_bytes(self) -> int:
        """What the broker's own index takes, if all are delayed by the broker itself."""
        return round(self.pending * seen.NATIVE_INDEX_BYTES.value * self.subscriptions)

    @property
    def native_rebuild_s(self) -> float:
        """How long a restarted broker reads before anything is delivered, in that case."""
        return self.pending / seen.NATIVE_REBUILD_RATE.value

    @property
    def stored_bytes(self) -> int:
        """What pending messages take on all bookies together."""
        return self.pending * (self.size + OVERHEAD_BYTES) * self.copies


@dataclass(frozen=True)
class Plan:
    """What one list of levels takes for a load.

    Attributes:
        levels: the list.
        partitions: of all levels.
        moves_per_s: messages a second that the mover sends on, all hops together, at the most.
        movers: cores of the Spark job, or instances of the Function, with as much to spare.
        window: messages in the final window.
        window_bytes: their bytes there (on one bookie, or in the dispatcher's spill).
        index_bytes: what indexes in the broker take.
        tracker_bytes: what the dispatcher's tracker takes; 0 with ``broker``.
        rebuild_s: how long a restarted broker reads its index again.
    """

    levels: Levels
    partitions: int
    moves_per_s: float
    movers: int
    window: int
    window_bytes: int
    index_bytes: int
    tracker_bytes: int
    rebuild_s: float


def plan(load: Load, levels: Levels) -> Plan:
    """Return what a list of levels takes for a load.

    Args:
        load: what is to be carried.
        levels: the list; its longest level takes the longest delay.
    """
    finest = levels[-1]
    # What is handed off has between the lead and a unit more than that to go; what is sent with
    # less than a unit goes there at once.
    window_ms = min(finest.unit_ms / 2 + finest.lead_ms, duration_ms(load.maximum_delay))
    window = round(load.rate * window_ms / 1000)
    moves = load.rate * len(levels)
    if load.mover is Mover.SPARK:
        movers = moves / seen.SPARK_RATE.value
    else:
        movers = moves / seen.FUNCTION_RATE.value
    tracked = load.final_window is FinalWindow.TRACKER
    index = 0.0 if tracked else window * seen.NATIVE_INDEX_BYTES.value * load.subscriptions
    rebuild = 0.0 if tracked else window / seen.NATIVE_REBUILD_RATE.value
    if load.mover is Mover.FUNCTION:
        # The broker waits, too, with an index that its fixed-delay detection stops.
        held = min(load.pending, 50_000 * levels.partitions)
        index += held * seen.NATIVE_INDEX_BYTES.value
    return Plan(
        levels=levels,
        partitions=levels.partitions,
        moves_per_s=moves,
        movers=max(1, math.ceil(movers / HEADROOM)),
        window=window,
        window_bytes=window * (load.size + OVERHEAD_BYTES),
        index_bytes=round(index),
        tracker_bytes=round(window * seen.TRACKER_BYTES.value) if tracked else 0,
        rebuild_s=rebuild,
    )


def plans(load: Load) -> list[Plan]:
    """Return a plan for every list of named units that fits, the recommended one first.

    Recommended is the list with the fewest partitions of those whose final window is comfortable
    (:data:`COMFORTABLE_WINDOW` messages); where none is, the one with the smallest window.

    Raises:
        InvalidInputError: no list fits: the delay is too short for levels, or too long for the
            partitions allowed.
    """
    found = [plan(load, levels) for levels in _lists(load)]
    if not found:
        raise InvalidInputError(
            "no list of levels fits: delays of a minute or less need none, and very long ones "
            "more partitions, or overflow='recirculate'"
        )
    comfortable = [item for item in found if item.window <= COMFORTABLE_WINDOW]
    if comfortable:
        best = min(comfortable, key=lambda item: (item.partitions, len(item.levels)))
    else:
        best = min(found, key=lambda item: (item.window, item.partitions))
    rest = [item for item in found if item is not best]
    return [best, *sorted(rest, key=lambda item: (len(item.levels), item.partitions))]


def _lists(load: Load) -> Iterator[Levels]:
    units = [by for by in PartitionBy if by.unit < load.maximum_delay]
    for count in range(1, _MOST_LEVELS + 1):
        for chosen in combinations(units, count):
            tops = [load.maximum_delay, *(by.unit for by in chosen)]
            needs = [partition_count(top, by.unit) for by, top in zip(chosen, tops, strict=False)]
            if max(needs) <= load.partition_limit:
                yield Levels(
                    PartitionStrategy(
                        partition_by=by, maximum_delay=top, partition_limit=load.partition_limit
                    )
                    for by, top in zip(chosen, tops, strict=False)
                )
