"""The rows that are due next: in memory, each found by its position."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from delaylevel.structures.rows import (
    ENTRY,
    LEDGER,
    Int64s,
    Rows,
    argsort_columns,
    empty_rows,
)

from .cursors import ROW_BYTES, PayloadRows
from .file import Columns, Floats

#: Memory of a row in addition to its payload: that of `ROW_BYTES`, and its entry in the index.
OPEN_ROW_BYTES = ROW_BYTES + 128
_MIN_CAPACITY = 256


class OpenColumns(NamedTuple):
    """Columns of open rows at one moment; none of the arrays changes later.

    Attributes:
        taken: which rows were taken, shape (n,).
    """

    rows: Rows
    attribute: Floats
    taken: npt.NDArray[np.bool_]

    def remaining(self) -> Int64s:
        """Return the indices of the rows that were not taken, by due time and position."""
        index: Int64s = (~self.taken).nonzero()[0]
        due, ledger, entry = self.rows.take(index, axis=1)
        order = argsort_columns(due, ledger, entry)
        return index if order is None else index.take(order)

    def ordered(self) -> Columns:
        """Return the rows that were not taken, by due time and position."""
        index = self.remaining()
        return Columns(self.rows.take(index, axis=1), self.attribute.take(index))


class OpenRows:
    """Rows without an order of their own: a tracker decides which of them are due.

    The columns grow in place. Columns that were given away never change, except that rows are
    appended behind them.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop all rows."""
        self._rows: Rows = empty_rows()
        self._attribute: Floats = np.empty(0)
        self._taken: npt.NDArray[np.bool_] = np.empty(0, dtype=np.bool_)
        self._payloads: list[bytes] = []  # those of taken rows are empty
        self._index: dict[int, dict[int, int]] = {}  # ledger -> entry -> index of the row
        self._left = 0
        self.payload_bytes = 0

    @property
    def count(self) -> int:
        """Number of rows that were not taken."""
        return self._left

    @property
    def memory_bytes(self) -> int:
        """Memory in use, in bytes."""
        return self.payload_bytes + OPEN_ROW_BYTES * self._left

    def add(self, part: PayloadRows) -> None:
        """Add rows in any order."""
        start, n = len(self._payloads), part.count
        if start + n > self._attribute.size:
            self._grow(n)
            start = len(self._payloads)
        stop = start + n
        self._rows[:, start:stop] = part.rows
        self._attribute[start:stop] = part.attribute
        self._payloads += part.payloads
        self._left += n
        self.payload_bytes += part.payload_bytes
        self._add_to_index(start, stop)

    def take(self, rows: Rows) -> PayloadRows | None:
        """Remove and return rows, in the order in which they are asked for.

        Returns:
            The rows; None if one of them is not here.
        """
        try:
            found = self._remove_from_index(rows[LEDGER], rows[ENTRY].tolist())
        except KeyError:
            return None
        payloads = list(map(self._payloads.__getitem__, found))
        for each in found:
            self._payloads[each] = b""
        where = np.array(found, dtype=np.int64)
        self._taken[where] = True
        rows, attribute = self._rows.take(where, axis=1), self._attribute.take(where)
        part = PayloadRows(rows, attribute, payloads)
        self._left -= len(found)
        self.payload_bytes -= part.payload_bytes
        if not self._left:
            self.clear()
        return part

    def take_after(self, count: int) -> PayloadRows:
        """Remove and return all rows but the ``count`` first to be due, in due order."""
        index = self.columns().remaining()
        part = self.take(self._rows.take(index[count:], axis=1))
        assert part is not None
        return part

    def columns(self) -> OpenColumns:
        """Return the columns as they are now."""
        n = len(self._payloads)
        return OpenColumns(self._rows[:, :n], self._attribute[:n], self._taken[:n].copy())

    def payloads_at(self, index: Int64s) -> list[bytes]:
        """Return the payloads at indices of the columns."""
        return list(map(self._payloads.__getitem__, index.tolist()))

    def _grow(self, more: int) -> None:
        """Make room for further rows, without the taken ones."""
        n = len(self._payloads)
        keep = (~self._taken[:n]).nonzero()[0]
        capacity = max(_MIN_CAPACITY, 2 * (keep.size + more))
        rows = np.empty((3, capacity), dtype=np.int64)
        rows[:, : keep.size] = self._rows.take(keep, axis=1)
        attribute = np.empty(capacity)
        attribute[: keep.size] = self._attribute.take(keep)
        if keep.size < n:
            self._payloads = self.payloads_at(keep)
        self._rows, self._attribute = rows, attribute
        self._taken = np.zeros(capacity, dtype=np.bool_)
        if keep.size < n:
            self._index = {}
            self._add_to_index(0, keep.size)

    def _add_to_index(self, start: int, stop: int) -> None:
        ledger, entry = self._rows[LEDGER, start:stop], self._rows[ENTRY, start:stop]
        if not ledger.size:
            return
        first = ledger.item(0)
        if bool((ledger == first).all()):  # the usual case: ledgers are long
            numbers = self._index.setdefault(first, {})
            numbers.update(zip(entry.tolist(), range(start, stop), strict=True))
            return
        each = zip(ledger.tolist(), entry.tolist(), range(start, stop), strict=True)
        for one, other, number in each:
            self._index.setdefault(one, {})[other] = number

    def _remove_from_index(self, ledger: Int64s, entries: list[int]) -> list[int]:
        index = self._index
        first = ledger.item(0) if ledger.size else 0
        if bool((ledger == first).all()) and entries:
            return list(map(index[first].pop, entries))
        return [index[one].pop(other) for one, other in zip(ledger.tolist(), entries, strict=True)]
