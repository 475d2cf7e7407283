"""Storage, loads, peaks and recoveries of a level topic: a simulation up to one examined day.

Traffic begins with empty levels. After more days than the longest delay, storage is steady. The
last day is examined several times, each time from the same state:

- with a mover of any speed, for the loads that the traffic demands;
- with a mover of the given rate, without and with an outage;
- with dispatchers of the given rate, without and with an outage, and a mover that is in time.

The dispatchers are simulated by numbers of due messages only: they release in order of the due
times, at a constant rate.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter

from delaylevel.errors import InvalidInputError
from delaylevel.model.strategy import Levels

from .movement import Cohort, Movement, level_topic
from .series import Series, pending
from .traffic import DAY_MS, NORMAL, Resolution, Traffic

BIN_MS = 10_000
#: Part of a level's unit that the hand-off of messages with one due time takes in the records.
_BLUR = 24
_MINUTE_MS = 60_000
# Less of a message is an error of rounding.
_ONE = 1e-3


@dataclass(frozen=True)
class Curve:
    """Values over the examined day.

    Attributes:
        values: a value for each interval of `BIN_MS`.
    """

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean."""
        return sum(self.values) / len(self.values)

    @property
    def peak(self) -> float:
        """The largest value."""
        return max(self.values)

    @property
    def peak_at_ms(self) -> int:
        """The beginning of the interval with the largest value, ms after midnight."""
        return self.values.index(self.peak) * BIN_MS


@dataclass(frozen=True)
class LevelLoad:
    """The load of one level on the examined day.

    Attributes:
        name: name of its unit.
        partitions: number of partitions.
        stored: number of messages in it, over the day.
        handed_off: messages per second that the mover hands off, over the day.
    """

    name: str
    partitions: int
    stored: Curve
    handed_off: Curve


@dataclass(frozen=True)
class Recovery:
    """Messages that are late, and the time until none is.

    Attributes:
        late: number of late messages.
        worst_ms: largest delay beyond the due time, ms.
        on_time_ms: time of the last late message, ms after midnight; 0 if none is late, and None
            if messages are still late at the end of the day.
        near_ms: the same for messages that are late by more than a minute.
    """

    late: float = 0.0
    worst_ms: float = 0.0
    on_time_ms: float | None = 0.0
    near_ms: float | None = 0.0


@dataclass(frozen=True)
class SimulatedDay:
    """The result of a simulation: the last day.

    Attributes:
        levels: the list of levels.
        days: number of simulated days.
        cohorts: number of cohorts into which the traffic was divided.
        topics: number of member topics of the level topic.
        partitions: number of partitions of all of them.
        growth: number of messages in all levels at the end of each day.
        loads: the load of each level, coarse to fine.
        moved: messages per second that the mover hands off from all levels.
        written: mean number of times that a message is stored, in the business topic as well.
        window: number of messages in the final window.
        due: messages per second that are due.
        mover_rate: messages per second that the mover can hand off.
        dispatcher_rate: messages per second that the dispatchers can release.
        mover: late messages because of the mover's rate.
        dispatcher: late messages because of the dispatchers' rate.
        outage_ms: beginning and end of an outage, ms after midnight.
        mover_outage: late messages with an outage of the mover.
        dispatcher_outage: late messages with an outage of the dispatchers.
    """

    levels: Levels
    days: int
    cohorts: int
    topics: int
    partitions: int
    growth: tuple[float, ...]
    loads: tuple[LevelLoad, ...]
    moved: Curve
    written: float
    window: Curve
    due: Curve
    mover_rate: float
    dispatcher_rate: float
    mover: Recovery
    dispatcher: Recovery
    outage_ms: tuple[int, int]
    mover_outage: Recovery
    dispatcher_outage: Recovery

    @property
    def stored(self) -> float:
        """Largest number of messages in the levels and in the window together."""
        parts = [load.stored.values for load in self.loads]
        return max(map(sum, zip(self.window.values, *parts, strict=True)))


