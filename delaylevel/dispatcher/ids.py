"""Ids by key for whole batches, and membership of many positions in one bitmap."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from delaylevel.structures.deduplicator import Deduplicator

Int64s: TypeAlias = "npt.NDArray[np.int64]"
Mask: TypeAlias = "npt.NDArray[np.bool_]"

#: Up to so many ids of one key are looked up one by one, which is faster than as an array.
_FEW = 2
#: A bitmap's page; a page that is shared by so many positions is worth an intersection.
_PAGE_BITS = 16
_CROWDED = 8


def distinct(keys: Sequence[str]) -> tuple[list[str], Int64s]:
    """Return the distinct keys in the order in which they come, and for each key its index."""
    lookup: dict[str, int] = {}
    if keys and keys.count(keys[0]) == len(keys):
        return [keys[0]], np.zeros(len(keys), dtype=np.int64)
    index = [lookup.setdefault(key, len(lookup)) for key in keys]
    return list(lookup), np.array(index, dtype=np.int64)


def _groups(
    keys: Sequence[str], key_index: npt.NDArray[np.integer]
) -> Iterator[tuple[str, Int64s]]:
    """Yield each key that is not empty and where it is, ascending."""
    if len(keys) == 1:
        if keys[0]:
            yield keys[0], np.arange(key_index.size)
        return
    order = np.argsort(key_index, kind="stable")
    bounds = key_index[order].searchsorted(np.arange(len(keys) + 1)).tolist()
    for key, start, stop in zip(keys, bounds, bounds[1:], strict=False):
        if key and start < stop:
            yield key, order[start:stop]


def save_ids(
    memory: Deduplicator,
    keys: Sequence[str],
    key_index: npt.NDArray[np.integer],
    ids: Int64s,
) -> None:
    """Remember ids in their order; those of the key ``""`` are left out.

    Args:
        memory: where to.
        keys: distinct ones.
        key_index: for each id the index of its key, shape (n,).
        ids: shape (n,).
    """
    for key, where in _groups(keys, key_index):
        if where.size <= _FEW:
            for value in ids[where].tolist():
                memory.save(value, key)
        else:
            memory.save_all(ids[where], key)


def unseen_ids(
    memories: Sequence[Deduplicator],
    keys: Sequence[str],
    key_index: npt.NDArray[np.integer],
    ids: Int64s,
) -> Mask:
    """Return which ids no memory knows and no row before has; those of the key ``""`` all are.

    Args:
        memories: nothing is saved in them.
        keys, key_index, ids: as for ``save_ids``.

    Raises:
        InvalidInputError: an id is negative.
    """
    unseen = np.ones(ids.size, dtype=np.bool_)
    for key, where in _groups(keys, key_index):
        some = ids[where]
        if where.size <= _FEW:
            met: set[int] = set()
            for row, value in zip(where.tolist(), some.tolist(), strict=True):
                if value in met or any(each.is_duplicate(value, key) for each in memories):
                    unseen[row] = False
                met.add(value)
            continue
        fresh = np.ones(some.size, dtype=np.bool_)
        if not bool((some[1:] > some[:-1]).all()):
            fresh[:] = False
            fresh[np.unique(some, return_index=True)[1]] = True
        for each in memories:
            fresh &= ~each.are_duplicates(some, key)
        unseen[where] = fresh
    return unseen


def contained(bitmap: BitMap64, positions: Int64s) -> Mask:
    """Return which positions are in a bitmap.

    Args:
        bitmap: any.
        positions: ascending, distinct, shape (n,).
    """
    size = positions.size
    if not size or not bitmap:
        return np.zeros(size, dtype=np.bool_)
    pages = (int(positions[-1]) >> _PAGE_BITS) - (int(positions[0]) >> _PAGE_BITS) + 1
    if pages * _CROWDED > size:
        return np.fromiter(map(bitmap.__contains__, positions.tolist()), np.bool_, size)
    found = np.frombuffer((to_bitmap(positions) & bitmap).to_array(), dtype=np.uint64)
    if not found.size:
        return np.zeros(size, dtype=np.bool_)
    mask = np.zeros(size, dtype=np.bool_)
    mask[positions.searchsorted(found.astype(np.int64))] = True
    return mask


def to_array(positions: Int64s) -> array[int]:
    """Return positions as a bitmap's ``update`` takes them."""
    return array("Q", positions.tobytes())


def to_bitmap(positions: Int64s) -> BitMap64:
    """Return a bitmap of positions."""
    return BitMap64(to_array(positions))
