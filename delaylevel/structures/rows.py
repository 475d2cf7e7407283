"""Rows of (due, ledger, entry) as three columns: their layout, order and search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

#: Columns for due time, ledger id and entry id: shape (3, n).
Rows: TypeAlias = "npt.NDArray[np.int64]"
Int64s: TypeAlias = "npt.NDArray[np.int64]"
#: (due, ledger, entry): the order in which rows are handed out.
Key: TypeAlias = "tuple[int, int, int]"

DUE, LEDGER, ENTRY = 0, 1, 2
BY_DUE = (DUE, LEDGER, ENTRY)
BY_POSITION = (LEDGER, ENTRY, DUE)


def empty_rows() -> Rows:
    """Return an array of no rows."""
    return np.empty((3, 0), dtype=np.int64)


def _in_order(a: Int64s, b: Int64s, c: Int64s) -> bool:
    if bool((a[1:] < a[:-1]).any()):
        return False
    tie = a[1:] == a[:-1]
    if not tie.any():
        return True
    if bool(((b[1:] < b[:-1]) & tie).any()):
        return False
    tie &= b[1:] == b[:-1]
    return not bool(((c[1:] < c[:-1]) & tie).any())


def sort_rows(rows: Rows, order: tuple[int, int, int] = BY_DUE) -> Rows:
    """Sort rows lexicographically, by one packed 64-bit key if the three columns fit into it.

    Args:
        rows: shape (3, n), any order.
        order: the columns, most significant first.

    Returns:
        The sorted rows; the same array if it was sorted already.
    """
    first, second, third = order
    if rows.shape[1] < 2 or _in_order(rows[first], rows[second], rows[third]):
        return rows
    low = [int(x) for x in rows.min(axis=1)]
    bits = [(int(x) - y).bit_length() for x, y in zip(rows.max(axis=1), low, strict=True)]
    if sum(bits) > 63:
        return np.take(rows, np.lexsort((rows[third], rows[second], rows[first])), axis=1)
    key = rows[first] - low[first]
    for column in (second, third):
        if bits[column]:
            key <<= bits[column]
            key |= rows[column] - low[column]
    key.sort()
    out = np.empty_like(rows)
    for column in (third, second):
        np.bitwise_and(key, (1 << bits[column]) - 1, out=out[column])
        out[column] += low[column]
        key >>= bits[column]
    np.add(key, low[first], out=out[first])
    return out


def argsort_columns(first: Int64s, second: Int64s, third: Int64s) -> Int64s | None:
    """Return the indices that sort three columns lexicographically, None if they are sorted.

    Sorts by one packed 64-bit key with the index in its low bits if all of it fits into 64 bits.
    """
    if _in_order(first, second, third):
        return None
    columns = (first, second, third)
    low = [int(column.min()) for column in columns]
    bits = [(int(x.max()) - y).bit_length() for x, y in zip(columns, low, strict=True)]
    index_bits = int(first.size - 1).bit_length()
    if sum(bits) + index_bits > 63:
        return np.lexsort((third, second, first))
    key = first - low[0]
    for column, least, width in zip(columns[1:], low[1:], bits[1:], strict=True):
        if width:
            key <<= width
            key |= column - least
    key <<= index_bits
    key |= np.arange(first.size)
    key.sort()
    key &= (1 << index_bits) - 1
    return key


def find_key(rows: Rows | Sequence[Int64s], key: Key, start: int = 0) -> int:
    """Return the index of the first row at or after ``start`` that is not below ``key``.

    Args:
        rows: three columns of length n, in the order of ``BY_DUE``.
        key: (due, ledger, entry).
        start: index of the first row to compare.
    """
    stop = rows[DUE].size
    if start < stop and rows[DUE].item(start) > key[0]:
        return start
    for column, value in zip(rows, key, strict=True):
        part = column[start:stop]
        stop = start + int(part.searchsorted(value, side="right"))
        start += int(part.searchsorted(value, side="left"))
        if start == stop:
            break
    return start
