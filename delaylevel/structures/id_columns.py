"""IDs by key and packed positions for whole batches, and the times of the last ones."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from .deduplicator import Deduplicator
from .id_set import RemovableIds
from .rows import Int64s, small_index

Mask: TypeAlias = "npt.NDArray[np.bool_]"
#: ID key and number of a message, which are the same for all of its copies.
Identity: TypeAlias = "tuple[str, int]"
#: Up to this number of IDs per key, a lookup of each is faster than one of an array.
_FEW = 2
#: Size of a bitmap's page, and the positions per page from which an intersection is faster.
_PAGE_BITS = 16
_CROWDED = 8
#: Number of messages of which the time is known, at least.
_MESSAGES = 100_000
# A lookup goes through all blocks. Few messages are joined to blocks of this size.
_BLOCK = 1_000
_SINGLE = 200


class IdMemory(Protocol):
    """A set of IDs for each key, as a `Deduplicator` is."""

    def is_duplicate(self, id: int, key: str) -> bool: ...  # noqa: A002 - a public name

    def are_duplicates(self, ids: npt.ArrayLike, key: str) -> Mask: ...


class IdColumns(NamedTuple):
    """The IDs of messages, as columns. Those of the key ``""`` are in no memory."""

    keys: tuple[str, ...]  # distinct
    key_index: npt.NDArray[np.integer]  # of each message
    numbers: Int64s

    @classmethod
    def of(cls, records: Sequence[tuple[Any, ...]], index: Int64s | None = None) -> IdColumns:
        """Return the IDs of records, which begin with key and number: all, or those at indices."""
        if index is not None and index.size < len(records):
            records = [records[each] for each in index.tolist()]
        keys = [record[0] for record in records]
        numbers = np.array([record[1] for record in records], dtype=np.int64)
        # The usual case, a batch of one target: counting is faster than a dictionary.
        if keys and keys.count(keys[0]) == len(keys):
            return cls((keys[0],), np.zeros(len(keys), dtype=np.uint16), numbers)
        lookup: dict[str, int] = {}
        key_index = [lookup.setdefault(key, len(lookup)) for key in keys]
        return cls(tuple(lookup), small_index(np.array(key_index, dtype=np.int64)), numbers)

    @classmethod
    def join(cls, parts: Sequence[IdColumns]) -> IdColumns:
        """Return the IDs of several batches."""
        if len(parts) == 1:
            return parts[0]
        lookup: dict[str, int] = {}
        indices = []
        for part in parts:
            places = [lookup.setdefault(key, len(lookup)) for key in part.keys]
            indices.append(np.array(places, dtype=np.int64)[part.key_index])
        numbers = np.concatenate([part.numbers for part in parts])
        return cls(tuple(lookup), small_index(np.concatenate(indices)), numbers)

    def at(self, where: Mask | Int64s) -> IdColumns:
        """Return those of a mask, or at indices."""
        return IdColumns(self.keys, self.key_index[where], self.numbers[where])

    def identities(self) -> list[Identity]:
        """Return the key and the number of each ID."""
        rows = zip(self.key_index.tolist(), self.numbers.tolist(), strict=True)
        return [(self.keys[index], number) for index, number in rows]

    def save_in(self, memory: Deduplicator | RemovableIds) -> None:
        """Let a memory remember the IDs, in their order."""
        self._apply(memory.save, memory.save_all)

    def remove_from(self, memory: RemovableIds) -> None:
        """Remove the IDs from a memory; some may be missing."""
        self._apply(memory.remove, memory.remove_all)

    def seen_in(self, memory: IdMemory) -> Mask:
        """Return which IDs are in a memory, shape (n,)."""
        seen = np.zeros(self.numbers.size, dtype=np.bool_)
        for key, where in self._groups():
            if where.size <= _FEW:
                for row in where.tolist():
                    seen[row] = memory.is_duplicate(int(self.numbers[row]), key)
            else:
                seen[where] = memory.are_duplicates(self.numbers[where], key)
        return seen

    def unseen_in(self, memories: Sequence[IdMemory]) -> Mask:
        """Return which IDs are new, to the memories and among the earlier ones here, shape (n,)."""
        unseen = np.ones(self.numbers.size, dtype=np.bool_)
        for key, where in self._groups():
            some = self.numbers[where]
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

    def _groups(self) -> Iterator[tuple[str, Int64s]]:
        """Yield each non-empty key with the indices of its IDs, ascending."""
        if len(self.keys) == 1:
            if self.keys[0]:
                yield self.keys[0], np.arange(self.key_index.size)
            return
        order = np.argsort(self.key_index, kind="stable")
        bounds = self.key_index[order].searchsorted(np.arange(len(self.keys) + 1)).tolist()
        for key, start, stop in zip(self.keys, bounds, bounds[1:], strict=False):
            if key and start < stop:
                yield key, order[start:stop]

    def _apply(
        self, one: Callable[[int, str], object], many: Callable[[Int64s, str], object]
    ) -> None:
        """Call a function with the IDs of each key, in their order: the faster one of two."""
        for key, where in self._groups():
            if where.size <= _FEW:
                for value in self.numbers[where].tolist():
                    one(value, key)
            else:
                many(self.numbers[where], key)


# Not page by page, as in a set of IDs: that takes several times as long for a batch.
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


class RecentTimes:
    """The times of the last messages, by ID."""

    def __init__(self, most: int = _MESSAGES) -> None:
        self._most = most
        self._size = 0
        # Successive messages, and their times.
        self._blocks: deque[tuple[IdColumns, Int64s]] = deque()
        self._last: list[tuple[IdColumns, Int64s]] = []  # those that are not joined yet
        self._last_size = 0

    def add(self, ids: IdColumns, at_ms: int | Int64s) -> None:
        """Remember messages that follow the earlier ones; times are in ms since the epoch."""
        count = ids.numbers.size
        self._last.append((ids, np.full(count, at_ms)))
        self._size += count
        self._last_size += count
        if self._last_size >= _BLOCK or len(self._last) >= _SINGLE:
            parts, times = zip(*self._last, strict=True)
            self._blocks.append((IdColumns.join(parts), np.concatenate(times)))
            self._last, self._last_size = [], 0
        while self._blocks and self._size - self._blocks[0][1].size >= self._most:
            self._size -= self._blocks.popleft()[1].size

    def times_of(self, wanted: Iterable[Identity]) -> dict[Identity, int]:
        """Return the times that are known, ms since the epoch."""
        found: dict[Identity, int] = {}
        identities = set(wanted)
        numbers = np.array([number for _, number in identities], dtype=np.int64)
        for ids, at_ms in (*reversed(self._last), *reversed(self._blocks)):
            if len(found) == len(identities):
                break
            some = np.flatnonzero(np.isin(ids.numbers, numbers))
            times = dict(zip(ids.at(some).identities(), at_ms[some].tolist(), strict=True))
            found = {each: times[each] for each in times.keys() & identities} | found
        return found
