"""Compact sets of 63-bit IDs, and exact sets for each key, from which IDs can be removed.

Roaring bitmaps hold IDs that are close together; sorted arrays hold all others, at 8 bytes each. A
message ID is ledger << 32 | entry << 10 | batch index. An ID whose low ten bits are zero (the first
message of a batch, or any unbatched message) is stored without these bits, so that the IDs of
consecutive entries are close together.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

Ids: TypeAlias = "npt.NDArray[np.uint64]"
Mask: TypeAlias = "npt.NDArray[np.bool_]"

_LOW = np.uint64(1023)
_LOW_BITS = np.uint64(10)
_PAGE_BITS = np.uint64(16)
#: Number of IDs in a page of 65,536 from which a bitmap is smaller than an array.
_DENSE = 32
#: IDs that ``add`` collects before they are sorted in.
_MAX_PENDING = 16_384
#: Maximum number of IDs in one sorted array.
_BLOCK = 131_072
#: Bitmaps are compacted after this number of new IDs, or an eighth of the set if that is more.
_GROWTH = 262_144
_PRIVATE = MAP_PRIVATE | MAP_ANONYMOUS
#: Limits on recent IDs: more IDs are merged into the blocks, more runs are joined.
_MAX_RECENT = 16_384
_MAX_RECENT_RUNS = 8


def _bitmap(ids: Ids) -> BitMap64:
    return BitMap64(array("Q", ids.tobytes()))


def _dense_mask(ids: Ids, least: int) -> Mask:
    """Return which of the sorted IDs are in a page with at least ``least`` of them."""
    page = ids >> _PAGE_BITS
    starts = np.flatnonzero(page[1:] != page[:-1]) + 1
    bounds = np.concatenate(([0], starts, [ids.size]))
    sizes = np.diff(bounds)
    if sizes.size == 1:
        return np.full(ids.size, sizes[0] >= least)
    return np.repeat(sizes >= least, sizes)


def _in_sorted(run: Ids, ids: Ids) -> Mask:
    index = run.searchsorted(ids)
    index[index == run.size] = 0
    found: Mask = run[index] == ids
    return found


def _without(run: Ids, ids: Ids) -> Ids:
    """Return a sorted run without the sorted IDs."""
    return np.delete(run, run.searchsorted(ids[_in_sorted(run, ids)]))


def _copy_to_pages(ids: Ids) -> Ids:
    """Copy IDs into memory pages of their own, so that growing blocks do not fragment the heap."""
    pages = np.frombuffer(mmap(-1, ids.nbytes, _PRIVATE), dtype=np.uint64)
    pages[:] = ids
    return pages


class _SortedIds:
    """Sorted arrays of at most ``_BLOCK`` IDs, and a few recent runs that are merged in later."""

    def __init__(self) -> None:
        self.blocks: list[Ids] = []
        self.recent: list[Ids] = []
        self.size = 0
        self._recent_size = 0
        self._lows: list[int] = []  # first ID of each block

    def __contains__(self, value: int) -> bool:
        """Return whether one ID is in the runs; for a single one, NumPy costs more than Python."""
        if self.blocks:
            block = self.blocks[max(0, bisect_right(self._lows, value) - 1)].data
            index = bisect_left(block, value)
            if index < len(block) and block[index] == value:
                return True
        for run in self.recent:
            some = run.data
            index = bisect_left(some, value)
            if index < len(some) and some[index] == value:
                return True
        return False

    def contains(self, ids: Ids) -> Mask:
        found = np.zeros(ids.size, dtype=np.bool_)
        for run in self.recent:
            found |= _in_sorted(run, ids)
        if self.blocks:
            starts = self._starts(ids)
            for block, start, stop in zip(self.blocks, starts, starts[1:], strict=False):
                if start < stop:
                    found[start:stop] |= _in_sorted(block, ids[start:stop])
        return found

    def add(self, ids: Ids) -> Ids:
        """Add sorted new IDs; remove and return those that now belong in a bitmap."""
        self.recent.append(ids)
        self.size += ids.size
        self._recent_size += ids.size
        if self._recent_size > max(_MAX_RECENT, self.size // 32):
            return self._merge()
        if len(self.recent) <= _MAX_RECENT_RUNS:
            return ids[:0]
        joined = np.sort(np.concatenate(self.recent))
        dense = _dense_mask(joined, 2 * _DENSE)
        removed, kept = joined[dense], joined[~dense]
        self.recent = [kept] if kept.size else []
        self.size -= removed.size
        self._recent_size -= removed.size
        return removed

    def _starts(self, ids: Ids) -> list[int]:
        """Return the index of the first ID that belongs to each block, and the end."""
        lows = np.array([block[0] for block in self.blocks[1:]], dtype=np.uint64)
        return [0, *ids.searchsorted(lows).tolist(), ids.size]

    def _set_blocks(self, blocks: list[Ids]) -> None:
        self.blocks = blocks
        self._lows = [int(block[0]) for block in blocks]

    def _merge(self) -> Ids:
        """Merge the recent IDs into the blocks; remove and return dense IDs, as ``add``."""
        fresh = np.concatenate(self.recent)
        self.recent = []
        fresh.sort()
        self._recent_size = 0
        old = self.blocks or [fresh[:0]]
        starts = self._starts(fresh)
        blocks: list[Ids] = []
        removed: list[Ids] = []
        for index, start in enumerate(starts[:-1]):
            merged = np.concatenate((old[index], fresh[start : starts[index + 1]]))
            old[index] = fresh[:0]  # frees the old block before the next one is merged
            if not merged.size:
                continue
            merged.sort(kind="stable")
            dense = _dense_mask(merged, 2 * _DENSE)
            if dense.any():
                removed.append(merged[dense])
                self.size -= removed[-1].size
                merged = merged[~dense]
            parts = -(-merged.size // _BLOCK)
            if parts:
                blocks += [_copy_to_pages(part) for part in np.array_split(merged, parts)]
        self._set_blocks(blocks)
        return np.concatenate(removed) if removed else fresh[:0]

    def remove(self, ids: Ids) -> None:
        """Remove sorted IDs; those that are missing change nothing."""
        starts = self._starts(ids)
        for index, block in enumerate(self.blocks):
            rest = _without(block, ids[starts[index] : starts[index + 1]])
            if rest.size < block.size:
                self.blocks[index] = _copy_to_pages(rest) if rest.size else rest
        self._set_blocks([block for block in self.blocks if block.size])
        self.recent = [rest for run in self.recent if (rest := _without(run, ids)).size]
        self._recent_size = sum(run.size for run in self.recent)
        self.size = sum(block.size for block in self.blocks) + self._recent_size

    def all(self) -> Ids:
        return np.sort(np.concatenate([np.empty(0, dtype=np.uint64), *self.blocks, *self.recent]))


class IdSet:
    """A set of IDs; an ID that is added must not be in the set."""

    def __init__(self) -> None:
        self._plain = BitMap64()
        self._short = BitMap64()
        self._sparse = _SortedIds()
        self._pending: set[int] = set()
        self._compact_at = _GROWTH
        self.size = 0

    def __contains__(self, value: int) -> bool:
        # In the order of the costs: a set, a bitmap, then a search in each sorted run.
        if value in self._pending:
            return True
        if (value >> 10) in self._short if not value & 1023 else value in self._plain:
            return True
        if not self._sparse.size:
            return False
        return value in self._sparse

    def add(self, value: int) -> None:
        """Add one ID."""
        self._pending.add(value)
        self.size += 1
        if len(self._pending) >= _MAX_PENDING:
            self._flush()

    def contains(self, ids: Ids) -> Mask:
        """Return which of the IDs, sorted and distinct, are in the set."""
        self._flush()
        found = self._sparse.contains(ids) if self._sparse.size else np.zeros(ids.size, np.bool_)
        short = (ids & _LOW) == 0
        for bitmap, part, shift in self._by_bitmap(short):
            if bitmap and part.any():
                found[part] |= _in_bitmap(bitmap, ids[part] >> shift)
        return found

    def update(self, ids: Ids) -> None:
        """Add IDs: sorted, distinct, and none of them in the set."""
        self._flush()
        self.size += ids.size
        if ids.size:
            self._insert(ids)
        if self.size >= self._compact_at:
            self.compact()

    def discard_recent(self, value: int) -> bool:
        """Remove an ID if it was added a moment ago; return False if it was not."""
        if value not in self._pending:
            return False
        self._pending.discard(value)
        self.size -= 1
        return True

    def remove(self, ids: Ids) -> None:
        """Remove IDs: sorted, distinct, and all of them in the set."""
        self._flush()
        self.size -= ids.size
        short = (ids & _LOW) == 0
        for bitmap, part, shift in self._by_bitmap(short):
            if bitmap and part.any():
                bitmap -= _bitmap(ids[part] >> shift)
        if self._sparse.size:
            self._sparse.remove(ids)

    def all(self) -> Ids:
        """Return the IDs in their order."""
        self._flush()
        parts = [self._sparse.all()]
        for bitmap, shift in ((self._plain, np.uint64(0)), (self._short, _LOW_BITS)):
            parts.append(np.frombuffer(bitmap.to_array(), dtype=np.uint64) << shift)
        return np.sort(np.concatenate(parts))

    def _insert(self, ids: Ids) -> None:
        short = (ids & _LOW) == 0
        rest: list[Ids] = []
        for bitmap, part, shift in self._by_bitmap(short):
            some = ids[part] >> shift
            if not some.size:
                continue
            dense = _dense_mask(some, _DENSE)
            if dense.all():
                bitmap |= _bitmap(some)
            else:
                if dense.any():
                    bitmap |= _bitmap(some[dense])
                rest.append(some[~dense] << shift)
        if rest:
            dense_ids = self._sparse.add(np.sort(np.concatenate(rest)))
            if dense_ids.size:
                self._insert(dense_ids)

    def _by_bitmap(self, short: Mask) -> list[tuple[BitMap64, Mask, np.uint64]]:
        """Return each bitmap, the mask of its IDs, and the number of low bits that it omits."""
        return [(self._plain, ~short, np.uint64(0)), (self._short, short, _LOW_BITS)]

    def _flush(self) -> None:
        if self._pending:
            ids = np.fromiter(self._pending, dtype=np.uint64, count=len(self._pending))
            self._pending = set()
            ids.sort()
            self._insert(ids)

    def compact(self) -> None:
        """Free memory that growing bitmaps have reserved but not used."""
        for bitmap in (self._plain, self._short):
            bitmap.run_optimize()
            bitmap.shrink_to_fit()
        self._compact_at = self.size + max(_GROWTH, self.size // 8)

    def dump(self) -> list[bytes]:
        """Return the three parts of the set as bytes."""
        # Not sorted in: there may be a hundred thousand sets of a few IDs each.
        pending = np.fromiter(self._pending, np.uint64, len(self._pending))
        sparse = np.sort(np.concatenate((self._sparse.all(), pending)))
        return [self._plain.serialize(), self._short.serialize(), sparse.astype("<u8").tobytes()]

    @classmethod
    def load(cls, parts: list[bytes]) -> IdSet:
        """Build a set from the parts that ``dump`` returned."""
        self = cls()
        self._plain = BitMap64.deserialize(parts[0])
        self._short = BitMap64.deserialize(parts[1])
        sparse = np.frombuffer(parts[2], dtype="<u8").astype(np.uint64)
        if sparse.size:
            self._insert(sparse)  # a dump has IDs among them that were not sorted in
        self.size = len(self._plain) + len(self._short) + self._sparse.size
        return self


def _in_bitmap(bitmap: BitMap64, ids: Ids) -> Mask:
    """Return which of the sorted IDs are in the bitmap."""
    found = np.zeros(ids.size, dtype=np.bool_)
    # An intersection is faster for IDs that share a page, single lookups for the others.
    dense = _dense_mask(ids, 8)
    if dense.any():
        part = ids[dense]
        common = _bitmap(part) & bitmap
        if common:
            hits = np.frombuffer(common.to_array(), dtype=np.uint64)
            found[dense] = _in_sorted(hits, part)
    if not dense.all():
        lone = ids[~dense].tolist()
        found[~dense] = np.fromiter((x in bitmap for x in lone), dtype=np.bool_, count=len(lone))
    return found


#: Removed IDs are kept apart up to this number, or an eighth of the set if that is more.
_LEAST_GONE = 4_096


class _KeyIds:
    """The IDs of one key: those that were added, without those that are gone."""

    def __init__(self) -> None:
        self.added = IdSet()
        self.gone = IdSet()

    @property
    def size(self) -> int:
        return self.added.size - self.gone.size

    def contains(self, ids: Ids) -> Mask:
        found = self.added.contains(ids)
        if self.gone.size:
            found &= ~self.gone.contains(ids)
        return found

    def add(self, ids: Ids) -> None:
        fresh = ids[~self.contains(ids)]
        if self.gone.size and bool(self.gone.contains(fresh).any()):
            self.compact()
        self.added.update(fresh)

    def compact(self) -> None:
        self.added.remove(self.gone.all())
        self.gone = IdSet()


class RemovableIds:
    """Set of IDs for each key, like a `Deduplicator` that checks nothing, and never forgets."""

    def __init__(self) -> None:
        self._keys: defaultdict[str, _KeyIds] = defaultdict(_KeyIds)

    def __len__(self) -> int:
        """Return the number of IDs of all keys."""
        return sum(found.size for found in self._keys.values())

    def is_duplicate(self, id: int, key: str) -> bool:  # noqa: A002 - as in a Deduplicator
        found = self._keys.get(key)
        return found is not None and id in found.added and id not in found.gone

    def are_duplicates(self, ids: npt.ArrayLike, key: str) -> Mask:
        found = self._keys.get(key)
        distinct, inverse = np.unique(np.asarray(ids).astype(np.uint64), return_inverse=True)
        if found is None or not distinct.size:
            return np.zeros(inverse.size, dtype=np.bool_)
        return found.contains(distinct)[inverse]

    def save(self, id: int, key: str) -> None:  # noqa: A002
        """Add an ID; it may be in the set."""
        found = self._keys[key]
        if id in found.gone:
            found.compact()  # an ID cannot leave the set of those that are gone one by one
        if id not in found.added:
            found.added.add(id)

    def save_all(self, ids: npt.ArrayLike, key: str) -> None:
        """Add IDs, shape (n,); some may be in the set, or repeated."""
        distinct = np.unique(np.asarray(ids).astype(np.uint64))
        self._keys[key].add(distinct)

    def remove(self, id: int, key: str) -> None:  # noqa: A002
        """Remove an ID; it may be missing."""
        found = self._keys.get(key)
        if found is None:
            return
        if not found.added.discard_recent(id) and id in found.added and id not in found.gone:
            found.gone.add(id)
        self._tidy_up(key, found)

    def remove_all(self, ids: npt.ArrayLike, key: str) -> None:
        """Remove IDs, shape (n,); some may be missing, or repeated."""
        found = self._keys.get(key)
        if found is None:
            return
        distinct = np.unique(np.asarray(ids).astype(np.uint64))
        found.gone.update(distinct[found.contains(distinct)])
        self._tidy_up(key, found)

    def _tidy_up(self, key: str, found: _KeyIds) -> None:
        if not found.size:
            del self._keys[key]  # an empty one has 2.6 KB, and there may be a hundred thousand
        elif found.gone.size > max(_LEAST_GONE, found.added.size // 8):
            found.compact()
