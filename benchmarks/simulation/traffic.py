"""Traffic of delayed messages, divided into cohorts.

Messages are published at a constant rate. A share of them is due at one time of the day, such as
nine o'clock, and the others at any time. The length of a delay has a truncated exponential
distribution with the given mean; with half of the longest delay as the mean, all delays are
equally frequent.

The division is fine for the examined period, and coarse before it. Delays are divided into strata
of equal probability, and further at the units of the levels, so that each way through the levels
has cohorts. Within a stratum one delay stands for all. Its remainders by the units of the levels
are spread evenly over the strata, because they decide how long a message stays in each level.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from delaylevel.errors import InvalidInputError
from delaylevel.model.router import Router
from delaylevel.model.strategy import Levels

from .movement import Cohort
from .path import hop_times

DAY_MS = 86_400_000
NINE_MS = 9 * 3_600_000

# No stratum is longer than this part of the longest delay.
_LONGEST = 32
# Of the multiples of this number, the fractions are spread most evenly.
_GOLDEN = (5**0.5 - 1) / 2
# Powers of the root of x^5 = x + 1, of which no sum is a whole number: points that fill a space
# of four dimensions evenly.
_PHASES = tuple(1.1673039782614187**-power for power in range(1, 9))


@dataclass(frozen=True)
class Resolution:
    """The fineness of the division into cohorts.

    Attributes:
        strata: number of strata of equal probability.
        coarse: number of publish intervals in the longest delay.
        fine: number of publish intervals in the examined period.
        later: the same for messages that are due at a later peak.
        peaks: largest number of peaks at which messages of one interval are due.
    """

    strata: int = 160
    coarse: int = 365
    fine: int = 576
    later: int = 24
    peaks: int = 40


NORMAL = Resolution()


@dataclass(frozen=True)
class Traffic:
    """A load of delayed messages over time. Times count from a midnight, in the local time.

    Attributes:
        rate: messages per second.
        maximum_ms: the longest delay, ms.
        mean_ms: the mean delay, ms, between zero and the longest.
        peak_share: share of the messages that are due at the peak, 0 to 1.
        peak_every_ms: time between two peaks, ms.
        peak_at_ms: time of the first peak, ms.
        peak_spread_ms: time over which the messages of a peak are due, ms.

    Raises:
        InvalidInputError: a value is out of range.
    """

    rate: float
    maximum_ms: int
    mean_ms: float
    peak_share: float = 0.0
    peak_every_ms: int = DAY_MS
    peak_at_ms: int = NINE_MS
    peak_spread_ms: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.mean_ms < self.maximum_ms:
            raise InvalidInputError("the mean delay must be between zero and the longest delay")
        if not 0 <= self.peak_share <= 1:
            raise InvalidInputError(f"a share of {self.peak_share} is not between 0 and 1")
        if not 0 <= self.peak_spread_ms <= self.peak_every_ms:
            raise InvalidInputError("a peak must not last longer than the time to the next one")

    @cached_property
    def _decay(self) -> float:
        """The rate of the exponential distribution, in longest delays; 0 for an even one."""
        wanted = self.mean_ms / self.maximum_ms
        low, high = -700.0, 700.0
        for _ in range(80):
            middle = (low + high) / 2
            if _mean(middle) > wanted:
                low = middle
            else:
                high = middle
        return 0.0 if abs(low) < 1e-6 else low

    def shorter(self, delay_ms: float) -> float:
        """Return the share of messages with a delay of at most this, 0 to 1."""
        part = min(max(delay_ms / self.maximum_ms, 0.0), 1.0)
        decay = self._decay
        return part if decay == 0 else math.expm1(-decay * part) / math.expm1(-decay)

    def quantile(self, share: float) -> float:
        """Return the delay, ms, that this share of the messages does not exceed."""
        decay = self._decay
        if share >= 1:
            return float(self.maximum_ms)
        part = share if decay == 0 else -math.log1p(share * math.expm1(-decay)) / decay
        return min(part, 1.0) * self.maximum_ms

    def _density(self, delay_ms: float) -> float:
        return math.exp(-self._decay * delay_ms / self.maximum_ms)

    def cohorts(
        self,
        levels: Levels,
        end_ms: int,
        examined_ms: tuple[int, int],
        resolution: Resolution = NORMAL,
    ) -> Iterator[Cohort]:
        """Yield the messages that are published from time 0 on, in no order.

        Args:
            levels: the levels through which they go.
            end_ms: time from which no more are published, ms.
            examined_ms: beginning and end of the period for which the division is fine.
        """
        since_ms, until_ms = examined_ms
        fine_ms = (until_ms - since_ms) / resolution.fine
        coarse_ms = max(1, self.maximum_ms // resolution.coarse)
        strata = list(self._strata(levels, resolution.strata))
        for number, begin_ms in enumerate(range(0, end_ms, coarse_ms)):
            width_ms = min(coarse_ms, end_ms - begin_ms)
            messages = self.rate * width_ms / 1000
            peaks = self._peaks(begin_ms, width_ms, number, resolution.peaks)
            in_peaks = self.peak_share if peaks else 0.0
            for stratum in strata:
                count = messages * (1 - in_peaks) * stratum.share
                yield from _even(begin_ms, width_ms, count, stratum, examined_ms, fine_ms)
            for peak_ms, share in peaks:
                pieces, spread = 1.0, False
                if since_ms <= peak_ms + self.peak_spread_ms and peak_ms < until_ms:
                    pieces, spread = width_ms / fine_ms, True
                elif (begin_ms + width_ms > since_ms and begin_ms < until_ms) or (
                    since_ms < peak_ms < until_ms + width_ms + _longest_stay_ms(levels)
                ):
                    pieces = width_ms * resolution.later / (until_ms - since_ms)
                count = messages * in_peaks * share
                number_of = min(max(1, round(pieces)), width_ms)
                yield from self._due_at(peak_ms, begin_ms, width_ms, count, number_of, spread)

    def _strata(self, levels: Levels, count: int) -> Iterator[_DelayStratum]:
        """Yield strata that cover all delays, each with one delay for all of its messages."""
        edges = {self.quantile(number / count) for number in range(count + 1)}
        shortest = self.quantile(1 / count)
        # Where long delays are rare, their strata would be long.
        edges |= {self.maximum_ms * number / _LONGEST for number in range(1, _LONGEST)}
        length = levels[-1].unit_ms / 8
        while length < shortest:
            edges.add(length)
            length *= 2
        edges |= {float(level.unit_ms) for level in levels if level.unit_ms < self.maximum_ms}
        ordered = sorted(edges)
        router = Router(levels)
        for number, (low, high) in enumerate(pairwise(ordered), 1):
            share = self.shorter(high) - self.shorter(low)
            if share > 0:
                within = self.quantile(self.shorter(low) + share * (number * _PHASES[0] % 1))
                delay_ms = _representative(within, low, high, levels, number)
                hops_ms = tuple(hop_times(router, delay_ms))
                yield _DelayStratum(delay_ms, share, number * _PHASES[1] % 1, hops_ms)

    def _peaks(
        self, begin_ms: int, width_ms: int, number: int, most: int
    ) -> list[tuple[int, float]]:
        """Return the peaks at which messages of one interval are due, each with its share."""
        if not self.peak_share:
            return []
        every_ms = self.peak_every_ms
        first = (begin_ms + width_ms - self.peak_at_ms) // every_ms + 1
        last = (begin_ms + self.maximum_ms - self.peak_spread_ms - self.peak_at_ms) // every_ms
        # Each interval takes other peaks, so that all intervals together reach every one.
        stride = max(1, -(-(last - first + 1) // most))
        times = [
            self.peak_at_ms + every_ms * peak
            for peak in range(first + (number - first) % stride, last + 1, stride)
        ]
        weights = [self._density(time_ms - begin_ms) for time_ms in times]
        return [(at, weight / sum(weights)) for at, weight in zip(times, weights, strict=True)]

    def _due_at(
        self, peak_ms: int, begin_ms: int, width_ms: int, count: float, pieces: int, spread: bool
    ) -> Iterator[Cohort]:
        """Yield the messages of one interval that are due at one peak.

        Args:
            spread: True to spread the times of the cohorts evenly within their intervals. All
                messages of a cohort move at one time; at the peak, these times must differ.
        """
        part_ms = width_ms / pieces
        for piece in range(pieces):
            number = (begin_ms // 1000 + peak_ms // 1000) * 31 + piece
            phase = number * _GOLDEN % 1 if spread else 0.5
            published_ms = int(begin_ms + (piece + phase) * part_ms)
            due_ms = peak_ms + int(number * _PHASES[1] % 1 * self.peak_spread_ms)
            yield Cohort(published_ms, due_ms, count / pieces, math.ceil(part_ms), False)


@dataclass(frozen=True)
class _DelayStratum:
    """Delays of similar length, with one delay that stands for all.

    Attributes:
        delay_ms: this delay, ms.
        share: share of the messages.
        phase: place of each cohort within its interval, 0 to 1. Strata must not move all at once.
        hops_ms: times of its hops after publishing, ms, up to the due time.
    """

    delay_ms: int
    share: float
    phase: float
    hops_ms: tuple[int, ...]


def _even(
    begin_ms: int,
    width_ms: int,
    count: float,
    stratum: _DelayStratum,
    examined_ms: tuple[int, int],
    fine_ms: float,
) -> Iterator[Cohort]:
    """Yield the messages of one interval and stratum, in smaller intervals if they are examined."""
    since_ms, until_ms = examined_ms
    pieces = 1
    for after_ms in (0, *stratum.hops_ms):
        if begin_ms + after_ms < until_ms and begin_ms + width_ms + after_ms > since_ms:
            pieces = min(max(1, round(width_ms / fine_ms)), width_ms)
            break
    part_ms = width_ms / pieces
    phase = stratum.phase if pieces > 1 else 0.5
    for piece in range(pieces):
        published_ms = int(begin_ms + (piece + phase) * part_ms)
        due_ms = published_ms + stratum.delay_ms
        yield Cohort(published_ms, due_ms, count / pieces, math.ceil(part_ms), True)


def _longest_stay_ms(levels: Levels) -> int:
    """Return the longest time before its due time at which a message leaves the first level."""
    return levels[0].unit_ms + levels[0].lead_ms


def _representative(within: float, low: float, high: float, levels: Levels, number: int) -> int:
    """Return a delay in [low, high) near one, with remainders by the units that are spread."""
    units = [level.unit_ms for level in levels if level.unit_ms <= high - low]
    if units:
        delay_ms = within // units[0] * units[0]
        for place, (coarse, fine) in enumerate(zip(units, [*units[1:], 1], strict=True), 1):
            phase = number * _PHASES[place % len(_PHASES)] % 1
            delay_ms += int(phase * coarse / fine) * fine
        for chosen in (delay_ms, delay_ms + units[0], delay_ms - units[0]):
            if low <= chosen < high:
                return max(1, int(chosen))
    return max(1, int(within))


def _mean(decay: float) -> float:
    """Return the mean of an exponential distribution on [0, 1]."""
    if abs(decay) < 1e-6:
        return 0.5 - decay / 12
    return 1 / decay - 1 / math.expm1(decay)
