"""Capacity planning: the partitions, storage, memory and movers for a load of delayed messages.

The arithmetic uses the figures in :mod:`delaylevel.model.benchmarked` and assumes a steady state,
in which a part of the messages may be due at one time of the day: nine o'clock. Unless a mean is
given, delays are spread evenly between zero and the longest one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from delaylevel.errors import InvalidInputError

from . import benchmarked as bench
from .clock import duration_ms
from .geometric import geometric_lists
from .level_topic import FinalWindow, Mover
from .path import hop_times
from .router import Router
from .strategy import (
    DEFAULT_PARTITION_LIMIT,
    Levels,
    PartitionBy,
    PartitionStrategy,
    fitting_levels,
)

# Approximate size of the envelope and the broker's metadata of a parked message.
OVERHEAD_BYTES = 200
# A mover needs spare capacity to catch up after an outage.
HEADROOM = 0.5
#: Price of partitions, which need memory in the brokers and searches by the mover: the number of
#: them that costs as much as one core. This and the next price are choices, not measurements.
PARTITIONS_PER_CORE = 100
#: Price of a slow restart: the time until a restarted dispatcher knows its messages, in seconds,
#: that costs as much as one core.
RESTART_S_PER_CORE = 60
_MOST_LEVELS = 3
_DAY = timedelta(days=1)
# Delays of which the mean number of hops is computed.
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
        nine_share: share of the messages that are due at one time of the day, 0 to 1.
        nine_spread: time over which these are due.
        nine_within: time after that by which the dispatchers have released them; None for as long
            as the dispatchers take that the mean rate needs.

    Raises:
        InvalidInputError: a value is out of range.
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
    nine_share: float = 0.0
    nine_spread: timedelta = timedelta(0)
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
        if self.nine_spread < timedelta(0) or self._nine_time_s < 0:
            raise InvalidInputError("a time in which messages are due or released is negative")

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
    def _nine_time_s(self) -> float:
        within = timedelta(0) if self.nine_within is None else self.nine_within
        return (self.nine_spread + within).total_seconds()

    @property
    def dispatchers(self) -> int:
        """Number of dispatchers; 0 with ``broker``.

        They release the mean rate at half their capacity, and those of nine o'clock in their time,
        if there is one, at their full capacity.
        """
        if self.final_window is FinalWindow.BROKER:
            return 0
        needed = _processes(self.rate, bench.BURST_RATE)
        if self._nine_time_s:
            at_nine = self.nine_messages / self._nine_time_s + self.rate * (1 - self.nine_share)
            needed = max(needed, math.ceil(at_nine / bench.BURST_RATE.value))
        return needed

    @property
    def nine_release_s(self) -> float:
        """Time from nine o'clock until the dispatchers have released its messages, seconds.

        With ``broker``, 0: the rate of the broker's timer depends on the due times.
        """
        if not (self.dispatchers and self.nine_messages):
            return 0.0
        spare = self.dispatchers * bench.BURST_RATE.value - self.rate * (1 - self.nine_share)
        return max(self.nine_spread.total_seconds(), self.nine_messages / spare)

    @property
    def native_index_bytes(self) -> int:
        """Size of the broker's index if the broker itself delays all messages, bytes."""
        return round(self.pending * bench.NATIVE_INDEX_BYTES.value * self.subscriptions)

    @property
    def native_rebuild_s(self) -> float:
        """Time that a restarted broker then needs before it delivers, seconds."""
        return self.pending / bench.NATIVE_REBUILD_RATE.value

    @property
    def stored_bytes(self) -> int:
        """Size of the pending messages on all bookies together, bytes."""
        return self.pending * (self.size + OVERHEAD_BYTES) * self.copies


