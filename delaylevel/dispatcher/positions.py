"""IDs by key and packed positions, for whole batches; the open positions of a partition."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from delaylevel.errors import InvalidInputError
from delaylevel.structures.id_set import RemovableIds
from delaylevel.structures.rows import Int64s

Mask: TypeAlias = "npt.NDArray[np.bool_]"
#: Up to this number of IDs per key, a lookup of each is faster than one of an array.
_FEW = 2
#: Size of a bitmap's page, and the positions per page from which an intersection is faster.
_PAGE_BITS = 16
_CROWDED = 8


class IdMemory(Protocol):
    """A set of IDs for each key."""

    def is_duplicate(self, id: int, key: str) -> bool:  # noqa: A002 - a public name
        """Return whether an ID is in the set."""

    def are_duplicates(self, ids: npt.ArrayLike, key: str) -> Mask:
        """Return for each ID whether it is in the set, shape (n,)."""

    def save(self, id: int, key: str) -> None:  # noqa: A002
        """Add an ID."""

    def save_all(self, ids: npt.ArrayLike, key: str) -> None:
        """Add IDs, shape (n,)."""


def id_columns(
    records: Sequence[tuple[Any, ...]], index: Int64s | None
) -> tuple[list[str], npt.NDArray[np.integer], Int64s]:
    """Return the distinct ID keys of records, and each record's key index and ID.

    Args:
        records: tuples that begin with (id_key, id).
        index: indices of the wanted records; None for all.

    Raises:
        InvalidInputError: a record begins with something else.
    """
    if index is not None and index.size < len(records):
        records = [records[each] for each in index.tolist()]
    try:
        keys, key_index = _distinct([record[0] for record in records])
        return keys, key_index, np.array([record[1] for record in records], dtype=np.int64)
    except (IndexError, TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(
            f"a record must begin with (id_key: str, id: int below 2**63): {error}"
        ) from None


def _distinct(keys: Sequence[str]) -> tuple[list[str], Int64s]:
    """Return the distinct keys in order of appearance, and the index of each key among them."""
    lookup: dict[str, int] = {}
    if keys and keys.count(keys[0]) == len(keys):
        return [keys[0]], np.zeros(len(keys), dtype=np.int64)
    index = [lookup.setdefault(key, len(lookup)) for key in keys]
    return list(lookup), np.array(index, dtype=np.int64)


def joined_keys(
    parts: Iterable[tuple[Sequence[str], npt.NDArray[np.integer]]],
) -> tuple[list[str], Int64s]:
    """Return the distinct keys of several batches of IDs, and the index of each ID's key."""
    lookup: dict[str, int] = {}
    indices = []
    for keys, key_index in parts:
        numbers = [lookup.setdefault(key, len(lookup)) for key in keys]
        indices.append(np.array(numbers, dtype=np.int64)[key_index])
    return list(lookup), np.concatenate(indices)


def _groups(
    keys: Sequence[str], key_index: npt.NDArray[np.integer]
) -> Iterator[tuple[str, Int64s]]:
    """Yield each non-empty key with the indices of its IDs, ascending."""
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
    memory: IdMemory,
    keys: Sequence[str],
    key_index: npt.NDArray[np.integer],
    ids: Int64s,
) -> None:
    """Remember IDs in their order, except those of the key ``""``."""
    _apply(memory.save, memory.save_all, keys, key_index, ids)


def remove_ids(
    memory: RemovableIds,
    keys: Sequence[str],
    key_index: npt.NDArray[np.integer],
    ids: Int64s,
) -> None:
    """Remove IDs; the arguments are those of ``save_ids``."""
    _apply(memory.remove, memory.remove_all, keys, key_index, ids)


def _apply(
    one: Callable[[int, str], object],
    many: Callable[[Int64s, str], object],
    keys: Sequence[str],
    key_index: npt.NDArray[np.integer],
    ids: Int64s,
) -> None:
    """Call a function with the IDs of each key, in their order: the faster one of two."""
    for key, where in _groups(keys, key_index):
        if where.size <= _FEW:
            for value in ids[where].tolist():
                one(value, key)
        else:
            many(ids[where], key)


