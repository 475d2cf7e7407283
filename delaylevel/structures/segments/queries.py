"""Queries over pending rows in a range of due times and attributes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from delaylevel.structures.rows import DUE, Int64s, Rows

from .file import SCHEMA, Columns, Floats, Run, to_arrow

ATTRIBUTE = 3


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
        found: rows due in the range, in any order.
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
