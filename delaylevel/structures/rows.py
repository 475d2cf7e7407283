"""Rows of (due, ledger, entry) as three columns: their layout, order and search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from delaylevel.errors import InvalidInputError

#: Columns for due time, ledger id and entry id: shape (3, n).
Rows: TypeAlias = "npt.NDArray[np.int64]"
Int64s: TypeAlias = "npt.NDArray[np.int64]"
#: (due, ledger, entry): the order in which rows are handed out.
Key: TypeAlias = "tuple[int, int, int]"

DUE, LEDGER, ENTRY = 0, 1, 2
BY_DUE = (DUE, LEDGER, ENTRY)
BY_POSITION = (LEDGER, ENTRY, DUE)


def checked_integers(values: npt.ArrayLike, name: str, least: int, bits: int) -> npt.NDArray[Any]:
    """Return integers in [least, 2**bits) as an array, shape (n,); refuse everything else."""
    array: npt.NDArray[Any] = np.asarray(values)
    if not array.size:
        return np.empty(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidInputError(
            f"{name} must be a one-dimensional array of integers in [{least}, 2**{bits}), "
            f"not {array.dtype} of shape {array.shape}"
        )
    if int(array.min()) < least or int(array.max()) >= 1 << bits:
        raise InvalidInputError(f"{name} must be integers in [{least}, 2**{bits})")
    return array


def empty_rows() -> Rows:
    """Return an array of no rows."""
    return np.empty((3, 0), dtype=np.int64)


def small_index(index: Int64s) -> npt.NDArray[np.integer]:
    """Return indices in an array that is as small as they allow."""
    return index.astype(np.uint16 if not index.size or int(index.max()) < 1 << 16 else np.uint32)


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


def _pack(columns: Sequence[Int64s], spare: int) -> tuple[Int64s, list[int], list[int]] | None:
    """Return a 64-bit key for each row, and each column's minimum and width; None if too wide."""
    low = [int(column.min()) for column in columns]
    bits = [(int(x.max()) - y).bit_length() for x, y in zip(columns, low, strict=True)]
    if sum(bits) + spare > 63:
        return None
    key = columns[0] - low[0]
    for column, least, width in zip(columns[1:], low[1:], bits[1:], strict=True):
        if width:
            key <<= width
            key |= column - least
    return key, low, bits


def sort_rows(rows: Rows, order: tuple[int, int, int] = BY_DUE) -> Rows:
    """Return rows sorted by columns, most significant first; the same array if they are sorted."""
    first, second, third = order
    columns = rows[first], rows[second], rows[third]
    if rows.shape[1] < 2 or _in_order(*columns):
        return rows
    packed = _pack(columns, 0)
    if packed is None:
        return np.take(rows, np.lexsort(columns[::-1]), axis=1)
    key, low, bits = packed
    key.sort()
    out = np.empty_like(rows)
    for index in (2, 1):
        column = out[order[index]]
        np.bitwise_and(key, (1 << bits[index]) - 1, out=column)
        column += low[index]
        key >>= bits[index]
    np.add(key, low[0], out=out[first])
    return out


def argsort_columns(first: Int64s, second: Int64s, third: Int64s) -> Int64s | None:
    """Return the indices that sort three columns lexicographically, None if they are sorted."""
    if _in_order(first, second, third):
        return None
    index_bits = int(first.size - 1).bit_length()
    packed = _pack((first, second, third), index_bits)
    if packed is None:
        return np.lexsort((third, second, first))
    key = packed[0]
    key <<= index_bits
    key |= np.arange(first.size)
    key.sort()
    key &= (1 << index_bits) - 1
    return key


def key_at(rows: Rows, index: int) -> Key:
    """Return the key of a row."""
    due, ledger, entry = rows[:, index].tolist()
    return due, ledger, entry


def find_key(rows: Rows | Sequence[Int64s], key: Key, start: int = 0) -> int:
    """Return the index of the first sorted row at or after ``start`` that is not below ``key``."""
    stop = rows[DUE].size
    if start < stop:
        due_ms = rows[DUE]
        if due_ms.item(start) > key[0]:
            return start
        if due_ms.item(stop - 1) < key[0]:
            return stop
    for column, value in zip(rows, key, strict=True):
        part = column[start:stop]
        stop = start + int(part.searchsorted(value, side="right"))
        start += int(part.searchsorted(value, side="left"))
        if start == stop:
            break
    return start


def without_row(rows: Rows, key: Key) -> Rows | None:
    """Return sorted rows without one that has this key; None if there is none."""
    index = find_key(rows, key)
    if index == rows.shape[1] or key_at(rows, index) != key:
        return None
    return np.delete(rows, index, axis=1)
