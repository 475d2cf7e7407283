"""The payloads of pending rows at one moment, for another thread."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from delaylevel.structures.rows import DUE, Int64s, Rows

from .file import Run, SegmentFile
from .frozen import FrozenSegments
from .pending import PendingSegments
from .queries import Discarded

#: Number of payloads that are returned at once, at most.
_PART_ROWS = 256
#: A run is read as a whole if at least one row in this number is wanted.
_FEW_IN = 8
_LIMIT = 1 << 62


class FrozenPayloads(FrozenSegments):
    """The payloads of the rows that are due at some times; otherwise as `FrozenSegments`.

    Args:
        dues: due times, ms since the epoch, ascending, shape (k,); None for all rows.
        segments: the segments.
    """

    def __init__(self, dues: Int64s | None, segments: PendingSegments) -> None:
        files = segments._spilled.files_between(-_LIMIT, _LIMIT)
        super().__init__(-_LIMIT, _LIMIT, (), segments._cursors, files, Discarded())
        self._dues = dues
        # The lists of payloads change later: those that are wanted are copied now.
        self._held: list[tuple[Rows, list[bytes]]] = []
        for part in segments._memory.runs:
            index = self._wanted(part.rows[DUE])
            if index.size == part.count:
                self._held.append((part.rows, part.payloads.copy()))
            elif index.size:
                some = list(map(part.payloads.__getitem__, index.tolist()))
                self._held.append((part.rows[:, index], some))
        opened = segments._slice.columns()
        remaining = opened.remaining()
        index = remaining.take(self._wanted(opened.rows[DUE].take(remaining)))
        if index.size:
            self._held.append((opened.rows[:, index], segments._slice.payloads_at(index)))

    def payloads(self) -> Iterator[tuple[Rows, list[bytes]]]:
        """Yield rows, shape (3, n), with their n payloads, in any order; errors as for `table`."""
        for rows, payloads in self._held:
            for start in range(0, len(payloads), _PART_ROWS):
                stop = start + _PART_ROWS
                yield rows[:, start:stop], payloads[start:stop]
        for open_run in self._open:
            yield from self._read_run(open_run.file, open_run.run, open_run.taken)
        for closed in self._files:
            runs = [run for run in closed.runs[: closed.known] if self._may_have(run)]
            if runs:
                with SegmentFile.reading(closed.path) as file:
                    for run in runs:
                        yield from self._read_run(file, run, 0)

    def _may_have(self, run: Run) -> bool:
        if self._dues is None:
            return True
        first, last = self._dues.searchsorted([run.min_due, run.max_due + 1])
        return bool(first < last)

    def _read_run(
        self, file: SegmentFile, run: Run, taken: int
    ) -> Iterator[tuple[Rows, list[bytes]]]:
        if not self._may_have(run):
            return
        with self.working():
            rows = file.read_slice(run, taken, run.rows).rows
            index = self._wanted(rows[DUE])
        for start in range(0, index.size, _PART_ROWS):
            some = index[start : start + _PART_ROWS]
            first, last = int(some[0]), int(some[-1]) + 1
            with self.working():
                if some.size * _FEW_IN >= last - first:
                    all_ = file.read_payloads(run, taken + first, taken + last)
                    found = [all_[each - first] for each in some.tolist()]
                else:
                    at = (some + taken).tolist()
                    found = [file.read_payloads(run, each, each + 1)[0] for each in at]
            yield rows[:, some], found

    def _wanted(self, due: Int64s) -> Int64s:
        """Return the indices of the wanted rows; their due times ascend."""
        if self._dues is None or not due.size:
            return np.arange(due.size)
        low, high = self._dues.searchsorted([due[0], due[-1] + 1])
        dues = self._dues[low:high]
        first = due.searchsorted(dues)
        count = due.searchsorted(dues, side="right") - first
        index: Int64s = np.arange(count.sum()) + np.repeat(first - count.cumsum() + count, count)
        return index
