"""Rows in memory that are not spilled yet: a few sorted runs, merged as they grow."""

from __future__ import annotations

from .cursors import PayloadRows

#: Number of adjacent runs of similar size that are merged into one.
_FAN_IN = 4
#: Size from which runs are not merged any more, so that no call waits for a large merge.
_MAX_MERGED_ROWS = 32_768


class MemoryRuns:
    """Sorted runs in memory, merged with neighbours of similar size.

    Each row is merged O(log rows) times, a few thousand rows at once. Source: log-structured
    merge-trees (O'Neil et al., 1996).
    """

    def __init__(self, mask: int) -> None:
        self._mask = mask  # truncates due times
        self.runs: list[PayloadRows] = []
        self.memory_bytes = 0

    def add(self, part: PayloadRows) -> None:
        """Add rows in any order and take ownership of them."""
        self.memory_bytes += part.memory_bytes
        self.runs.append(PayloadRows.join([part], self._mask))
        while True:
            level = _size_class(self.runs[-1].count)
            first = len(self.runs) - 1
            while first and _size_class(self.runs[first - 1].count) <= level:
                first -= 1
            if len(self.runs) - first < _FAN_IN or self.runs[-1].count >= _MAX_MERGED_ROWS:
                return
            self.runs[first:] = [PayloadRows.join(self.runs[first:], self._mask)]

    def drop_empty(self) -> None:
        """Drop empty runs, and recompute ``memory_bytes``."""
        self.runs = [run for run in self.runs if run.count]
        self.memory_bytes = sum(run.memory_bytes for run in self.runs)

    def take_all(self) -> PayloadRows:
        """Remove and return all rows, sorted."""
        whole = PayloadRows.join(self.runs, self._mask)
        self.clear()
        return whole

    def clear(self) -> None:
        """Drop all rows."""
        self.runs = []
        self.memory_bytes = 0


def _size_class(rows: int) -> int:
    """Return half the binary logarithm: sizes of one class differ by a factor of at most four."""
    return rows.bit_length() // 2
