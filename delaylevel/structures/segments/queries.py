"""Queries over pending rows: rows in a range, and their average attribute."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from delaylevel.structures.rows import DUE, ENTRY, LEDGER, Int64s, Rows

from .file import SCHEMA, Columns, Floats, Run, to_arrow

ATTRIBUTE = 3
#: Size of the lookup table of discarded positions, a power of two.
_TABLE = 1 << 16
#: Number of candidates up to which hashing costs more than it saves.
_FEW = 64


class Excluded(Protocol):
    """Positions of rows to leave out."""

    def __bool__(self) -> bool:
        """Return whether there is any position."""

    def find(self, ledger: Int64s, entry: Int64s, index: Int64s | None = None) -> Int64s:
        """Return the indices of rows to leave out; as `Discarded.find`."""


class Range(NamedTuple):
    """Range of a query.

    Attributes:
        start, stop: exact due times, ms since the epoch, [start, stop).
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

    def cut(self, part: Columns, mask: int) -> Columns:
        """Return the rows that are due in the range.

        Args:
            part: rows sorted by truncated due time.
            mask: bit mask that truncates due times.
        """
        first, last = self.bounds(part.rows[DUE], mask)
        rows, attribute = part.rows[:, first:last], part.attribute[first:last]
        if mask != -1 and first < last:
            inside = (rows[DUE] >= self.start) & (rows[DUE] < self.stop)
            rows, attribute = rows[:, inside], attribute[inside]
        return Columns(rows, attribute)

    def bounds(self, due: Int64s, mask: int) -> tuple[int, int]:
        """Return the indices [first, last) that enclose all rows due in the range.

        Args:
            due: exact due times, sorted by truncated value, shape (n,).
            mask: bit mask that truncates due times.
        """
        truncated = due if mask == -1 else due & mask
        first = int(truncated.searchsorted(self.start & mask))
        last = int(truncated.searchsorted((self.stop - 1) & mask, side="right"))
        return first, max(first, last)

    def select(self, found: Columns, discarded: Excluded) -> Int64s | None:
        """Return the indices of rows to keep, by attribute and discarded positions; None for all.

        Args:
            found: rows; due times are not read, positions only if ``discarded`` is not empty.
            discarded: positions to leave out.
        """
        rows, attribute = found
        index: Int64s | None = None
        if self.attribute_min != -np.inf or self.attribute_max != np.inf:
            keep = attribute >= self.attribute_min
            keep &= attribute <= self.attribute_max
            index = keep.nonzero()[0]
        if discarded:
            dead = discarded.find(rows[LEDGER], rows[ENTRY], index)
            if dead.size:
                index = np.delete(np.arange(attribute.size) if index is None else index, dead)
        return index


class ColumnBuffer:
    """Rows without payloads, appended in one array, which has four words per row."""

    def __init__(self, memory: Int64s) -> None:
        self._matrix: npt.NDArray[np.int64] = memory.reshape(ATTRIBUTE + 1, -1)
        self._rows = 0

    def reserve(self, rows: int) -> npt.NDArray[np.int64]:
        """Append rows; return a view to fill (due time, ledger, entry, attribute; (4, rows))."""
        start = self._rows
        self._rows += rows
        return self._matrix[:, start : self._rows]

    def add(self, part: Columns) -> None:
        """Append a copy of rows."""
        target = self.reserve(part.attribute.size)
        target[:ATTRIBUTE], target[ATTRIBUTE] = part.rows, part.attribute.view(np.int64)

    def columns(self) -> Columns:
        """Return a view of all rows."""
        matrix = self._matrix[:, : self._rows]
        return Columns(matrix[:ATTRIBUTE], matrix[ATTRIBUTE].view(np.float64))


class Discarded:
    """Set of discarded positions, with fast lookup for arrays of positions.

    A table of low entry bits and a sorted array of hashes rule out most rows; the set decides.
    """

    def __init__(self) -> None:
        self._positions: set[tuple[int, int]] = set()
        self._table = np.zeros(_TABLE, dtype=np.bool_)  # index: low bits of the entry ID
        self._hashes: Int64s | None = None  # sorted; None if out of date

    def __bool__(self) -> bool:
        """Return whether the set has any position."""
        return bool(self._positions)

    def add(self, ledger_id: int, entry_id: int) -> None:
        """Add a position."""
        self._positions.add((ledger_id, entry_id))
        self._table[entry_id & (_TABLE - 1)] = True
        self._hashes = None

    def copy(self) -> Discarded:
        """Return a copy, for another thread."""
        other = Discarded()
        if self._positions:
            other._positions, other._table = self._positions.copy(), self._table.copy()
        return other

    def forget(self, positions: Rows) -> None:
        """Remove positions: ledgers and entries, shape (2, n)."""
        self._positions.difference_update(zip(*positions.tolist(), strict=True))
        self._hashes = None
        if not self._positions:
            self._table[:] = False

    def find(self, ledger: Int64s, entry: Int64s, index: Int64s | None = None) -> Int64s:
        """Return the indices of discarded rows.

        Args:
            ledger, entry: positions of the rows, shape (n,).
            index: indices of the rows to check, shape (m,); None for all.

        Returns:
            Indices into ``index`` if given, otherwise into the rows.
        """
        low = (entry if index is None else entry.take(index)) & (_TABLE - 1)
        maybe: Int64s = self._table.take(low).nonzero()[0]
        where = maybe if index is None else index.take(maybe)
        ledger, entry = ledger.take(where), entry.take(where)
        if maybe.size > _FEW:
            found = _hash(ledger, entry)
            hashes = self._sorted_hashes()
            likely = hashes.take(hashes.searchsorted(found), mode="clip") == found
            maybe, ledger, entry = maybe[likely], ledger[likely], entry[likely]
        positions = zip(ledger.tolist(), entry.tolist(), strict=True)
        dead = [x for x, at in zip(maybe.tolist(), positions, strict=True) if at in self._positions]
        return np.array(dead, dtype=np.int64)

    def _sorted_hashes(self) -> Int64s:
        if self._hashes is None:
            ledger, entry = np.array(list(self._positions), dtype=np.int64).reshape(-1, 2).T
            self._hashes = np.sort(_hash(ledger, entry))
        return self._hashes


def _hash(ledger: Int64s, entry: Int64s) -> Int64s:
    return ledger * 0x9E3779B97F4A7C1 ^ entry  # Fibonacci hashing; the product overflows


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


def sorted_table(found: Columns, wanted: Range, discarded: Excluded) -> pa.Table:
    """Return the selected rows as a table in due order, equal due times by position.

    Args:
        found: rows due in the range, in any order.
        wanted: the range, of which the attribute bounds apply.
        discarded: positions to leave out.
    """
    index = wanted.select(found, discarded)
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


def mean_attribute(found: Columns, wanted: Range, discarded: Discarded) -> float | None:
    """Return the mean attribute of the selected rows, None without rows; as ``sorted_table``."""
    index = wanted.select(found, discarded)
    attribute = found.attribute if index is None else found.attribute.take(index)
    return float(attribute.mean()) if attribute.size else None