class DayRecord:
    """The record of one period: flows by time, and late messages.

    Args:
        levels: the levels.
        period_ms: beginning and end of the period, ms.
        bin_ms: length of the intervals of the flows, ms.
    """

    def __init__(self, levels: Levels, period_ms: tuple[int, int], bin_ms: int = BIN_MS) -> None:
        self._units_ms = [level.unit_ms for level in levels]
        self.period_ms = period_ms
        self.added = [Series(*period_ms, bin_ms) for _ in levels]
        self.handed = [Series(*period_ms, bin_ms) for _ in levels]
        self.arrivals = Series(*period_ms, bin_ms)
        self.released = Series(*period_ms, bin_ms)
        #: Messages that were in the window at the beginning of the period.
        self.waiting = 0.0
        self.late, self.worst_ms, self.last_late_ms, self.last_bad_ms = 0.0, 0.0, 0.0, 0.0

    def _width_ms(self, cohort: Cohort, level: int | None) -> float:
        """Return the time that the messages of a cohort take to leave a level, ms."""
        if cohort.rigid or level is None:
            return cohort.width_ms
        return min(cohort.width_ms, self._units_ms[level] / _BLUR)

    def parked(self, level: int, now_ms: float, cohort: Cohort, came_from: int | None) -> None:
        """Count a cohort that was published to a level."""
        self.added[level].add(now_ms, cohort.messages, self._width_ms(cohort, came_from))

    def handed_off(self, level: int, now_ms: float, cohort: Cohort) -> None:
        """Count a cohort that leaves a level."""
        self.handed[level].add(now_ms, cohort.messages, self._width_ms(cohort, level))

    def arrived(self, now_ms: float, cohort: Cohort, came_from: int | None) -> None:
        """Count a cohort that was published to the final window or the business topic."""
        begin_ms = self.period_ms[0]
        if now_ms < begin_ms:
            if cohort.due_ms < begin_ms:
                return
            self.waiting += cohort.messages
        else:
            self.arrivals.add(now_ms, cohort.messages, self._width_ms(cohort, came_from))
        due_ms = max(now_ms, cohort.due_ms)
        self.released.add(due_ms, cohort.messages, cohort.width_ms if cohort.rigid else 0)
        if now_ms > cohort.due_ms:
            self.late += cohort.messages
            self.worst_ms = max(self.worst_ms, now_ms - cohort.due_ms)
            self.last_late_ms = max(self.last_late_ms, now_ms)
            if now_ms - cohort.due_ms > _MINUTE_MS:
                self.last_bad_ms = max(self.last_bad_ms, now_ms)

    def recovery(self, busy: bool) -> Recovery:
        """Return the late messages; ``busy`` says that the mover is still behind."""
        begin_ms, end_ms = self.period_ms
        if self.late < _ONE and not busy:
            return Recovery()

        def after(last_ms: float) -> float | None:
            return None if last_ms >= end_ms - BIN_MS else max(last_ms - begin_ms, 0.0)

        on_time_ms = None if busy else after(self.last_late_ms)
        return Recovery(self.late, self.worst_ms, on_time_ms, after(self.last_bad_ms))

    def window(self) -> list[float]:
        """Return the number of messages in the final window at the end of each interval."""
        return pending(self.waiting, self.arrivals.values(), self.released.values())


