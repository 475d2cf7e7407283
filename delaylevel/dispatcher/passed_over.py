"""Pending records that are never published, and that live queries leave out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from delaylevel.dispatcher.journal.records import pack
from delaylevel.structures.rows import Int64s

from .ids import to_array

#: Number of changes, at least, after which they are merged into the arrays.
_LEAST_CHANGES = 1024
#: Number of due times from which a search reads all records instead.
_MOST_DUES = 1 << 20


class HiddenRows:
    """Positions of rows to leave out, with their due times; it never changes.

    Attributes:
        positions: packed positions, ascending, shape (n,).
        due_ms: due times, ms since the epoch, shape (n,).
    """

    def __init__(self, positions: Int64s, due_ms: Int64s) -> None:
        self.positions = positions
        self.due_ms = due_ms

    def __bool__(self) -> bool:
        """Return whether there is any row."""
        return bool(self.positions.size)

    def have(self, positions: Int64s) -> npt.NDArray[np.bool_]:
        """Return which packed positions are those of rows here, shape (k,)."""
        if not self.positions.size:
            return np.zeros(positions.size, dtype=np.bool_)
        index = self.positions.searchsorted(positions)
        found: npt.NDArray[np.bool_] = self.positions.take(index, mode="clip") == positions
        return found

    def find(self, ledger: Int64s, entry: Int64s, index: Int64s | None = None) -> Int64s:
        """Return the indices of these rows; arguments and result as for `Discarded.find`."""
        if index is not None:
            ledger, entry = ledger.take(index), entry.take(index)
        found: Int64s = np.flatnonzero(self.have(pack(ledger, entry)))
        return found

    def between(self, from_ms: int, before_ms: int) -> HiddenRows:
        """Return the rows that are due in [from, before), in ms since the epoch."""
        inside = (self.due_ms >= from_ms) & (self.due_ms < before_ms)
        return HiddenRows(self.positions[inside], self.due_ms[inside])


class PassedOver:
    """The rows of cancelled messages and of waiting cancellations, as far as they are known.

    A message is cancelled by its ID, so its row is unknown until a live query searches for it,
    first at the due time of the cancellation.

    Attributes:
        cancelled: number of cancelled messages so far.
        dues: due times at which no search has looked yet, ms since the epoch; None to look at all.
    """

    def __init__(self) -> None:
        self.cancelled = 0
        self.dues: BitMap64 | None = BitMap64()
        self._rows = HiddenRows(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
        self._added: dict[int, int] = {}
        self._gone: set[int] = set()

    def __len__(self) -> int:
        """Return the number of known rows."""
        return self._rows.positions.size + len(self._added) - len(self._gone)

    def cancel(self, due_ms: Int64s) -> None:
        """Take note of cancelled messages, by the due times of the cancellations, shape (n,)."""
        self.cancelled += due_ms.size
        if self.dues is None:
            return
        self.dues.update(to_array(due_ms[due_ms >= 0]))
        if len(self.dues) > _MOST_DUES:
            self.dues = None

    def add(self, positions: Int64s, due_ms: Int64s) -> None:
        """Add rows: packed positions and due times, shape (n,); some may be known."""
        known = self._rows.have(positions).tolist()
        for position, due, old in zip(positions.tolist(), due_ms.tolist(), known, strict=True):
            if not old:
                self._added[position] = due
            elif position in self._gone:  # as a cancellation that waits once more
                self._merge()
                self._added[position] = due
        self._merge_if_many()

    def discard(self, positions: Int64s) -> None:
        """Remove rows that were taken out; some may be unknown."""
        known = self._rows.have(positions).tolist()
        for position, old in zip(positions.tolist(), known, strict=True):
            if old:
                self._gone.add(position)
            else:
                self._added.pop(position, None)
        self._merge_if_many()

    def clear(self) -> None:
        """Forget all rows: no such row is left."""
        self.dues = BitMap64()
        self._rows = HiddenRows(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
        self._added, self._gone = {}, set()

    def begin_search(self, *, everywhere: bool = False) -> BitMap64 | None:
        """Return the due times at which a search has to look; None to look at all."""
        if self.dues is None or everywhere:
            self.dues = BitMap64()
            return None
        return self.dues.copy()

    def end_search(self, dues: BitMap64 | None) -> None:
        """Take note that a search has looked at these due times."""
        if dues is not None and self.dues is not None:
            self.dues -= dues

    def freeze(self) -> HiddenRows:
        """Return the known rows."""
        self._merge()
        return self._rows

    def _merge_if_many(self) -> None:
        changes = len(self._added) + len(self._gone)
        if changes > max(_LEAST_CHANGES, self._rows.positions.size // 8):
            self._merge()

    def _merge(self) -> None:
        if not (self._added or self._gone):
            return
        positions, due_ms = self._rows.positions, self._rows.due_ms
        if self._gone:
            gone = np.sort(np.fromiter(self._gone, np.int64, len(self._gone)))
            index = positions.searchsorted(gone)
            positions, due_ms = np.delete(positions, index), np.delete(due_ms, index)
            self._gone = set()
        if self._added:
            count = len(self._added)
            added = np.fromiter(self._added, np.int64, count)
            dues = np.fromiter(self._added.values(), np.int64, count)
            order = added.argsort()
            index = positions.searchsorted(added[order])
            positions = np.insert(positions, index, added[order])
            due_ms = np.insert(due_ms, index, dues[order])
            self._added = {}
        self._rows = HiddenRows(positions, due_ms)
