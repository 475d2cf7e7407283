"""The two questions that are asked of what is pending, answered by numpy and pyarrow."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from delaylevel.structures.rows import DUE, ENTRY, LEDGER, Int64s, Rows

from .file import SCHEMA, Columns, Floats, Run, arrow_of

ATTRIBUTE = 3
_TABLE = 1 << 16
_FEW = 64


class Range(NamedTuple):
    """What is asked for.

    Attributes:
        start, stop: due times, [start, stop), exact, ms.
        least, most: the attribute, both included.
    """

    start: int
    stop: int
    least: float
    most: float

    def touches(self, run: Run) -> bool:
        """Say whether a row of the run may be in the range."""
        return (
            run.min_due < self.stop
            and run.max_due >= self.start
            and run.min_attribute <= self.most
            and run.max_attribute >= self.least
        )

    def covers(self, run: Run) -> bool:
        """Say whether all due times of the run are in the range."""
        return self.start <= run.min_due and run.max_due < self.stop

    def cut(self, part: Columns, mask: int) -> Columns:
        """Return what is due in the range.

        Args:
            part: sorted by truncated due time.
            mask: what due times were truncated with.
        """
        first, last = self.bounds(part.rows[DUE], mask)
        rows, attribute = part.rows[:, first:last], part.attribute[first:last]
        if mask != -1 and first < last:
            inside = (rows[DUE] >= self.start) & (rows[DUE] < self.stop)
            rows, attribute = rows[:, inside], attribute[inside]
        return Columns(rows, attribute)

    def bounds(self, due: Int64s, mask: int) -> tuple[int, int]:
        """Return where, in a sorted part, lies all that is due in the range; as ``cut``."""
        ticks = due if mask == -1 else due & mask
        first = int(ticks.searchsorted(self.start & mask))
        return first, max(first, int(ticks.searchsorted((self.stop - 1) & mask, side="right")))

    def chosen(self, found: Columns, discarded: Discarded) -> Int64s | None:
        """Return where the attribute is in the range and nothing was discarded; None for all.

        Args:
            found: of which the due times do not count, and the positions where some are discarded.
            discarded: positions to leave out.
        """
        rows, attribute = found
        index: Int64s | None = None
        if self.least != -np.inf or self.most != np.inf:
            keep = attribute >= self.least
            keep &= attribute <= self.most
            index = keep.nonzero()[0]
        if discarded:
            dead = discarded.among(rows[LEDGER], rows[ENTRY], index)
            if dead.size:
                index = np.delete(np.arange(attribute.size) if index is None else index, dead)
        return index


class Gathered:
    """What is due in a range, one part behind the other in one array."""

    def __init__(self, memory: Int64s) -> None:
        """Create an empty one.

        Args:
            memory: four words for each row that may come.
        """
        self._matrix: npt.NDArray[np.int64] = memory.reshape(ATTRIBUTE + 1, -1)
        self._rows = 0

    def room(self, rows: int) -> npt.NDArray[np.int64]:
        """Return where to put so many rows: due time, ledger, entry, attribute; shape (4, rows)."""
        start = self._rows
        self._rows += rows
        return self._matrix[:, start : self._rows]

    def add(self, part: Columns) -> None:
        """Add a part."""
        target = self.room(part.attribute.size)
        target[:ATTRIBUTE], target[ATTRIBUTE] = part.rows, part.attribute.view(np.int64)

    def columns(self) -> Columns:
        """Return what was gathered."""
        matrix = self._matrix[:, : self._rows]
        return Columns(matrix[:ATTRIBUTE], matrix[ATTRIBUTE].view(np.float64))


class Discarded:
    """Positions to leave out."""

    def __init__(self) -> None:
        """Create an empty set."""
        self._positions: set[tuple[int, int]] = set()
        self._table = np.zeros(_TABLE, dtype=np.bool_)  # by the low bits of an entry
        self._hashes: Int64s | None = None  # sorted; None where they are to be made anew

    def __bool__(self) -> bool:
        """Say whether there is any."""
        return bool(self._positions)

    def add(self, ledger_id: int, entry_id: int) -> None:
        """Leave out a position from now on."""
        self._positions.add((ledger_id, entry_id))
        self._table[entry_id & (_TABLE - 1)] = True
        self._hashes = None

    def forget(self, positions: Rows) -> None:
        """Forget ledgers and entries, shape (2, n)."""
        self._positions.difference_update(zip(*positions.tolist(), strict=True))
        self._hashes = None
        if not self._positions:
            self._table[:] = False

    def among(self, ledger: Int64s, entry: Int64s, index: Int64s | None = None) -> Int64s:
        """Return which rows are to be left out.

        Args:
            ledger, entry: their positions, shape (n,).
            index: look at these of them only, shape (m,).

        Returns:
            Where they are among the n, or among the m.
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
    return ledger * 0x9E3779B97F4A7C1 ^ entry  # wraps round