def seen_ids(
    memory: IdMemory,
    keys: Sequence[str],
    key_index: npt.NDArray[np.integer],
    ids: Int64s,
) -> Mask:
    """Return which IDs are in a memory, shape (n,); those of the key ``""`` never are.

    Keys, indices and IDs are those of ``save_ids``.
    """
    seen = np.zeros(ids.size, dtype=np.bool_)
    for key, where in _groups(keys, key_index):
        if where.size <= _FEW:
            for row in where.tolist():
                seen[row] = memory.is_duplicate(int(ids[row]), key)
        else:
            seen[where] = memory.are_duplicates(ids[where], key)
    return seen


def unseen_ids(
    memories: Sequence[IdMemory],
    keys: Sequence[str],
    key_index: npt.NDArray[np.integer],
    ids: Int64s,
) -> Mask:
    """Return which IDs are new, to the memories and among the earlier ones here; save nothing.

    IDs of the key ``""`` are always new. Keys, indices and IDs are those of ``save_ids``.

    Raises:
        InvalidInputError: an ID is negative.
    """
    unseen = np.ones(ids.size, dtype=np.bool_)
    for key, where in _groups(keys, key_index):
        some = ids[where]
        if where.size <= _FEW:
            earlier: set[int] = set()
            for row, value in zip(where.tolist(), some.tolist(), strict=True):
                if value in earlier or any(each.is_duplicate(value, key) for each in memories):
                    unseen[row] = False
                earlier.add(value)
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
    """Return which of some distinct, ascending positions are in a bitmap."""
    size = positions.size
    if not size or not bitmap:
        return np.zeros(size, dtype=np.bool_)
    pages = (int(positions[-1]) >> _PAGE_BITS) - (int(positions[0]) >> _PAGE_BITS) + 1
    if pages * _CROWDED > size:
        return np.fromiter(map(bitmap.__contains__, positions.tolist()), np.bool_, size)
    found = np.frombuffer((BitMap64(to_array(positions)) & bitmap).to_array(), dtype=np.uint64)
    mask = np.zeros(size, dtype=np.bool_)
    mask[positions.searchsorted(found.astype(np.int64))] = True
    return mask


def to_array(positions: Int64s) -> array[int]:
    """Return positions in the form that ``BitMap64.update`` takes."""
    return array("Q", positions.tobytes())


class OpenPositions:
    """Positions that were offered and are not released.

    Attributes:
        last_offered: highest packed position that was offered, or everything below is released.
    """

    def __init__(self, low_watermark: int) -> None:
        self._open = BitMap64()
        self._low_watermark = low_watermark
        self.last_offered = low_watermark - 1

    def add(self, positions: Int64s) -> None:
        """Add packed positions, shape (n,)."""
        self._open.update(to_array(positions))

    def has_read(self, position: int) -> bool:
        """Return True if everything up to a packed position was offered, or is released."""
        return max(self.last_offered, self._low_watermark - 1) >= position

    def discard(self, positions: Int64s) -> None:
        """Remove packed positions that are released, shape (n,)."""
        discard = self._open.discard
        for position in positions.tolist():
            discard(position)

    def are_below(self, positions: Int64s) -> Mask:
        """Return which packed positions are below the low watermark, shape (n,)."""
        below: Mask = positions < self._low_watermark
        return below

    def unknown(self, positions: Int64s, candidates: Mask) -> Int64s:
        """Return the indices of the candidates that are not open yet, each position once."""
        index = np.flatnonzero(candidates)
        some = positions[index]
        if some.size > 1 and not bool((some[1:] > some[:-1]).all()):
            some, first = np.unique(some, return_index=True)
            index = index[first]
        if some.size and int(some[0]) <= self.last_offered:
            index = index[~contained(self._open, some)]
        return np.sort(index)

    def low_watermark(self, withheld: BitMap64) -> int:
        """Return the position below which all is released, not ``withheld``; it never decreases."""
        position = self.last_offered + 1
        if self._open:
            position = min(position, self._open.min())
        if withheld:
            position = min(position, withheld.min())
        self._low_watermark = max(self._low_watermark, position)
        return self._low_watermark
