"""The pending rows at one moment, for queries in another thread: rows in a range, and averages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from delaylevel.structures.rows import DUE, Int64s, Rows, empty_rows

from .cursors import FileCursor, PayloadRows
from .file import SCHEMA, Columns, Floats, Run, SegmentFile, to_arrow
from .opened import OpenColumns

ATTRIBUTE = 3


class Range(NamedTuple):
    """Range of a query.

    Attributes:
        start, stop: due times, ms since the epoch, [start, stop).
        attribute_min, attribute_max: attributes, both inclusive.
    """

    start: int
    stop: int
    attribute_min: float
    attribute_max: float

    def touches(self, run: Run) -> bool:
        """Return whether the run may have a row in the range."""
        return (
            run.min_due < self.stop
            and run.max_due >= self.start
            and run.min_attribute <= self.attribute_max
            and run.max_attribute >= self.attribute_min
        )

    def covers(self, run: Run) -> bool:
        """Return whether all due times of the run are in the range."""
        return self.start <= run.min_due and run.max_due < self.stop

    def cut(self, part: Columns) -> Columns:
        """Return the rows that are due in the range, of rows in due order."""
        first, last = self.bounds(part.rows[DUE])
        return Columns(part.rows[:, first:last], part.attribute[first:last])

    def bounds(self, due: Int64s) -> tuple[int, int]:
        """Return the indices [first, last) of the rows due in the range, of sorted due times."""
        first, last = due.searchsorted([self.start, self.stop]).tolist()
        return first, max(first, last)

    def select(self, attribute: Floats) -> Int64s | None:
        """Return the indices of the attributes in the range; None for all."""
        if self.attribute_min == -np.inf and self.attribute_max == np.inf:
            return None
        index: Int64s = np.flatnonzero(
            (attribute >= self.attribute_min) & (attribute <= self.attribute_max)
        )
        return index


def _argsort_due(due: Int64s) -> Int64s:
    """Return the indices that sort due times, as a stable sort.

    A radix sort by 16-bit digits, because numpy's stable sort is a radix sort for 8 and 16 bits:
    many times faster than its sort of 64-bit integers.
    """
    offset = due - due.min()
    bits = int(offset.max()).bit_length()
    order: Int64s = offset.astype(np.uint16).argsort(kind="stable")
    for shift in range(16, bits, 16):
        offset >>= 16
        high = offset.astype(np.uint8 if bits - shift <= 8 else np.uint16)
        order = order.take(high.take(order).argsort(kind="stable"))
    return order


def _sort_ties(rows: Rows, attribute: Floats) -> None:
    """Sort rows with equal due times by position, in place; the rows are in due order."""
    due, ledger, entry = rows
    same = due[1:] == due[:-1]
    tied = np.flatnonzero(same)
    low, high = ledger[tied], ledger[tied + 1]
    if not bool(((high < low) | ((high == low) & (entry[tied + 1] < entry[tied]))).any()):
        return
    both = np.flatnonzero(np.append(same, False) | np.append(False, same))
    order = both[np.lexsort((entry[both], ledger[both], due[both]))]
    rows[:, both], attribute[both] = rows[:, order], attribute[order]


def sorted_table(found: Columns, wanted: Range) -> pa.Table:
    """Return the selected rows as a table in due order, equal due times by position.

    Args:
        wanted: the range, of which the attribute bounds apply.
    """
    index = wanted.select(found.attribute)
    if not (found.attribute.size if index is None else index.size):
        return pa.Table.from_batches([], schema=pa.schema(list(SCHEMA)[:4]))
    if index is None:
        order = _argsort_due(found.rows[DUE])
    else:
        order = index.take(_argsort_due(found.rows[DUE].take(index)))
    # Arrow's allocator reuses its pages for a while; new pages cost more time than the copying.
    buffer = pa.allocate_buffer(8 * (ATTRIBUTE + 1) * order.size)
    matrix = np.frombuffer(buffer, dtype=np.int64).reshape(ATTRIBUTE + 1, -1)
    for row, source in zip(matrix, (*found.rows, found.attribute.view(np.int64)), strict=True):
        source.take(order, out=row, mode="clip")  # other modes copy through a buffer
    rows, attribute = matrix[:ATTRIBUTE], matrix[ATTRIBUTE].view(np.float64)
    _sort_ties(rows, attribute)
    return pa.table([*map(to_arrow, rows), to_arrow(attribute)], names=SCHEMA.names[:4])


#: Number of runs of one slice of work: some tenths of a millisecond.
_SLICE_RUNS = 8


class _OpenRun(NamedTuple):
    """The rest of a run whose first rows were taken; its file may have no name any more."""

    file: SegmentFile
    run: Run
    taken: int


class _ClosedFile(NamedTuple):
    """Runs of a file that are not open for reading; the first ``known`` of ``runs``."""

    path: Path
    runs: list[Run]
    known: int


class FrozenSegments:
    """The pending rows in a range of due times, as they were when the instance was made.

    The thread of the segments makes it, in some microseconds: it takes references to the arrays,
    none of which changes any more, and to the files. Another thread asks the questions, and closes
    it.

    Args:
        start, stop: due times, ms since the epoch, [start, stop).

    Attributes:
        working: function that returns a context, which each slice of the work enters. The thread of
            the segments then has to wait for a slice at most, and not for the interpreter's lock
            after each of its calls.
    """

    def __init__(
        self,
        start: int,
        stop: int,
        parts: Sequence[PayloadRows],
        cursors: Sequence[FileCursor],
        files: Sequence[tuple[Path, list[Run]]],
        opened: OpenColumns | None = None,
    ) -> None:
        self.working: Callable[[], AbstractContextManager[None]] = nullcontext
        self._range = Range(start, stop, -np.inf, np.inf)
        self._sorted = [Columns(part.rows, part.attribute) for part in parts]
        self._opened = opened
        duplicates: dict[Path, SegmentFile] = {}
        self._open: list[_OpenRun] = []
        for cursor in cursors:
            file = duplicates.get(cursor.file.path)
            if file is None:
                file = duplicates[cursor.file.path] = cursor.file.duplicate()
            self._open.append(_OpenRun(file, cursor.run, cursor.taken))
        self._duplicates = list(duplicates.values())
        self._files = [_ClosedFile(path, runs, len(runs)) for path, runs in files]

    def close(self) -> None:
        """Close the files."""
        for file in self._duplicates:
            file.release()
        self._duplicates = []

    @property
    def _parts(self) -> list[Columns]:
        """Rows in memory, each part in due order."""
        if self._opened is not None:  # sorted here, and not in the thread of the segments
            self._sorted.append(self._opened.ordered())
            self._opened = None
        return self._sorted

    @property
    def most_rows(self) -> int:
        """A number of rows that is not exceeded, without reading any file."""
        count = sum(self._range.cut(part).attribute.size for part in self._parts)
        return count + sum(run.rows for run in self._runs())

    def _runs(self) -> list[Run]:
        """Return the runs that may have rows in the range."""
        runs = [open_run.run for open_run in self._open]
        runs += [run for closed in self._files for run in closed.runs[: closed.known]]
        return [run for run in runs if self._range.touches(run)]

    @property
    def span(self) -> tuple[int, int] | None:
        """Bounds of the due times of all rows, [first, last], ms since the epoch; None without."""
        cut = [self._range.cut(part).rows[DUE] for part in self._parts]
        spans = [(int(due[0]), int(due[-1])) for due in cut if due.size]
        spans += [(run.min_due, run.max_due) for run in self._runs()]
        if not spans:
            return None
        first, last = min(low for low, _ in spans), max(high for _, high in spans)
        return max(first, self._range.start), min(last, self._range.stop - 1)

    def table(
        self,
        attribute_min: float = -np.inf,
        attribute_max: float = np.inf,
        before_ms: int | None = None,
    ) -> pa.Table:
        """Return the rows in due order, equal due times by position.

        Raises:
            FileNotFoundError: a file was used up meanwhile. Make a new instance.
        """
        wanted = self._range._replace(attribute_min=attribute_min, attribute_max=attribute_max)
        if before_ms is not None:
            wanted = wanted._replace(stop=min(before_ms, wanted.stop))
        return sorted_table(self._columns(wanted), wanted)

    def attributes(self, attribute_min: float, attribute_max: float) -> Floats:
        """Return the attributes of the rows in any order; errors as for `table`."""
        wanted = self._range._replace(attribute_min=attribute_min, attribute_max=attribute_max)
        found = self._columns(wanted, ATTRIBUTE).attribute
        index = wanted.select(found)
        return found if index is None else found.take(index)

    def counts(self, edges_ms: Int64s) -> Int64s:
        """Return the number of rows due before each edge; errors as for `table`."""
        total = np.zeros(edges_ms.size, dtype=np.int64)
        for part in self._parts:
            total += self._range.cut(part).rows[DUE].searchsorted(edges_ms)
        for open_run in self._open:
            total += self._counted(open_run.file, open_run.run, open_run.taken, edges_ms)
        for closed in self._files:
            with SegmentFile.reading(closed.path) as file:
                for some in _sliced(closed.runs[: closed.known]):
                    with self.working():
                        for run in some:
                            total += self._counted(file, run, 0, edges_ms)
        return total

    def _counted(self, file: SegmentFile, run: Run, taken: int, edges_ms: Int64s) -> Int64s:
        """Return the number of rows of a run due before each edge; read it only if necessary."""
        first, last = edges_ms.searchsorted([run.min_due, run.max_due], side="right")
        if first == last and not taken and self._range.covers(run):
            whole: Int64s = (edges_ms > run.max_due) * run.rows
            return whole
        due = file.read_due(run)[taken:]
        low, high = self._range.bounds(due)
        return due[low:high].searchsorted(edges_ms)

    def _columns(self, wanted: Range, first: int = 0) -> Columns:
        """Collect the rows in the range; the ``first`` leading columns have no contents."""
        parts = [wanted.cut(part) for part in self._parts]
        for open_run in self._open:
            if wanted.touches(open_run.run):
                run, taken = open_run.run, open_run.taken
                parts.append(wanted.cut(open_run.file.read_slice(run, taken, run.rows)))
        chosen = [
            (closed.path, [run for run in closed.runs[: closed.known] if wanted.touches(run)])
            for closed in self._files
        ]
        for path, runs in chosen:
            if runs:
                with SegmentFile.reading(path) as file:
                    for some in _sliced(runs):
                        with self.working():
                            parts += [self._read(file, run, wanted, first) for run in some]
        attribute = np.concatenate([np.empty(0), *(part.attribute for part in parts)])
        if first == ATTRIBUTE:
            return Columns(empty_rows(), attribute)
        return Columns(
            np.concatenate([empty_rows(), *(part.rows for part in parts)], axis=1), attribute
        )

    @staticmethod
    def _read(file: SegmentFile, run: Run, wanted: Range, first: int) -> Columns:
        """Read the rows of a run that are due in the range."""
        if first == ATTRIBUTE and wanted.covers(run):
            target = np.empty((ATTRIBUTE + 1, run.rows), dtype=np.int64)
            file.read_slice_into(run, 0, target[first:])
            return Columns(target[:ATTRIBUTE], target[ATTRIBUTE].view(np.float64))
        return wanted.cut(file.read_columns(run))


def _sliced(runs: list[Run]) -> Iterator[list[Run]]:
    for start in range(0, len(runs), _SLICE_RUNS):
        yield runs[start : start + _SLICE_RUNS]
