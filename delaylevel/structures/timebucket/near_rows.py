"""Near-due rows of a tracker, in sorted runs that are merged slice by slice."""

from __future__ import annotations

import numpy as np

from delaylevel.structures.rows import (
    DUE,
    ENTRY,
    LEDGER,
    Key,
    Rows,
    empty_rows,
    find_key,
    sort_rows,
    without_row,
)

#: Approximate number of rows that are merged at once; a get seldom waits for more.
_SLICE_ROWS = 6144
#: Sampling interval within each run when the edge of the next slice is chosen.
_STRIDE = 128
_MAX_RUNS = 128

_LOWEST: Key = (-(1 << 63), -1, -1)


class NearRows:
    """Decoded rows: a sorted slice to return next, and sorted runs of later rows.

    Every row below ``_edge`` is in the slice, every other row in a run.
    """

    def __init__(self) -> None:
        self._runs: list[Rows] = []
        self._slice = empty_rows()
        self._edge: Key = _LOWEST
        self.rows = 0

    def add(self, rows: Rows) -> None:
        """Add rows in the order of their keys; merge those below the edge into the slice."""
        n = rows.shape[1]
        if not n:
            return
        self.rows += n
        below = find_key(rows, self._edge)
        if below:
            self._slice = sort_rows(np.concatenate((self._slice, rows[:, :below]), axis=1))
            self._shorten_slice()
        if below < n:
            self._runs.append(rows[:, below:])
            if len(self._runs) > _MAX_RUNS:
                self._merge_small_runs()

    def take(self, limit: int, end: Key, bound: Key | None) -> Rows:
        """Remove and return up to ``limit`` rows, in the order of their keys.

        Args:
            limit: number of rows.
            end: exclusive upper bound of their keys.
            bound: key up to which all rows are here; None for all rows.
        """
        if bound is not None:
            end = min(end, bound)
        parts: list[Rows] = []
        while limit > 0:
            if not self._slice.shape[1]:
                if not self._runs:
                    break
                self._cut_slice(limit, bound)
                if not self._slice.shape[1]:
                    break
            below = min(find_key(self._slice, end), limit)
            if not below:
                break
            parts.append(self._slice[:, :below])
            self._slice = self._slice[:, below:]
            limit -= below
            self.rows -= below
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts, axis=1) if parts else empty_rows()

    def remove(self, key: Key) -> bool:
        """Remove one row; return False if there is none with this key."""
        parts = [self._slice, *self._runs]
        for index, part in enumerate(parts):
            rest = without_row(part, key)
            if rest is not None:
                parts[index] = rest
                self._slice, *runs = parts
                self._runs = [run for run in runs if run.shape[1]]
                self.rows -= 1
                return True
        return False

    def parts(self) -> list[Rows]:
        """Return all rows, in parts that are each in the order of their keys."""
        parts = [self._slice] if self._slice.shape[1] else []
        return parts + self._runs

    def min_due(self) -> int | None:
        """Return the earliest due time, ms; None without rows."""
        if self._slice.shape[1]:
            return int(self._slice[DUE, 0])
        return min((int(run[DUE, 0]) for run in self._runs), default=None)

    def _shorten_slice(self) -> None:
        if self._slice.shape[1] > 4 * _SLICE_ROWS:
            rest = self._slice[:, _SLICE_ROWS:].copy()
            self._edge = (int(rest[DUE, 0]), int(rest[LEDGER, 0]), int(rest[ENTRY, 0]))
            # Rows equal to the edge belong behind it.
            keep = find_key(self._slice, self._edge)
            self._runs.append(np.concatenate((self._slice[:, keep:_SLICE_ROWS], rest), axis=1))
            self._slice = self._slice[:, :keep].copy()

    def _cut_slice(self, limit: int, bound: Key | None) -> None:
        """Fill the empty slice with the lowest rows of all runs that are below the bound.

        This includes rows that are not due yet: many small calls would search all runs otherwise.
        """
        edge = self._sampled_edge(max(limit, _SLICE_ROWS))
        if bound is not None:
            edge = min(edge, bound)
        parts, runs = [], []
        for run in self._runs:
            below = find_key(run, edge)
            if below:
                parts.append(run[:, :below])
            if below < run.shape[1]:
                runs.append(run[:, below:])
        if not parts:
            return
        self._edge = edge
        self._runs = runs
        self._slice = sort_rows(np.concatenate(parts, axis=1))

    def _sampled_edge(self, want: int) -> Key:
        """Return a key with about ``want`` rows below it, and at least one, from a sample."""
        if sum(run.shape[1] for run in self._runs) <= want + want // 2:
            return (1 << 63) - 1, 0, 0
        marks = [run[:, _STRIDE - 1 :: _STRIDE] for run in self._runs]
        sample = sort_rows(np.concatenate(marks, axis=1))
        if not sample.shape[1]:
            return (1 << 63) - 1, 0, 0
        index = min(want // _STRIDE, sample.shape[1]) - 1
        due, ledger, entry = (int(x) for x in sample[:, index])
        return due, ledger, entry + 1

    def _merge_small_runs(self) -> None:
        self._runs.sort(key=lambda run: run.shape[1], reverse=True)
        small = self._runs[_MAX_RUNS // 2 :]
        del self._runs[_MAX_RUNS // 2 :]
        self._runs.append(sort_rows(np.concatenate(small, axis=1)))

    def check(self) -> None:
        """Check the invariants of the class."""
        assert self.rows == sum(part.shape[1] for part in self.parts())
        for part in self.parts():
            assert sort_rows(part) is part
        assert find_key(self._slice, self._edge) == self._slice.shape[1]
        for run in self._runs:
            assert run.shape[1]
            assert find_key(run, self._edge) == 0