def _order(due: Int64s) -> Int64s:
    """Return the indices by due time; those of one time stay in their order.

    Radix sort, which numpy has for 8 and 16 bits: many times faster than a sort of whole numbers.
    """
    offset = due - due.min()
    bits = int(offset.max()).bit_length()
    order: Int64s = offset.astype(np.uint16).argsort(kind="stable")
    for shift in range(16, bits, 16):
        offset >>= 16
        high = offset.astype(np.uint8 if bits - shift <= 8 else np.uint16)
        order = order.take(high.take(order).argsort(kind="stable"))
    return order


def _settle_ties(rows: Rows, attribute: Floats) -> None:
    """Put rows, in due order already, that are due at one time in the order of their positions."""
    due, ledger, entry = rows
    same = due[1:] == due[:-1]
    tied = np.flatnonzero(same)
    low, high = ledger[tied], ledger[tied + 1]
    if not bool(((high < low) | ((high == low) & (entry[tied + 1] < entry[tied]))).any()):
        return
    both = np.flatnonzero(np.append(same, False) | np.append(False, same))
    order = both[np.lexsort((entry[both], ledger[both], due[both]))]
    rows[:, both], attribute[both] = rows[:, order], attribute[order]


def rows_of(found: Columns, wanted: Range, discarded: Discarded) -> pa.Table:
    """Return what is wanted as a table in due order, equal due times in the order of positions.

    Args:
        found: rows due in the range, in any order.
        wanted: the range of the attribute.
        discarded: positions to leave out.
    """
    index = wanted.chosen(found, discarded)
    if not (found.attribute.size if index is None else index.size):
        return pa.Table.from_batches([], schema=pa.schema(list(SCHEMA)[:4]))
    if index is None:
        order = _order(found.rows[DUE])
    else:
        order = index.take(_order(found.rows[DUE].take(index)))
    # Arrow's allocator keeps its pages for a while: to touch new ones costs more than to copy.
    buffer = pa.allocate_buffer(8 * (ATTRIBUTE + 1) * order.size)
    matrix = np.frombuffer(buffer, dtype=np.int64).reshape(ATTRIBUTE + 1, -1)
    for row, source in zip(matrix, (*found.rows, found.attribute.view(np.int64)), strict=True):
        source.take(order, out=row, mode="clip")  # the other modes need a buffer
    rows, attribute = matrix[:ATTRIBUTE], matrix[ATTRIBUTE].view(np.float64)
    _settle_ties(rows, attribute)
    return pa.table([*map(arrow_of, rows), arrow_of(attribute)], names=SCHEMA.names[:4])


def average_of(found: Columns, wanted: Range, discarded: Discarded) -> float | None:
    """Return the mean attribute of what is wanted, None where there is no row; as ``rows_of``."""
    index = wanted.chosen(found, discarded)
    attribute = found.attribute if index is None else found.attribute.take(index)
    return float(attribute.mean()) if attribute.size else None
