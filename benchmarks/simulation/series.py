"""Counts of messages by time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


class Series:
    """Numbers of messages in equal intervals, to which those of cohorts are added.

    Args:
        start_ms: beginning of the first interval, ms.
        end_ms: time from which nothing is counted, ms.
        bin_ms: length of an interval, ms.
    """

    __slots__ = ("_bins", "_part", "_step", "bin_ms", "end_ms", "start_ms")

    def __init__(self, start_ms: int, end_ms: int, bin_ms: int) -> None:
        self.start_ms = start_ms
        self.bin_ms = bin_ms
        self._bins = max(1, -(-(end_ms - start_ms) // bin_ms))
        self.end_ms = start_ms + self._bins * bin_ms
        # An even flow adds the same number to all intervals between its first and its last one.
        # Only the change of that number is stored, so that a wide cohort costs no more than a
        # narrow one.
        self._step = [0.0] * (self._bins + 1)
        self._part = [0.0] * self._bins

    def __len__(self) -> int:
        return self._bins

    def add(self, middle_ms: float, count: float, width_ms: float = 0) -> None:
        """Add messages, evenly over an interval of ``width_ms`` around ``middle_ms``.

        The part of the interval outside of the series is left out.
        """
        start_ms, bin_ms = self.start_ms, self.bin_ms
        first_ms = middle_ms - width_ms / 2
        last_ms = middle_ms + width_ms / 2
        if last_ms < start_ms or first_ms >= self.end_ms:
            return
        if width_ms <= 0:
            self._part[int((middle_ms - start_ms) // bin_ms)] += count
            return
        per_ms = count / width_ms
        since_ms = max(first_ms - start_ms, 0.0)
        until_ms = min(last_ms, self.end_ms) - start_ms
        first, last = int(since_ms // bin_ms), int(until_ms // bin_ms)
        if first == last:
            self._part[first] += per_ms * (until_ms - since_ms)
            return
        self._part[first] += per_ms * ((first + 1) * bin_ms - since_ms)
        self._step[first + 1] += per_ms * bin_ms
        self._step[last] -= per_ms * bin_ms
        if last < self._bins:
            self._part[last] += per_ms * (until_ms - last * bin_ms)

    def values(self) -> list[float]:
        """Return the number of messages of each interval."""
        steps = accumulate(self._step)
        return [part + step for part, step in zip(self._part, steps, strict=False)]

    def rates(self) -> list[float]:
        """Return the messages per second of each interval."""
        return [value * 1000 / self.bin_ms for value in self.values()]

    def time_ms(self, index: int) -> int:
        """Return the beginning of an interval, ms."""
        return self.start_ms + index * self.bin_ms


def pending(before: float, added: Sequence[float], removed: Sequence[float]) -> list[float]:
    """Return the messages that are pending at the end of each interval.

    Args:
        before: number of messages at the beginning.
        added, removed: number of messages added and removed in each interval.
    """
    changes = (more - less for more, less in zip(added, removed, strict=True))
    return list(accumulate(changes, initial=before))[1:]
