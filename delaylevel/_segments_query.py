"""The two questions that are asked of what is pending, answered by numpy and pyarrow."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ._segments_file import SCHEMA, Columns, Floats, Run, arrow_of
from ._timebucket_codec import DUE, ENTRY, LEDGER, Int64s, Rows

_ATTRIBUTE = 3
_TABLE = 1 << 16


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
        due = part.rows[DUE]
        ticks = due if mask == -1 else due & mask
        first = int(ticks.searchsorted(self.start & mask))
        last = max(first, int(ticks.searchsorted((self.stop - 1) & mask, side="right")))
        rows, attribute = part.rows[:, first:last], part.attribute[first:last]
        if mask != -1 and first < last:
            inside = (rows[DUE] >= self.start) & (rows[DUE] < self.stop)
            rows, attribute = rows[:, inside], attribute[inside]
        return Columns(rows, attribute)

    def chosen(self, attribute: Floats) -> Int64s | None:
        """Return where attributes are in the range, None where all of them are, unlimited."""
        if self.least == -np.inf and self.most == np.inf:
            return None
        keep = attribute >= self.least
        keep &= attribute <= self.most
        return np.flatnonzero(keep)

    def attributes(self, found: Columns, discarded: Collection[tuple[int, int]] = ()) -> Floats:
        """Return the attributes that are in the range, without those of discarded positions."""
        rows, attribute = found
        index = self.chosen(attribute)
        if index is not None:
            attribute = np.take(attribute, index)
        if discarded:
            ledger, entry = rows[LEDGER], rows[ENTRY]
            if index is not None:
                ledger, entry = np.take(ledger, index), np.take(entry, index)
            attribute = attribute[alive_of(ledger, entry, discarded)]
        return attribute


class Gathered:
    """Columns of many parts, one behind the other in one array."""

    def __init__(self, room: int) -> None:
        """Create an empty one.

        Args:
            room: for so many rows.
        """
        self._matrix = np.empty((4, room), dtype=np.int64)
        self._rows = 0

    def room(self, rows: int) -> npt.NDArray[np.int64]:
        """Return where to put so many rows that are all due in the range, shape (4, rows)."""
        start = self._rows
        self._rows += rows
        return self._matrix[:, start : self._rows]

    def add(self, part: Columns) -> None:
        """Add a part that is due in the range."""
        target = self.room(part.attribute.size)
        target[:_ATTRIBUTE], target[_ATTRIBUTE] = part.rows, part.attribute.view(np.int64)

    def columns(self) -> Columns:
        """Return what was gathered."""
        matrix = self._matrix[:, : self._rows]
        return Columns(matrix[:_ATTRIBUTE], matrix[_ATTRIBUTE].view(np.float64))


def alive_of(
    ledger: Int64s, entry: Int64s, discarded: Collection[tuple[int, int]]
) -> npt.NDArray[np.bool_]:
    """Return which rows are not among the discarded positions."""
    alive = np.ones(entry.size, dtype=np.bool_)
    positions = np.array(list(discarded), dtype=np.int64).reshape(-1, 2)
    # Most rows are let through by the low bits of their entry alone.
    table = np.zeros(_TABLE, dtype=np.bool_)
    table[positions[:, 1] & (_TABLE - 1)] = True
    maybe = np.flatnonzero(table[entry & (_TABLE - 1)])
    hashes = _hash(positions[:, 0], positions[:, 1])
    maybe = maybe[np.isin(_hash(ledger[maybe], entry[maybe]), hashes)]
    for index in maybe.tolist():
        alive[index] = (ledger.item(index), entry.item(index)) not in discarded
    return alive


def _hash(ledger: Int64s, entry: Int64s) -> Int64s:
    return ledger * 0x9E3779B97F4A7C1 ^ entry  # wraps round


def _order(due: Int64s, index: Int64s | None) -> Int64s:
    """Return the chosen indices by due time; those of one time stay in their order.

    Radix sort, which numpy has for 16 bits: many times faster than a sort of whole numbers.
    """
    if index is None:
        index = np.arange(due.size)
    offset = np.take(due, index)
    offset -= offset.min()
    order: Int64s = offset.astype(np.uint16).argsort(kind="stable")
    for shift in range(16, int(offset.max()).bit_length(), 16):
        high = np.take(offset >> shift, order).astype(np.uint16)
        order = np.take(order, high.argsort(kind="stable"))
    return np.take(index, order)


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


def rows_of(found: Columns, wanted: Range, discarded: Collection[tuple[int, int]]) -> pa.Table:
    """Return what is wanted as a table in due order, equal due times in the order of positions.

    Args:
        found: rows due in the range, in any order.
        wanted: the range of the attribute.
        discarded: positions to leave out.
    """
    index = wanted.chosen(found.attribute)
    if not (found.attribute.size if index is None else index.size):
        return pa.Table.from_batches([], schema=pa.schema(list(SCHEMA)[:4]))
    order = _order(found.rows[DUE], index)
    rows, attribute = np.empty((_ATTRIBUTE, order.size), np.int64), found.attribute[order]
    for column, source in zip(rows, found.rows, strict=True):
        np.take(source, order, out=column, mode="clip")  # the other modes need a buffer
    if discarded:
        alive = alive_of(rows[LEDGER], rows[ENTRY], discarded)
        if not alive.all():
            rows, attribute = rows[:, alive], attribute[alive]
    _settle_ties(rows, attribute)
    return pa.table([*map(arrow_of, rows), arrow_of(attribute)], names=SCHEMA.names[:4])


def average_of(attribute: Floats) -> float | None:
    """Return the mean, None where there is no row."""
    mean = pc.mean(arrow_of(attribute)).as_py()
    return None if mean is None else float(mean)
