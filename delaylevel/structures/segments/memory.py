"""Rows in memory beside the spill files: a few sorted runs, merged as they grow."""

from __future__ import annotations

from .cursors import MemoryCursor, Part, join

#: So many neighbours of about one size are merged into one.
_FAN = 4
#: Runs from this size on stay as they are, so that no call waits for a large merge.
_LARGEST = 32_768


class Memory:
    """Sorted runs; each row is merged O(log rows) times, a few thousand rows at once."""

    def __init__(self, mask: int, row_bytes: int) -> None:
        """Create an empty one.

        Args:
            mask: what due times are truncated with.
            row_bytes: what a row costs beside its payload.
        """
        self._mask = mask
        self._row_bytes = row_bytes
        self.runs: list[MemoryCursor] = []
        self.size_bytes = 0

    def add(self, part: Part) -> None:
        """Add rows in any order; the part is no longer the caller's."""
        self.size_bytes += part.size_bytes(self._row_bytes)
        self.runs.append(self._sorted([part]))
        while True:
            level = _level(self.runs[-1].left)
            first = len(self.runs) - 1
            while first and _level(self.runs[first - 1].left) <= level:
                first -= 1
            if len(self.runs) - first < _FAN or self.runs[-1].left >= _LARGEST:
                return
            self.runs[first:] = [self._sorted([run.rest() for run in self.runs[first:]])]

    def min_due(self) -> int | None:
        """Return the earliest truncated due time, or None."""
        return min((run.first_due for run in self.runs), default=None)

    def settle(self) -> None:
        """Forget runs that are used up, and count again what is left."""
        self.runs = [run for run in self.runs if run.left]
        self.size_bytes = sum(run.memory_bytes for run in self.runs)

    def whole(self) -> Part:
        """Remove and return all rows, sorted."""
        whole = join([run.rest() for run in self.runs], self._mask)
        self.clear()
        return whole

    def clear(self) -> None:
        """Drop all rows."""
        self.runs = []
        self.size_bytes = 0

    def _sorted(self, parts: list[Part]) -> MemoryCursor:
        return MemoryCursor(join(parts, self._mask), self._mask, self._row_bytes)


def _level(rows: int) -> int:
    return rows.bit_length() // 2
