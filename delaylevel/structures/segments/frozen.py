"""The pending rows at one moment, for queries in another thread: rows in a range, and averages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from delaylevel.structures.rows import DUE, Int64s, argsort_columns, empty_rows

from .cursors import FileCursor
from .file import SCHEMA, Columns, Floats, Run, SegmentFile, to_arrow

#: Number of runs of one slice of work: some tenths of a millisecond.
_SLICE_RUNS = 8


class Range(NamedTuple):
    """Range of a query: due times in [from, before), and attributes in [least, most]."""

    from_ms: int
    before_ms: int
    least: float = -np.inf
    most: float = np.inf

    def touches(self, run: Run) -> bool:
        """Return whether the run may have a row that is due in the range."""
        return run.min_due < self.before_ms and run.max_due >= self.from_ms

    def covers(self, run: Run) -> bool:
        """Return whether all due times of the run are in the range."""
        return self.from_ms <= run.min_due and run.max_due < self.before_ms

    def cut(self, part: Columns) -> Columns:
        """Return the rows that are due in the range, of rows in due order."""
        first, last = self.bounds(part.rows[DUE])
        return Columns(part.rows[:, first:last], part.attribute[first:last])

    def bounds(self, due: Int64s) -> tuple[int, int]:
        """Return the indices [first, last) of the rows due in the range, of sorted due times."""
        first, last = due.searchsorted([self.from_ms, self.before_ms]).tolist()
        return first, max(first, last)


T = TypeVar("T")


class FrozenRows:
    """The pending rows in a range, as they were when they were added.

    The thread of the segments adds references to arrays, which do not change any more, and to
    files. Another thread asks, closes it, and enters ``working()`` for each slice of the work.
    """

    def __init__(
        self, wanted: Range, working: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self.wanted = wanted
        self._working = working
        self._sorted: list[Columns] = []
        self._unsorted: list[Callable[[], Columns]] = []
        # Open files, which may have no name any more; a run in each, and how many rows it has lost.
        self._open: list[tuple[SegmentFile, Run, int]] = []
        self._duplicates: list[SegmentFile] = []
        # Paths of the files that are not open for reading, and the runs in them until now.
        self._files: list[tuple[Path, list[Run]]] = []

    def add(
        self,
        parts: Sequence[Columns],
        unsorted: Callable[[], Columns],
        cursors: Sequence[FileCursor] = (),
        files: Sequence[tuple[Path, list[Run]]] = (),
    ) -> None:
        """Add parts in due order, and a function for rows that the thread that asks sorts."""
        self._sorted += parts
        self._unsorted.append(unsorted)
        duplicates: dict[Path, SegmentFile] = {}
        for cursor in cursors:
            file = duplicates.get(cursor.file.path)
            if file is None:
                file = duplicates[cursor.file.path] = cursor.file.duplicate()
                self._duplicates.append(file)
            self._open.append((file, cursor.run, cursor.taken))
        self._files += [(path, runs[:]) for path, runs in files]

    def close(self) -> None:
        """Close the files."""
        for file in self._duplicates:
            file.release()
        self._duplicates = []

    @property
    def span(self) -> tuple[int, int] | None:
        """Bounds of the due times of all rows, [first, last], ms since the epoch; None without."""
        cut = [self.wanted.cut(part).rows[DUE] for part in self._parts()]
        spans = [(int(due[0]), int(due[-1])) for due in cut if due.size]
        runs = [run for _, run, _ in self._open] + [run for _, some in self._files for run in some]
        spans += [(run.min_due, run.max_due) for run in runs if self.wanted.touches(run)]
        if not spans:
            return None
        first, last = min(low for low, _ in spans), max(high for _, high in spans)
        return max(first, self.wanted.from_ms), min(last, self.wanted.before_ms - 1)

    def table(self, before_ms: int | None = None) -> pa.Table:
        """Return the rows in due order; FileNotFoundError if a file was used up meanwhile."""
        wanted = self.wanted
        if before_ms is not None:
            wanted = wanted._replace(before_ms=min(before_ms, wanted.before_ms))
        rows, attribute = self._collected(wanted)
        order = argsort_columns(*rows)
        if order is not None:
            rows, attribute = np.take(rows, order, axis=1), attribute.take(order)
        return pa.table(list(map(to_arrow, [*rows, attribute])), names=SCHEMA.names[:4])

    def attributes(self) -> Floats:
        """Return the attributes of the rows in any order; errors as for `table`."""
        return self._collected(self.wanted).attribute

    def counts(self, edges_ms: Int64s) -> Int64s:
        """Return the number of rows due before each edge; errors as for `table`."""
        wanted = Range(self.wanted.from_ms, self.wanted.before_ms)  # whatever their attributes

        def counted(file: SegmentFile, run: Run, taken: int) -> Int64s:
            first, last = edges_ms.searchsorted([run.min_due, run.max_due], side="right")
            if first == last and not taken and wanted.covers(run):
                whole: Int64s = (edges_ms > run.max_due) * run.rows
                return whole
            due = file.read_due(run)[taken:]
            low, high = wanted.bounds(due)
            return due[low:high].searchsorted(edges_ms)

        total = np.zeros(edges_ms.size, dtype=np.int64)
        for part in self._parts():
            total += wanted.cut(part).rows[DUE].searchsorted(edges_ms)
        for found in self._read(wanted, counted):
            total += found
        return total

    def _parts(self) -> list[Columns]:
        """Return the rows in memory, each part in due order."""
        unsorted, self._unsorted = self._unsorted, []
        self._sorted += [function() for function in unsorted]
        return self._sorted

    def _collected(self, wanted: Range) -> Columns:
        """Return the rows in a range, in any order."""

        def read(file: SegmentFile, run: Run, taken: int) -> Columns:
            whole = file.read_slice(run, taken, run.rows) if taken else file.read_columns(run)
            return wanted.cut(whole)

        parts = [wanted.cut(part) for part in self._parts()] + self._read(wanted, read)
        rows = np.concatenate([empty_rows(), *(part.rows for part in parts)], axis=1)
        attribute = np.concatenate([np.empty(0), *(part.attribute for part in parts)])
        if wanted.least == -np.inf and wanted.most == np.inf:
            return Columns(rows, attribute)
        index = np.flatnonzero((attribute >= wanted.least) & (attribute <= wanted.most))
        return Columns(np.take(rows, index, axis=1), attribute.take(index))

    def _read(self, wanted: Range, read: Callable[[SegmentFile, Run, int], T]) -> list[T]:
        """Return what a function of file, run and lost rows returns for each run in the range."""
        found = [read(*each) for each in self._open if wanted.touches(each[1])]
        for path, runs in self._files:
            touched = [run for run in runs if wanted.touches(run)]
            if touched:
                with SegmentFile.reading(path) as file:
                    for start in range(0, len(touched), _SLICE_RUNS):
                        with self._working():
                            some = touched[start : start + _SLICE_RUNS]
                            found += [read(file, run, 0) for run in some]
        return found
