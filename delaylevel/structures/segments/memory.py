"""Rows in memory that are not spilled yet: a few sorted runs, merged as they grow."""

from __future__ import annotations

from .cursors import MemoryCursor, PayloadRows, join

#: Number of adjacent runs of similar size that are merged into one.
_FAN_IN = 4
#: Size from which runs are not merged any more, so that no call waits for a large merge.
_MAX_MERGED_ROWS = 32_768


class MemoryRuns:
    """Sorted runs in memory, merged with neighbours of similar size.

    Each row is merged O(log rows) times, a few thousand rows at once. Source: log-structured
    merge-trees (O'Neil et al., 1996).
    """

    def __init__(self, mask: int, row_bytes: int) -> None:
        """Create an empty list of runs.

        Args:
            mask: bit mask that truncates due times.
            row_bytes: memory of a row in addition to its payload, in bytes.
        """
        self._mask = mask
        self._row_bytes = row_bytes
        self.runs: list[MemoryCursor] = []
        self.size_bytes = 0

    def add(self, part: PayloadRows) -> None:
        """Add rows in any order and take ownership of them."""
        self.size_bytes += part.size_bytes(self._row_bytes)
        self.runs.append(self._sorted([part]))
        while True:
            level = _size_class(self.runs[-1].remaining)
            first = len(self.runs) - 1
            while first and _size_class(self.runs[first - 1].remaining) <= level:
                first -= 1
            if len(self.runs) - first < _FAN_IN or self.runs[-1].remaining >= _MAX_MERGED_ROWS:
                return
            self.runs[first:] = [self._sorted([run.rest() for run in self.runs[first:]])]

    def min_due(self) -> int | None:
        """Return the earliest truncated due time, ms, or None."""
        return min((run.first_due for run in self.runs), default=None)

    def drop_empty(self) -> None:
        """Drop empty runs, and recompute ``size_bytes``."""
        self.runs = [run for run in self.runs if run.remaining]
        self.size_bytes = sum(run.memory_bytes for run in self.runs)

    def take_all(self) -> PayloadRows:
        """Remove and return all rows, sorted."""
        whole = join([run.rest() for run in self.runs], self._mask)
        self.clear()
        return whole

    def clear(self) -> None:
        """Drop all rows."""
        self.runs = []
        self.size_bytes = 0

    def _sorted(self, parts: list[PayloadRows]) -> MemoryCursor:
        return MemoryCursor(join(parts, self._mask), self._mask, self._row_bytes)


def _size_class(rows: int) -> int:
    """Return half the binary logarithm: sizes of one class differ by a factor of at most four."""
    return rows.bit_length() // 2
