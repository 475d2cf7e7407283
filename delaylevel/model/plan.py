"""Capacity planning: the partitions, storage, memory and movers for a load of delayed messages.

The arithmetic assumes a steady state in which a part of the messages may be due at one time of
the day: nine o'clock. Unless a mean is given, delays are spread evenly between zero and the
longest one. The rates below are rounded results of the project's benchmarks on two shared cores
(docs/benchmarks.md): plans are orders of magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from delaylevel.errors import InvalidInputError

from .clock import duration_ms
from .level_topic import FinalWindow, Mover
from .router import Hop, Router
from .strategy import (
    DEFAULT_PARTITION_LIMIT,
    Levels,
    PartitionBy,
    PartitionStrategy,
    fitting_levels,
)

# Messages per second: of a core of a service (the Spark job; the local mover has 31,000) and of an
# instance of the Function for each hop; of one dispatcher in a burst; and until a restarted
# dispatcher or broker knows its pending messages again.
SERVICE_RATE, FUNCTION_RATE = 29_000, 9_000
BURST_RATE = 41_000
RESTART_RATE, NATIVE_REBUILD_RATE = 80_000, 15_000
# Bytes of a pending message: in the broker's index of one subscription, and in the tracker.
NATIVE_INDEX_BYTES, TRACKER_BYTES = 34, 4
# Cores of a dispatcher at 100 and at 1,000 messages per second, and of a broker for each stored
# message.
_DISPATCHER_CORES = ((100, 0.07), (1000, 0.14))
_BROKER_STORE_S = 25e-6
# Approximate size of the envelope and the broker's metadata of a parked message.
_OVERHEAD_BYTES = 200
# A mover needs spare capacity to catch up after an outage.
_HEADROOM = 0.5
# Prices, by choice: the number of partitions (memory of the brokers, searches of the mover) and
# the seconds until a restarted dispatcher knows its messages that cost as much as one core.
_PARTITIONS_PER_CORE = 100
_RESTART_S_PER_CORE = 60
_MOST_LEVELS = 3
_DAY = timedelta(days=1)
# Number of delays over which the hops of a message are averaged.
_SAMPLES = 200


@dataclass(frozen=True)
class Load:
    """A load of delayed messages.

    Attributes:
        rate: delayed messages per second.
        maximum_delay: the longest delay.
        size: size of a message in bytes.
        mean_delay: the mean delay; half of the longest by default.
        copies: number of bookies that store each message (managedLedgerDefaultWriteQuorum).
        subscriptions: number of subscriptions of the business topic; the broker has an index for
            each.
        mover: the process that moves near-due messages.
        final_window: the place of messages before their due time.
        partition_limit: largest number of partitions of a level.
        nine_share: share of the messages that are due at one instant of the day, 0 to 1.
        nine_within: time after that in which the dispatchers release them; None for as long as the
            dispatchers take that the mean rate needs.

    Raises:
        InvalidInputError: a value is out of range.
    """

    rate: float
    maximum_delay: timedelta
    size: int
    mean_delay: timedelta | None = None
    copies: int = 2
    subscriptions: int = 1
    mover: Mover = Mover.SERVICE
    final_window: FinalWindow = FinalWindow.TRACKER
    partition_limit: int = DEFAULT_PARTITION_LIMIT
    nine_share: float = 0.0
    nine_within: timedelta | None = None

    def __post_init__(self) -> None:
        if not (self.rate > 0 and math.isfinite(self.rate)):
            raise InvalidInputError(f"a rate of {self.rate} messages a second cannot be planned")
        if self.size < 0 or self.copies < 1 or self.subscriptions < 1:
            raise InvalidInputError(
                "a size must not be negative, and copies and subscriptions must be at least 1"
            )
        if self.maximum_delay <= timedelta(0):
            raise InvalidInputError("the longest delay must be more than zero")
        if not timedelta(0) < self.mean <= self.maximum_delay:
            raise InvalidInputError("the mean delay must be between zero and the longest delay")
        if not 0 <= self.nine_share <= 1:
            raise InvalidInputError(f"a share of {self.nine_share} is not between 0 and 1")
        if self.nine_within is not None and self.nine_within <= timedelta(0):
            raise InvalidInputError("the time to release the messages of nine o'clock must be > 0")

    @property
    def mean(self) -> timedelta:
        """The mean delay."""
        return self.mean_delay if self.mean_delay is not None else self.maximum_delay / 2

    @property
    def pending(self) -> int:
        """Number of messages that are pending at any time (Little's law)."""
        return round(self.rate * self.mean.total_seconds())

    @property
    def nine_messages(self) -> int:
        """Number of messages that are due at nine o'clock of one day."""
        return round(self.nine_share * self.rate * min(_DAY, self.maximum_delay).total_seconds())

    @property
    def dispatchers(self) -> int:
        """Number of dispatchers; 0 with ``broker``.

        They release the mean rate at half their capacity, and the messages of nine o'clock within
        the given time at their full capacity.
        """
        if self.final_window is FinalWindow.BROKER:
            return 0
        needed = _processes(self.rate, BURST_RATE)
        if self.nine_within is not None:
            at_nine = self.nine_messages / self.nine_within.total_seconds()
            others = self.rate * (1 - self.nine_share)
            needed = max(needed, math.ceil((at_nine + others) / BURST_RATE))
        return needed

    @property
    def nine_release_s(self) -> float:
        """Time from nine o'clock until the dispatchers have released its messages, seconds.

        With ``broker``, 0: the rate of the broker's timer depends on the due times.
        """
        if not (self.dispatchers and self.nine_messages):
            return 0.0
        spare = self.dispatchers * BURST_RATE - self.rate * (1 - self.nine_share)
        return self.nine_messages / spare

    @property
    def native_index_bytes(self) -> int:
        """Size of the broker's index if the broker itself delays all messages, bytes."""
        return self.pending * NATIVE_INDEX_BYTES * self.subscriptions

    @property
    def native_rebuild_s(self) -> float:
        """Time that a restarted broker then needs before it delivers, seconds."""
        return self.pending / NATIVE_REBUILD_RATE

    @property
    def stored_bytes(self) -> int:
        """Size of the pending messages on all bookies together, bytes."""
        return self.pending * (self.size + _OVERHEAD_BYTES) * self.copies


@dataclass(frozen=True)
class Plan:
    """The requirements of a load with one list of levels.

    Attributes:
        levels: the list of levels.
        partitions: number of partitions of all levels.
        writes: mean number of times that a message is stored: in levels, in the final window and in
            the business topic.
        moves_per_s: messages per second that the mover forwards, if each passes all levels.
        peak_moves_per_s: the same while the messages of nine o'clock leave the finest level.
        movers: cores of a service (the Spark job, if more than one), or instances of the Function:
            those that need half their capacity for the mean, and no more than all for the peak.
        window: number of messages in the final window, without those of nine o'clock.
        peak_window: the same shortly before nine o'clock.
        window_bytes: size of the messages in the final window at the peak (on one bookie, or in the
            dispatcher's spill files).
        index_bytes: size of the indexes in the broker, at the peak.
        tracker_bytes: size of the dispatcher's tracker at the peak; 0 with ``broker``.
        rebuild_s: time that a restarted dispatcher, or with ``broker`` a restarted broker, needs
            until it knows the messages in the final window again, seconds; not at the peak.
        dispatchers: number of dispatchers; 0 with ``broker``. See :attr:`Load.dispatchers`.
        dispatcher_cores: processor cores that the dispatchers use together.
        broker_cores: processor cores that brokers need to store messages, with the same reserve as
            the movers.
    """

    levels: Levels
    partitions: int
    writes: float
    moves_per_s: float
    peak_moves_per_s: float
    movers: int
    window: int
    peak_window: int
    window_bytes: int
    index_bytes: int
    tracker_bytes: int
    rebuild_s: float
    dispatchers: int
    dispatcher_cores: float
    broker_cores: float

    @property
    def cost(self) -> float:
        """The total cost, in cores: movers, dispatchers, brokers, partitions, and a restart."""
        restart_s = self.rebuild_s / max(1, self.dispatchers)
        return (
            self.movers
            + self.dispatchers
            + self.broker_cores
            + self.partitions / _PARTITIONS_PER_CORE
            + restart_s / _RESTART_S_PER_CORE
        )


def plan(load: Load, levels: Levels) -> Plan:
    """Return the requirements of a load with a list of levels that covers its longest delay."""
    finest = levels[-1]
    # A message enters the window with a remaining delay between the lead and a unit more than
    # that, or at once if its whole delay is less than a unit.
    window_ms = min(finest.unit_ms / 2 + finest.lead_ms, duration_ms(load.maximum_delay))
    window = round(load.rate * window_ms / 1000)
    others = window * (1 - load.nine_share) if load.nine_messages else window
    peak_window = max(window, round(others + load.nine_messages))
    moves = load.rate * len(levels)
    # All messages that are due at one instant leave a level within its unit.
    peak = moves + load.nine_messages / min(finest.unit_ms / 1000, _DAY.total_seconds())
    rate = SERVICE_RATE if load.mover is Mover.SERVICE else FUNCTION_RATE
    tracked = load.final_window is FinalWindow.TRACKER
    index = 0 if tracked else peak_window * NATIVE_INDEX_BYTES * load.subscriptions
    if load.mover is Mover.FUNCTION:
        # The broker delays parked messages; its fixed-delay detection limits each index.
        index += min(load.pending, 50_000 * levels.partitions) * NATIVE_INDEX_BYTES
    writes = _mean_parks(load, levels) + 2
    stores = max(load.rate * writes / _HEADROOM, load.rate * writes - moves + peak)
    return Plan(
        levels=levels,
        partitions=levels.partitions,
        writes=writes,
        moves_per_s=moves,
        peak_moves_per_s=peak,
        movers=_processes(moves, rate, peak),
        window=window,
        peak_window=peak_window,
        window_bytes=peak_window * (load.size + _OVERHEAD_BYTES),
        index_bytes=index,
        tracker_bytes=peak_window * TRACKER_BYTES if tracked else 0,
        rebuild_s=window / (RESTART_RATE if tracked else NATIVE_REBUILD_RATE),
        dispatchers=load.dispatchers,
        dispatcher_cores=_dispatcher_cores(load.rate) if tracked else 0.0,
        broker_cores=stores * _BROKER_STORE_S,
    )


def plans(load: Load) -> list[Plan]:
    """Return a plan for every possible list of named units, by rising cost.

    The first one is the recommended one.

    Raises:
        InvalidInputError: no list fits, because the delay is too short for levels or needs too
            many partitions.
    """
    found = [plan(load, levels) for levels in _lists(load)]
    if not found:
        raise InvalidInputError(
            "no list of levels fits: delays of a minute or less need none; for very long ones, "
            "allow more partitions or use overflow='recirculate'"
        )
    return sorted(found, key=lambda item: (item.cost, item.partitions))


def _processes(per_s: float, rate: int, peak_per_s: float = 0.0) -> int:
    """Return the processes or cores for a mean rate with, and for a peak without, a reserve."""
    return max(1, math.ceil(max(per_s / _HEADROOM, peak_per_s) / rate))


def _mean_parks(load: Load, levels: Levels) -> float:
    """Return the mean number of levels, and rounds in them, that a message passes."""
    longest_ms, mean_ms = duration_ms(load.maximum_delay), duration_ms(load.mean)
    reach_ms = min(mean_ms, longest_ms - mean_ms)  # evenly around the mean
    router = Router(levels)
    delays = (
        mean_ms + round(reach_ms * (2 * (number + 0.5) / _SAMPLES - 1))
        for number in range(_SAMPLES)
    )
    return sum(_parks(router, max(1, delay_ms)) for delay_ms in delays) / _SAMPLES


def _parks(router: Router, delay_ms: int) -> int:
    """Return the number of times that a message is parked, if every hop is on time."""
    count, now_ms, level = 0, 0, None
    while (hop := router.decide(delay_ms, now_ms, level)).hop is Hop.PARK:
        level = hop.level
        now_ms = router.hand_off_ms(level, hop.partition, now_ms)
        count += 1
    return count


def _dispatcher_cores(per_s: float) -> float:
    """Return the cores that dispatchers use at a rate: on the line through the measured points."""
    (least, low), (most, high) = _DISPATCHER_CORES
    return low + (per_s - least) * (high - low) / (most - least)


def _lists(load: Load) -> Iterator[Levels]:
    units = [by.unit for by in PartitionBy if by.unit < load.maximum_delay]
    limit = load.partition_limit
    for levels in fitting_levels(load.maximum_delay, units, limit):
        if len(levels) <= _MOST_LEVELS:
            yield Levels(
                PartitionStrategy(partition_by=unit, maximum_delay=top, partition_limit=limit)
                for unit, top in levels
            )
