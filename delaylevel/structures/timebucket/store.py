"""The part of a tracker that is not due for a while: buckets of packed chunks.

A bucket covers a range of due times, from its ``low`` up to the next bucket's. The ranges are not
fixed: a bucket that holds too many rows whose chunks overlap is split in parts of equal size, so
that buckets are wide where little is due and narrow where much is. Rows that arrive in the order of
their due times never need it.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

import numpy as np

from delaylevel.structures.rows import (
    BY_POSITION,
    DUE,
    ENTRY,
    LEDGER,
    Int64s,
    Key,
    Rows,
    empty_rows,
    find_key,
    sort_rows,
)

from .chunks import CHUNK_ROWS, ChunkCodec, chunk_info, chunk_key

#: A bucket with more overlapping rows than this is split; about what is unpacked when it comes
#: near.
SPLIT_ROWS = 262_144
#: Into how many parts; more for a bucket that is far too large.
_SPLIT_PARTS = 4
#: Rows that may wait unpacked for their chunk to fill, in all buckets together: so many, or a share
#: of all rows.
_LOOSE_ROWS = 49_152
_LOOSE_SHARE = 200
#: Tails are lists of blocks of one size, which are used again: growing arrays would leave holes in
#: the heap.
_BLOCK_ROWS = 256
#: Up to here a bucket is searched for each row by itself.
_FEW_ROWS = 256
_SLOT_BITS = 11
_SLOTS = 1 << _SLOT_BITS
_LOWEST_DUE = -(1 << 63)
_HIGHEST_DUE = (1 << 63) - 1


class _Bucket:
    """Chunks, and a tail of rows that do not fill one yet."""

    __slots__ = ("blocks", "check_at", "chunks", "keys", "low", "packed", "tail_due", "tail_rows")

    def __init__(self, low: int) -> None:
        self.low = low
        self.chunks: list[bytes] = []
        self.keys: list[Key] | None = (
            None  # of the chunks, once they are in the order of their keys
        )
        self.packed = 0
        self.blocks: list[Rows] = []  # the tail; all are full but the last
        self.tail_rows = 0
        self.tail_due = 0
        self.check_at = SPLIT_ROWS

    def push(self, chunk: bytes) -> None:
        self.packed += chunk_info(chunk).rows
        if self.keys is None:
            self.chunks.append(chunk)
            return
        key = chunk_key(chunk)
        index = bisect_left(self.keys, key)
        self.keys.insert(index, key)
        self.chunks.insert(index, chunk)

    def sort(self) -> list[Key]:
        if self.keys is None:
            self.chunks.sort(key=chunk_key)
            self.keys = [chunk_key(chunk) for chunk in self.chunks]
        return self.keys

    def loose(self) -> Rows:
        if not self.tail_rows:
            return empty_rows()
        return np.concatenate(self.blocks, axis=1)[:, : self.tail_rows]


class BucketStore:
    """Rows by due time, packed; what is loaded is removed."""

    def __init__(self, shift: int) -> None:
        """Create an empty store.

        Args:
            shift: how many low bits of every due time are zero.
        """
        self._codec = ChunkCodec(shift)
        self._step = 1 << shift
        self._buckets = [_Bucket(_LOWEST_DUE)]
        self._measure()
        self._spare: list[Rows] = []
        self._loose = 0
        self.rows = 0

    def add(self, rows: Rows) -> None:
        """Add rows in any order, at most 65,536 at a time; amortised O(log rows) each."""
        self.rows += rows.shape[1]
        self._place(rows)
        self._limit_loose()
        for bucket in [b for b in self._buckets if b.packed > b.check_at]:
            self._split(bucket)

    def bound(self) -> Key | None:
        """Return a key that no stored row is below, its due time exact; None where all is empty."""
        for index, bucket in enumerate(self._buckets):
            if bucket.packed or bucket.tail_rows:
                if index:
                    self._drop_before(index)
                key = bucket.sort()[0] if bucket.packed else None
                if bucket.tail_rows and (key is None or bucket.tail_due <= key[0]):
                    return bucket.tail_due, -1, -1
                return key
        return None

    def load(self, limit: int, until_due: int) -> Rows:
        """Remove and return the rows at the bound, and more until about ``limit``.

        Args:
            limit: rows after which no further chunk is unpacked.
            until_due: chunks that begin later stay, ms.

        Returns:
            Rows in the order of their keys.
        """
        bound = self.bound()
        if bound is None:
            return empty_rows()
        until_due = max(until_due, bound[0])
        bucket = self._buckets[0]
        parts: list[Rows] = []
        loaded = 0
        if bucket.tail_rows and bucket.tail_due <= until_due:
            tail = bucket.loose()
            near = tail[DUE] <= until_due
            parts.append(tail[:, near])
            loaded = parts[0].shape[1]
            self._replace_tail(bucket, tail[:, ~near])
        keys = bucket.sort()
        count = 0
        while count < len(keys) and keys[count][0] <= until_due and loaded < limit:
            rows = self._codec.decode(bucket.chunks[count])
            parts.append(rows)
            loaded += rows.shape[1]
            bucket.packed -= rows.shape[1]
            count += 1
        del keys[:count], bucket.chunks[:count]
        self.rows -= loaded
        return sort_rows(np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0])

    def remove(self, key: Key) -> bool:
        """Remove one row; False if there is none. Unpacks the chunks whose ranges it lies in."""
        due, ledger, entry = key
        bucket = self._buckets[int(self._lows.searchsorted(due, side="right")) - 1]
        tail = bucket.loose()
        hit = (tail[DUE] == due) & (tail[LEDGER] == ledger) & (tail[ENTRY] == entry)
        if hit.any():
            self._replace_tail(bucket, np.delete(tail, int(hit.argmax()), axis=1))
            self.rows -= 1
            return True
        for index, chunk in enumerate(bucket.chunks):
            info = chunk_info(chunk)
            if not info.min_due <= due <= info.max_due:
                continue
            if not info[5:7] <= (ledger, entry) <= info[7:9]:
                continue
            rows = sort_rows(self._codec.decode(chunk))
            found = find_key(rows, key)
            if found == rows.shape[1] or tuple(int(x) for x in rows[:, found]) != key:
                continue
            del bucket.chunks[index]
            if bucket.keys is not None:
                del bucket.keys[index]
            bucket.packed -= rows.shape[1]
            self.rows -= 1
            if rows.shape[1] > 1:
                bucket.push(self._codec.encode(np.delete(rows, found, axis=1)))
            return True
        return False

    def first_position(self) -> tuple[int, int] | None:
        """Return the lowest (ledger, entry), exact, or None; O(chunks)."""
        low = min(
            (chunk_info(chunk)[5:7] for bucket in self._buckets for chunk in bucket.chunks),
            default=None,
        )
        for bucket in self._buckets:
            tail = first_position(bucket.loose())
            if tail is not None and (low is None or tail < low):
                low = tail
        return low

    def count_into(self, edges: Int64s, counts: Int64s) -> None:
        """Add to ``counts[i]`` the rows due before ``edges[i]`` and not before ``edges[i - 1]``.

        Args:
            edges: ascending, ms, shape (k,).
            counts: shape (k + 1,); the last is for what is due at ``edges[-1]`` or later.
        """
        for bucket in self._buckets:
            tail = edges.searchsorted(bucket.loose()[DUE], side="right")
            counts += np.bincount(tail, minlength=counts.size)
            for chunk in bucket.chunks:
                info = chunk_info(chunk)
                first = int(edges.searchsorted(info.min_due, side="right"))
                if first == int(edges.searchsorted(info.max_due, side="right")):
                    counts[first] += info.rows
                    continue
                index = edges.searchsorted(self._codec.decode_due(chunk), side="right")
                counts += np.bincount(index, minlength=counts.size)

    def _place(self, rows: Rows) -> None:
        if len(self._buckets) == 1:
            self._append(self._buckets[0], rows)
            return
        index = self._bucket_of(rows[DUE])
        if bool((index[1:] < index[:-1]).any()):
            if len(self._buckets) <= 1 << 16:
                order = index.astype(np.uint16).argsort(kind="stable")
            else:
                order = index.argsort(kind="stable")
            index = index[order]
            rows = np.take(rows, order, axis=1)
        starts = [0, *(np.flatnonzero(index[1:] != index[:-1]) + 1).tolist(), rows.shape[1]]
        for start, stop in pairwise(starts):
            if start < stop:
                self._append(self._buckets[int(index[start])], rows[:, start:stop])

    def _bucket_of(self, due: Int64s) -> Int64s:
        """Return the index of the bucket of each due time.

        By a table over equal slots of time, and a step where a slot holds a boundary: a binary
        search for each row takes several times longer.
        """
        if due.size < _FEW_ROWS:
            return self._lows.searchsorted(due, side="right") - 1
        slot = due - self._table_low
        slot >>= self._table_shift
        np.clip(slot, 0, _SLOTS - 1, out=slot)
        index = np.take(self._table, slot)
        for _ in range(3):
            behind = np.take(self._highs, index) <= due
            if not behind.any():
                return index
            index += behind
        return self._lows.searchsorted(due, side="right") - 1

    def _measure(self) -> None:
        """Note where buckets begin, after they have changed."""
        self._lows = np.array([bucket.low for bucket in self._buckets], dtype=np.int64)
        self._highs = np.append(self._lows[1:], _HIGHEST_DUE)
        self._table_low = self._buckets[1].low if len(self._buckets) > 1 else 0
        span = max(self._buckets[-1].low - self._table_low, 0) if len(self._buckets) > 1 else 0
        self._table_shift = max(0, span.bit_length() - _SLOT_BITS)
        starts = self._table_low + (np.arange(_SLOTS) << self._table_shift)
        self._table = self._lows.searchsorted(starts, side="right") - 1
        self._table[0] = 0  # what lies before all of them

    def _append(self, bucket: _Bucket, rows: Rows) -> None:
        """Add rows to a bucket's tail, sealing every chunk that fills."""
        n = rows.shape[1]
        at = 0
        while at < n:
            if bucket.tail_rows == 0 and n - at >= CHUNK_ROWS:
                bucket.push(self._codec.encode(rows[:, at : at + CHUNK_ROWS]))
                at += CHUNK_ROWS
                continue
            part = rows[:, at : at + CHUNK_ROWS - bucket.tail_rows]
            at += part.shape[1]
            least = int(part[DUE].min())
            bucket.tail_due = min(bucket.tail_due, least) if bucket.tail_rows else least
            self._loose += part.shape[1]
            while part.shape[1]:
                used = bucket.tail_rows % _BLOCK_ROWS
                if not used:
                    bucket.blocks.append(self._spare.pop() if self._spare else _block())
                some = part[:, : _BLOCK_ROWS - used]
                bucket.blocks[-1][:, used : used + some.shape[1]] = some
                bucket.tail_rows += some.shape[1]
                part = part[:, some.shape[1] :]
            if bucket.tail_rows == CHUNK_ROWS:
                self._seal(bucket)

    def _seal(self, bucket: _Bucket) -> None:
        tail = bucket.loose()
        self._clear_tail(bucket)
        bucket.push(self._codec.encode(tail))

    def _clear_tail(self, bucket: _Bucket) -> None:
        self._loose -= bucket.tail_rows
        self._spare += bucket.blocks
        bucket.blocks = []
        bucket.tail_rows = 0

    def _replace_tail(self, bucket: _Bucket, rows: Rows) -> None:
        self._clear_tail(bucket)
        self._append(bucket, rows)

    def _limit_loose(self) -> None:
        while self._loose > max(_LOOSE_ROWS, self.rows // _LOOSE_SHARE):
            self._seal_largest()

    def _seal_largest(self) -> None:
        """Seal the larger tails, until half of the loose rows are packed."""
        target = self._loose // 2
        for bucket in sorted(self._buckets, key=lambda b: b.tail_rows, reverse=True):
            if self._loose <= target:
                break
            if bucket.tail_rows:
                self._seal(bucket)

    def _split(self, bucket: _Bucket) -> None:
        """Cut a bucket in equal parts, unless its chunks hardly overlap or it is one instant."""
        info = np.array([chunk_info(chunk)[:3] for chunk in bucket.chunks], dtype=np.int64)
        cuts: list[int] = []
        if _overlap(info) > SPLIT_ROWS:
            sample = np.sort(
                np.concatenate([self._codec.decode_due(chunk)[::64] for chunk in bucket.chunks])
            )
            low, high = int(info[:, 1].min()), int(info[:, 2].max())
            parts = max(_SPLIT_PARTS, bucket.packed * _SPLIT_PARTS // SPLIT_ROWS)
            marks = sample[np.arange(1, parts) * sample.size // parts]
            # A quantile that is the minimum itself cuts behind it: one instant may hold most rows.
            found = {int(x) if x > low else low + self._step for x in marks}
            cuts = sorted(x for x in found if low < x <= high)
        if not cuts:
            bucket.check_at = 2 * bucket.packed
            return
        at = self._buckets.index(bucket)
        tail = bucket.loose()
        fresh = [_Bucket(bucket.low), *(_Bucket(cut) for cut in cuts)]
        self._buckets[at : at + 1] = fresh
        self._measure()
        self._clear_tail(bucket)
        for chunk, (_, least, most) in zip(bucket.chunks, info.tolist(), strict=True):
            first, last = self._lows.searchsorted((least, most), side="right") - 1
            if first == last:
                self._buckets[first].push(chunk)
            else:
                self._place(self._codec.decode(chunk))
                self._limit_loose()  # the blocks that are used once are kept
        self._place(tail)

    def _drop_before(self, index: int) -> None:
        """Forget empty buckets in front; the first one always reaches down to the lowest time."""
        del self._buckets[:index]
        self._buckets[0].low = _LOWEST_DUE
        self._measure()

    def check(self) -> None:
        """Assert the invariants that the class promises."""
        lows = [b.low for b in self._buckets]
        assert lows == sorted(set(lows)) == self._lows.tolist()
        assert lows[0] == _LOWEST_DUE
        for bucket, high in zip(self._buckets, [*lows[1:], None], strict=True):
            total = 0
            for chunk in bucket.chunks:
                rows = self._codec.decode(chunk)
                info = chunk_info(chunk)
                total += rows.shape[1]
                assert 0 < rows.shape[1] == info.rows <= CHUNK_ROWS
                assert sort_rows(rows, BY_POSITION) is rows
                assert (rows[DUE] == self._codec.decode_due(chunk)).all()
                assert info.min_due == rows[DUE].min() >= bucket.low
                assert info.max_due == rows[DUE].max()
                assert high is None or info.max_due < high
                assert chunk_key(chunk) == tuple(sort_rows(rows)[:, 0].tolist())
                assert info[5:7] == tuple(rows[1:, 0].tolist())
                assert info[7:9] == tuple(rows[1:, -1].tolist())
            assert total == bucket.packed
            assert bucket.keys is None or bucket.keys == [chunk_key(c) for c in bucket.chunks]
            assert bucket.keys is None or bucket.keys == sorted(bucket.keys)
            tail = bucket.loose()[DUE]
            assert tail.size == bucket.tail_rows < CHUNK_ROWS
            assert not tail.size or bucket.tail_due == tail.min() >= bucket.low
            assert not tail.size or high is None or tail.max() < high
        assert self._loose == sum(b.tail_rows for b in self._buckets)
        assert self.rows == self._loose + sum(b.packed for b in self._buckets)


def _block() -> Rows:
    return np.empty((3, _BLOCK_ROWS), dtype=np.int64)


def _overlap(info: Int64s) -> int:
    """Return the most rows in chunks that cover one instant; ``info``: rows, first, last due."""
    times = np.concatenate((info[:, 1], info[:, 2] + 1))
    change = np.concatenate((info[:, 0], -info[:, 0]))
    order = np.lexsort((change, times))
    return int(change[order].cumsum().max())


def first_position(rows: Rows) -> tuple[int, int] | None:
    """Return the lowest (ledger, entry) of rows in any order, or None."""
    if not rows.shape[1]:
        return None
    ledger = int(rows[LEDGER].min())
    return ledger, int(rows[ENTRY][rows[LEDGER] == ledger].min())