@dataclass(frozen=True)
class Plan:
    """The requirements of a load with one list of levels.

    Attributes:
        levels: the list of levels.
        partitions: number of partitions of all levels.
        writes: mean number of times that a message is stored: in levels, in the final window and in
            the business topic.
        moves_per_s: largest number of messages per second that the mover forwards, over all hops.
        peak_moves_per_s: the same while the messages of nine o'clock leave the level with the
            shortest unit.
        movers: cores of the Spark job, or instances of the Function: those that need half their
            capacity for the mean, and no more than all of it for the peak.
        local_mover: True if one mover without Spark is enough, by the same rule.
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
    local_mover: bool
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
        """The total cost, in cores: movers, dispatchers, brokers, partitions, and a restart.

        See :data:`PARTITIONS_PER_CORE` and :data:`RESTART_S_PER_CORE`.
        """
        restart_s = self.rebuild_s / max(1, self.dispatchers)
        return (
            self.movers
            + self.dispatchers
            + self.broker_cores
            + self.partitions / PARTITIONS_PER_CORE
            + restart_s / RESTART_S_PER_CORE
        )


def plan(load: Load, levels: Levels) -> Plan:
    """Return the requirements of a load with a list of levels that covers its longest delay."""
    finest = levels[-1]
    # A message enters the window with a remaining delay between the lead and a unit more than
    # that, or at once if its whole delay is less than a unit.
    window_ms = min(finest.unit_ms / 2 + finest.lead_ms, duration_ms(load.maximum_delay))
    window = round(load.rate * window_ms / 1000)
    moves = load.rate * len(levels)
    peak = moves + _peak_per_s(load, levels)
    rate = bench.SPARK_RATE if load.mover is Mover.SPARK else bench.FUNCTION_RATE
    tracked = load.final_window is FinalWindow.TRACKER
    peak_window = _peak_window(load, levels, window)
    index = 0.0 if tracked else peak_window * bench.NATIVE_INDEX_BYTES.value * load.subscriptions
    rebuild_rate = bench.RESTART_RATE if tracked else bench.NATIVE_REBUILD_RATE
    if load.mover is Mover.FUNCTION:
        # The broker delays parked messages; its fixed-delay detection limits each index.
        indexed = min(load.pending, 50_000 * levels.partitions)
        index += indexed * bench.NATIVE_INDEX_BYTES.value
    writes = _mean_parks(load, levels) + 2
    return Plan(
        levels=levels,
        partitions=levels.partitions,
        writes=writes,
        moves_per_s=moves,
        peak_moves_per_s=peak,
        movers=_processes(moves, rate, peak),
        local_mover=_processes(moves, bench.LOCAL_MOVER_RATE, peak) == 1,
        window=window,
        peak_window=peak_window,
        window_bytes=peak_window * (load.size + OVERHEAD_BYTES),
        index_bytes=round(index),
        tracker_bytes=round(peak_window * bench.TRACKER_BYTES.value) if tracked else 0,
        rebuild_s=window / rebuild_rate.value,
        dispatchers=load.dispatchers,
        dispatcher_cores=dispatcher_cores(load.rate) if tracked else 0.0,
        broker_cores=max(load.rate * writes / HEADROOM, load.rate * writes - moves + peak)
        * bench.BROKER_STORE_S.value,
    )


def _processes(per_s: float, rate: bench.Figure, peak_per_s: float = 0.0) -> int:
    """Return the number of processes or cores for messages per second, with spare capacity.

    Args:
        peak_per_s: the messages per second of a short time, for which no capacity is spare.
    """
    return max(1, math.ceil(max(per_s / HEADROOM, peak_per_s) / rate.value))


def _mean_parks(load: Load, levels: Levels) -> float:
    """Return the mean number of levels, and rounds in them, that a message passes."""
    longest_ms, mean_ms = duration_ms(load.maximum_delay), duration_ms(load.mean)
    # Evenly around the mean.
    reach_ms = min(mean_ms, longest_ms - mean_ms)
    router = Router(levels)
    delays = (
        mean_ms + round(reach_ms * (2 * (number + 0.5) / _SAMPLES - 1))
        for number in range(_SAMPLES)
    )
    return sum(len(hop_times(router, max(1, delay_ms))) - 1 for delay_ms in delays) / _SAMPLES


def _peak_per_s(load: Load, levels: Levels) -> float:
    """Return the messages per second of nine o'clock that leave the level with most of them.

    All messages that are due at one instant leave a level within its unit.
    """
    unit_s = min(levels[-1].unit_ms / 1000, _DAY.total_seconds())
    return load.nine_messages / max(unit_s, load.nine_spread.total_seconds())


def _peak_window(load: Load, levels: Levels, window: int) -> int:
    """Return the largest number of messages in the window.

    At nine o'clock, it contains those of nine o'clock: if they are due over a time, the part that
    is due before a message leaves that enters the window now.
    """
    finest, spread_ms = levels[-1], duration_ms(load.nine_spread)
    stay_ms = finest.unit_ms / 2 + finest.lead_ms
    part = min(1.0, stay_ms / spread_ms) if spread_ms else 1.0
    others = window * (1 - load.nine_share) if load.nine_messages else window
    return max(window, round(others + part * load.nine_messages))


def dispatcher_cores(per_s: float) -> float:
    """Return the cores that dispatchers use at a rate: on the line through the measured points."""
    (least, low), (most, high) = (
        (100, bench.DISPATCHER_CORES_AT_100.value),
        (1000, bench.DISPATCHER_CORES_AT_1000.value),
    )
    return low + (per_s - least) * (high - low) / (most - least)


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


def geometric_plans(load: Load, named: Sequence[Plan]) -> list[Plan]:
    """Return plans with units that grow geometrically, for each last unit of lists of named units.

    Each has clearly fewer partitions than the first of the lists of several named units with this
    last unit, and than those with fewer levels.
    """
    first: dict[int, Plan] = {}
    for item in named:
        if len(item.levels) > 1:
            first.setdefault(item.levels[-1].unit_ms, item)
    known = {item.levels for item in named}
    found = []
    for unit_ms, item in first.items():
        unit = timedelta(milliseconds=unit_ms)
        lists = geometric_lists(load.maximum_delay, unit, load.partition_limit, item.partitions)
        found += [plan(load, levels) for levels in lists if levels not in known]
    return found


def _lists(load: Load) -> Iterator[Levels]:
    units = [by.unit for by in PartitionBy if by.unit < load.maximum_delay]
    limit = load.partition_limit
    for levels in fitting_levels(load.maximum_delay, units, limit):
        if len(levels) <= _MOST_LEVELS:
            yield Levels(
                PartitionStrategy(partition_by=unit, maximum_delay=top, partition_limit=limit)
                for unit, top in levels
            )