def simulate(
    levels: Levels,
    traffic: Traffic,
    *,
    mover_rate: float,
    dispatcher_rate: float,
    days: int | None = None,
    outage_ms: tuple[int, int] = (12 * 3_600_000, 13 * 3_600_000),
    rebuild_s: float = 0.0,
    resolution: Resolution = NORMAL,
) -> SimulatedDay:
    """Run traffic through levels, day by day, and examine the last day.

    Args:
        mover_rate: messages per second that the mover can hand off.
        dispatcher_rate: messages per second that the dispatchers can release.
        days: number of days; by default one more than the longest delay.
        outage_ms: beginning and end of the outages on the last day, ms after midnight.
        rebuild_s: time that the dispatchers need after an outage until they release, seconds.
        resolution: the fineness of the division into cohorts.

    Raises:
        InvalidInputError: a number of days, a rate or a time is out of range.
    """
    if days is None:
        days = 1 - -traffic.maximum_ms // DAY_MS
    if days < 1 or not (mover_rate > 0 and dispatcher_rate > 0):
        raise InvalidInputError("days and rates must be more than zero")
    if not 0 <= outage_ms[0] <= outage_ms[1] <= DAY_MS:
        raise InvalidInputError("an outage must begin and end on the examined day")
    begin_ms, end_ms = examined = (days - 1) * DAY_MS, days * DAY_MS
    divided = traffic.cohorts(levels, end_ms, examined, resolution)
    cohorts = sorted(divided, key=attrgetter("published_ms"))
    description = level_topic(levels)
    movement = Movement(description, cohorts)
    record = movement.recorder = DayRecord(levels, examined)
    growth = []
    for day in range(1, days):
        movement.run(day * DAY_MS)
        growth.append(max(0.0, sum(movement.stored)))
    rest = cohorts[bisect_left(cohorts, begin_ms, key=attrgetter("published_ms")) :]
    # Cohorts in the middle of an interval that begins on this day count, too.
    last_ms = end_ms + DAY_MS // resolution.fine
    before, untouched = list(movement.stored), copy.deepcopy(record)

    def examine(rate: float, outage: tuple[int, int] = (0, 0)) -> Recovery:
        fork = movement.fork(rest)
        fork.rate = rate
        fork.outage_ms = (begin_ms + outage[0], begin_ms + outage[1])
        found = fork.recorder = copy.deepcopy(untouched)
        fork.run(last_ms)
        return found.recovery(fork.busy_until_ms > last_ms)

    at_rate, outage = examine(mover_rate), examine(mover_rate, outage_ms)
    movement.run(last_ms)
    growth.append(max(0.0, sum(movement.stored)))
    # The dispatchers by themselves: with a mover that is in time.
    due = record.released.values()
    down_ms = (outage_ms[0], outage_ms[1] + round(rebuild_s * 1000))
    return SimulatedDay(
        levels=levels,
        days=days,
        cohorts=len(cohorts),
        topics=len(list(description.members())),
        partitions=sum(member.partitions for member in description.members()),
        growth=tuple(growth),
        loads=tuple(_load(levels, index, before, record) for index in range(len(levels))),
        moved=_sum([series.rates() for series in record.handed]),
        written=_written(record),
        window=Curve(tuple(max(0.0, value) for value in record.window())),
        due=Curve(tuple(record.released.rates())),
        mover_rate=mover_rate,
        dispatcher_rate=dispatcher_rate,
        mover=at_rate,
        dispatcher=release(due, dispatcher_rate),
        outage_ms=outage_ms,
        mover_outage=outage,
        dispatcher_outage=release(due, dispatcher_rate, down_ms),
    )


def release(
    due: Sequence[float],
    rate: float,
    down_ms: tuple[int, int] = (0, 0),
    bin_ms: int = BIN_MS,
) -> Recovery:
    """Return the recovery of dispatchers that release in order of the due times.

    Args:
        due: number of messages that become due in each interval.
        rate: messages per second that they can release.
        down_ms: beginning and end of a time without dispatchers, ms.
        bin_ms: length of an interval, ms.
    """
    wanted = list(accumulate(due, initial=0.0))
    released, late, worst_ms, first = 0.0, 0.0, 0.0, 0
    last_late_ms = last_bad_ms = 0.0
    for index in range(len(due)):
        begin_ms, end_ms = index * bin_ms, (index + 1) * bin_ms
        up_ms = bin_ms - max(0, min(end_ms, down_ms[1]) - max(begin_ms, down_ms[0]))
        before = released
        released = min(wanted[index + 1], released + rate * up_ms / 1000)
        # Messages that were due in an earlier interval.
        late += max(0.0, min(released, wanted[index]) - before)
        # The first one that is not released became due in interval `first`.
        while first < index and wanted[first + 1] <= released + _ONE:
            first += 1
        if wanted[index] > released + _ONE:
            # It became due within its interval, in proportion to the messages before it.
            part = (released - wanted[first]) / (wanted[first + 1] - wanted[first])
            late_ms = end_ms - (first + part) * bin_ms
            worst_ms, last_late_ms = max(worst_ms, late_ms), end_ms
            if late_ms > _MINUTE_MS:
                last_bad_ms = end_ms

    def after(last_ms: float) -> float | None:
        return None if last_ms == len(due) * bin_ms else last_ms

    return Recovery(late, worst_ms, after(last_late_ms), after(last_bad_ms))


def _load(levels: Levels, index: int, before: Sequence[float], record: DayRecord) -> LevelLoad:
    stored = pending(before[index], record.added[index].values(), record.handed[index].values())
    return LevelLoad(
        name=levels[index].name,
        partitions=levels[index].partitions,
        stored=Curve(tuple(max(0.0, value) for value in stored)),
        handed_off=Curve(tuple(record.handed[index].rates())),
    )


def _sum(series: Sequence[Sequence[float]]) -> Curve:
    return Curve(tuple(map(sum, zip(*series, strict=True))))


def _written(record: DayRecord) -> float:
    """Return how often a message is stored on its way, the business topic included."""
    levels = sum(sum(series.values()) for series in record.added)
    window, released = sum(record.arrivals.values()), sum(record.released.values())
    # The flows are steady, so what was published is what arrives in the window.
    return levels / window + 2.0 if window and released else 0.0
