"""Far-off rows of a tracker, in buckets of packed chunks.

A chunk holds rows in the order of their positions, so that the differences between neighbours are
small. The three columns (due offset, ledger step, entry gap) are split into byte planes, which are
compressed separately: sequences shrink to almost nothing, random due times nearly to their entropy.

A bucket covers the due times from its ``low`` up to the ``low`` of the next bucket. The ranges
adapt: a bucket with too many rows in overlapping chunks is split into parts with equal numbers of
rows, so that buckets are narrow where many rows are due. Rows that arrive in due order never cause
a split.
"""

from __future__ import annotations

import struct
from bisect import insort
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard

from .rows import (
    BY_POSITION,
    DUE,
    ENTRY,
    LEDGER,
    Int64s,
    Key,
    Rows,
    empty_rows,
    small_index,
    sort_rows,
    without_row,
)

#: Maximum number of rows in a chunk; the lengths of its planes are stored in 16 bits.
CHUNK_ROWS = 8192

_HEADER = struct.Struct("<I9q?")
_PLANE = struct.Struct("<BH")
_CONSTANT, _PACKED, _RAW = 0, 1, 2


class ChunkInfo(NamedTuple):
    """Header of a chunk, readable without decoding the chunk."""

    rows: int
    min_due: int
    max_due: int
    key_ledger: int  # of the lowest position of the rows due at ``min_due``
    key_entry: int
    first_ledger: int
    first_entry: int
    last_ledger: int
    last_entry: int
    first_offset: int  # of the due time at the first position
    steady: bool  # True if the due times are stored as differences


def chunk_info(chunk: bytes) -> ChunkInfo:
    """Read a chunk's header."""
    return ChunkInfo._make(_HEADER.unpack_from(chunk))


def chunk_key(chunk: bytes) -> Key:
    """Return the lowest (due, ledger, entry) of a chunk."""
    header = _HEADER.unpack_from(chunk)
    return header[1], header[3], header[4]


class ChunkCodec:
    """Encoder and decoder of chunks; the lowest ``shift`` bits of every due time are zero."""

    def __init__(self, shift: int) -> None:
        self._shift = shift
        params = zstandard.ZstdCompressionParameters.from_level(
            1,
            source_size=CHUNK_ROWS,
            min_match=7,
            write_content_size=False,
            format=zstandard.FORMAT_ZSTD1_MAGICLESS,
        )
        self._compress = zstandard.ZstdCompressor(compression_params=params).compress
        self._decompress = zstandard.ZstdDecompressor(
            format=zstandard.FORMAT_ZSTD1_MAGICLESS
        ).decompress

    def encode(self, rows: Rows) -> bytes:
        """Encode 1 to ``CHUNK_ROWS`` rows, given in any order."""
        rows = sort_rows(rows, BY_POSITION)
        due, ledger, entry = rows
        least = int(due.argmin())
        min_due = int(due[least])
        step, gap = _differences(ledger), _differences(entry)
        change = np.flatnonzero(step)
        gap[change] = entry[change]
        positions = [int(column[at]) for at in (least, 0, -1) for column in (ledger, entry)]
        offset = (due - min_due) >> self._shift
        first = int(offset[0])
        change = _differences(offset)
        # Differences are smaller if many are zero or none is negative.
        steady = due.size - np.count_nonzero(change) > due.size // 4 or bool(change.min() >= 0)
        if steady:
            # Zigzag encoding: small differences of either sign become small positive numbers.
            offset = (change << 1) ^ (change >> 63)
        parts = [_HEADER.pack(due.size, min_due, int(due.max()), *positions, first, steady)]
        for column in (offset, step, gap):
            self._encode_column(column, parts)
        return b"".join(parts)

    def _decode_due(self, chunk: bytes, info: ChunkInfo) -> tuple[Int64s, int]:
        offset, at = self._decode_column(chunk, _HEADER.size, info.rows)
        if info.steady:
            offset = ((offset >> 1) ^ -(offset & 1)).cumsum()
            offset += info.first_offset
        offset <<= self._shift
        offset += info.min_due
        return offset, at

    def _encode_column(self, column: Int64s, parts: list[bytes]) -> None:
        width = (int(column.max()).bit_length() + 7) // 8
        parts.append(bytes((width,)))
        if not width:
            return
        wide = 1 if width == 1 else 2 if width == 2 else 4 if width <= 4 else 8
        planes = column.astype(f"<u{wide}").view(np.uint8).reshape(-1, wide)
        for index in range(width):
            plane = np.ascontiguousarray(planes[:, index])
            # Most planes are constant or incompressible, and those are decoded faster as they are.
            if bool((plane == plane[0]).all()):
                parts.append(_PLANE.pack(_CONSTANT, int(plane[0])))
                continue
            data = self._compress(plane.tobytes())
            if len(data) < plane.size:
                parts += _PLANE.pack(_PACKED, len(data)), data
            else:
                parts += _PLANE.pack(_RAW, plane.size), plane.tobytes()

    def decode(self, chunk: bytes) -> Rows:
        """Return the rows of a chunk in the order of their positions, shape (3, n)."""
        info = chunk_info(chunk)
        rows = np.empty((3, info.rows), dtype=np.int64)
        rows[DUE], at = self._decode_due(chunk, info)
        step, at = self._decode_column(chunk, at, info.rows)
        gap, at = self._decode_column(chunk, at, info.rows)
        change = np.flatnonzero(step)
        rows[LEDGER] = info.first_ledger
        rows[ENTRY] = info.first_entry
        if not change.size:
            rows[ENTRY] += gap.cumsum()
            return rows
        rows[LEDGER] += step.cumsum()
        # At a change of ledger, the gap is the entry ID itself: subtract the sum up to that row.
        start = gap[change]
        gap[change] = 0
        total = gap.cumsum()
        rows[ENTRY] += total
        lengths = np.diff(change, append=info.rows)
        rows[ENTRY, change[0] :] += np.repeat(start - total[change] - info.first_entry, lengths)
        return rows

    def decode_due(self, chunk: bytes) -> Int64s:
        """Return only the due times, in the order of the positions, shape (n,)."""
        return self._decode_due(chunk, chunk_info(chunk))[0]

    def _decode_column(self, chunk: bytes, at: int, n: int) -> tuple[Int64s, int]:
        width = chunk[at]
        at += 1
        column = np.zeros(n, dtype=np.int64)
        for index in range(width):
            kind, length = _PLANE.unpack_from(chunk, at)
            at += _PLANE.size
            if kind == _CONSTANT:
                column |= length << (8 * index)
                continue
            data: bytes | memoryview = memoryview(chunk)[at : at + length]
            at += length
            if kind == _PACKED:
                data = self._decompress(data, max_output_size=n)
            plane = np.frombuffer(data, dtype=np.uint8)
            if index:
                column |= plane.astype(np.int64) << (8 * index)
            else:
                column |= plane
        return column, at


def _differences(column: Int64s) -> Int64s:
    """Return the difference of each value to the one before it; 0 for the first."""
    found = np.zeros_like(column)
    np.subtract(column[1:], column[:-1], out=found[1:])
    return found


#: Number of overlapping rows above which a bucket is split: about the number that must be decoded
#: together when the bucket comes near.
SPLIT_ROWS = 262_144
#: Number of parts of a split; more for a bucket that is far too large.
_SPLIT_PARTS = 4
#: Limit on unpacked rows in the tails of all buckets: this number or, if larger, one in
#: ``_LOOSE_SHARE`` of all rows.
_LOOSE_ROWS = 49_152
_LOOSE_SHARE = 200
#: The parts of a tail are joined beyond this number, because each join copies the whole tail.
_MOST_PARTS = 128
_LOWEST_DUE = -(1 << 63)


class TimeBucket:
    """Chunks, and a tail of rows that do not fill a chunk yet."""

    __slots__ = ("check_at", "chunks", "low", "packed", "parts", "tail_due", "tail_rows")

    def __init__(self, low: int) -> None:
        self.low = low  # lowest due time of the range, ms
        self.chunks: list[bytes] = []  # in the order of their keys
        self.packed = 0  # rows in chunks
        self.parts: list[Rows] = []  # of the tail
        self.tail_rows = 0
        self.tail_due = 0  # the earliest due time in the tail
        self.check_at = SPLIT_ROWS  # number of packed rows at which a split is tried

    def push(self, chunk: bytes) -> None:
        """Add a chunk."""
        self.packed += chunk_info(chunk).rows
        insort(self.chunks, chunk, key=chunk_key)

    def tail(self) -> Rows:
        """Return the rows of the tail."""
        if len(self.parts) != 1:
            self.parts = [np.concatenate([empty_rows(), *self.parts], axis=1)]
        return self.parts[0]


class BucketStore:
    """Packed rows by due time; loading rows removes them. For ``shift`` see `ChunkCodec`."""

    def __init__(self, shift: int) -> None:
        self._codec = ChunkCodec(shift)
        self._step = 1 << shift
        self._buckets = [TimeBucket(_LOWEST_DUE)]
        self._index_buckets()
        self._loose = 0  # rows in all tails
        self.rows = 0

    def add(self, rows: Rows) -> None:
        """Add rows in any order, at most 65,536 at a time; amortised O(log rows) each."""
        self.rows += rows.shape[1]
        self._place(rows)
        self._limit_loose()
        for bucket in [b for b in self._buckets if b.packed > b.check_at]:
            self._split(bucket)

    def bound(self) -> Key | None:
        """Return a lower bound of all keys, with the exact due time; None without rows."""
        for index, bucket in enumerate(self._buckets):
            if bucket.packed or bucket.tail_rows:
                if index:
                    self._drop_before(index)
                key = chunk_key(bucket.chunks[0]) if bucket.packed else None
                if bucket.tail_rows and (key is None or bucket.tail_due <= key[0]):
                    return bucket.tail_due, -1, -1
                return key
        return None

    def load(self, limit: int, until_due: int) -> Rows:
        """Remove and return the rows at the bound, and about ``limit`` due by ``until_due``, ms."""
        bound = self.bound()
        if bound is None:
            return empty_rows()
        # The rows at the bound come in any case: the caller can return nothing before they did.
        until_due = max(until_due, bound[0])
        bucket = self._buckets[0]  # the first one with rows: `bound` has dropped those before it
        parts: list[Rows] = []
        loaded = 0
        if bucket.tail_rows and bucket.tail_due <= until_due:
            tail = bucket.tail()
            near = tail[DUE] <= until_due
            parts.append(tail[:, near])
            loaded = parts[0].shape[1]
            self._set_tail(bucket, tail[:, ~near])
        count = 0
        for chunk in bucket.chunks:
            if chunk_info(chunk).min_due > until_due or loaded >= limit:
                break
            rows = self._codec.decode(chunk)
            parts.append(rows)
            loaded += rows.shape[1]
            bucket.packed -= rows.shape[1]
            count += 1
        del bucket.chunks[:count]
        self.rows -= loaded
        return sort_rows(np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0])

    def remove(self, key: Key) -> bool:
        """Remove one row; return False if there is none. Decode only chunks that may contain it."""
        due, ledger, entry = key
        bucket = self._buckets[int(self._bucket_indices(due))]
        tail = bucket.tail()
        hit = (tail[DUE] == due) & (tail[LEDGER] == ledger) & (tail[ENTRY] == entry)
        if hit.any():
            self._set_tail(bucket, np.delete(tail, int(hit.argmax()), axis=1))
            self.rows -= 1
            return True
        for index, chunk in enumerate(bucket.chunks):
            info = chunk_info(chunk)
            if not info.min_due <= due <= info.max_due:
                continue
            if not info[5:7] <= (ledger, entry) <= info[7:9]:
                continue
            # Ranges of due times and positions may overlap, so only the rows tell.
            rest = without_row(sort_rows(self._codec.decode(chunk)), key)
            if rest is None:
                continue
            del bucket.chunks[index]
            bucket.packed -= info.rows
            self.rows -= 1
            if rest.shape[1]:
                bucket.push(self._codec.encode(rest))
            return True
        return False

    def first_position(self) -> tuple[int, int] | None:
        """Return the lowest (ledger, entry), or None; O(chunks)."""
        lows = [chunk_info(chunk)[5:7] for bucket in self._buckets for chunk in bucket.chunks]
        tails = map(first_position, (bucket.tail() for bucket in self._buckets))
        return min((*lows, *filter(None, tails)), default=None)

    def count_into(self, edges: Int64s, counts: Int64s) -> None:
        """Add to ``counts[i]``, of k + 1, the number of rows due in [edges[i - 1], edges[i])."""
        for bucket in self._buckets:
            tail = edges.searchsorted(bucket.tail()[DUE], side="right")
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
        index = self._bucket_indices(rows[DUE])
        if bool((index[1:] < index[:-1]).any()):
            order = small_index(index).argsort(kind="stable")
            index = index[order]
            rows = np.take(rows, order, axis=1)
        starts = [0, *(np.flatnonzero(index[1:] != index[:-1]) + 1).tolist(), rows.shape[1]]
        for start, stop in pairwise(starts):
            if start < stop:
                self._append(self._buckets[int(index[start])], rows[:, start:stop])

    def _index_buckets(self) -> None:
        """Note the lowest due times of the buckets after these have changed."""
        self._lows = np.array([bucket.low for bucket in self._buckets], dtype=np.int64)

    def _bucket_indices(self, due: npt.ArrayLike) -> Int64s:
        """Return the index of the bucket of each due time, shape (n,)."""
        return self._lows.searchsorted(due, side="right") - 1

    def _append(self, bucket: TimeBucket, rows: Rows) -> None:
        """Add rows to the tail of a bucket; pack every full chunk."""
        if bucket.tail_rows + rows.shape[1] < CHUNK_ROWS and rows.size:
            least = int(rows[DUE].min())
            bucket.tail_due = min(bucket.tail_due, least) if bucket.tail_rows else least
            self._loose += rows.shape[1]
            bucket.tail_rows += rows.shape[1]
            bucket.parts.append(rows.copy())
            if len(bucket.parts) > _MOST_PARTS:
                bucket.tail()
            return
        rows = np.concatenate((bucket.tail(), rows), axis=1)
        full = rows.shape[1] // CHUNK_ROWS * CHUNK_ROWS
        for at in range(0, full, CHUNK_ROWS):
            bucket.push(self._codec.encode(rows[:, at : at + CHUNK_ROWS]))
        self._set_tail(bucket, rows[:, full:].copy() if full else rows)

    def _set_tail(self, bucket: TimeBucket, rows: Rows) -> None:
        self._loose += rows.shape[1] - bucket.tail_rows
        bucket.parts, bucket.tail_rows = [rows], rows.shape[1]
        bucket.tail_due = int(rows[DUE].min()) if rows.size else 0

    def _limit_loose(self) -> None:
        """Pack the largest tails, half of the loose rows at a time, if there are too many."""
        while self._loose > max(_LOOSE_ROWS, self.rows // _LOOSE_SHARE):
            target = self._loose // 2
            for bucket in sorted(self._buckets, key=lambda b: b.tail_rows, reverse=True):
                if self._loose <= target:
                    break
                bucket.push(self._codec.encode(bucket.tail()))
                self._set_tail(bucket, empty_rows())

    def _split(self, bucket: TimeBucket) -> None:
        """Split a bucket into equal parts, if its chunks overlap and its due times differ."""
        info = np.array([chunk_info(chunk)[:3] for chunk in bucket.chunks], dtype=np.int64)
        cuts: list[int] = []
        if _overlap(info) > SPLIT_ROWS:
            # Positions do not matter for the cuts, and are most of a chunk.
            sample = np.sort(
                np.concatenate([self._codec.decode_due(chunk)[::64] for chunk in bucket.chunks])
            )
            low, high = int(info[:, 1].min()), int(info[:, 2].max())
            parts = max(_SPLIT_PARTS, bucket.packed * _SPLIT_PARTS // SPLIT_ROWS)
            marks = sample[np.arange(1, parts) * sample.size // parts]
            # A quantile equal to the minimum cuts after it: one due time may have most rows.
            found = {int(x) if x > low else low + self._step for x in marks}
            cuts = sorted(x for x in found if low < x <= high)
        if not cuts:
            # Its chunks follow each other, or all rows are due at once: ask again much later.
            bucket.check_at = 2 * bucket.packed
            return
        # Chunks within one part move as they are; only the others are decoded.
        at = self._buckets.index(bucket)
        tail = bucket.tail()
        fresh = [TimeBucket(low) for low in (bucket.low, *cuts)]
        self._buckets[at : at + 1] = fresh
        self._index_buckets()
        self._set_tail(bucket, empty_rows())
        for chunk, (_, least, most) in zip(bucket.chunks, info.tolist(), strict=True):
            first, last = self._bucket_indices((least, most))
            if first == last:
                self._buckets[first].push(chunk)
            else:
                self._place(self._codec.decode(chunk))
                # Now, and not at the end: the bucket may have a million rows.
                self._limit_loose()
        self._place(tail)

    def _drop_before(self, index: int) -> None:
        """Drop the empty buckets in front; the first bucket always starts at the lowest time."""
        del self._buckets[:index]
        self._buckets[0].low = _LOWEST_DUE
        self._index_buckets()


def _overlap(info: Int64s) -> int:
    """Return the maximum number of rows in chunks (rows, first, last due) that overlap in time."""
    times = np.concatenate((info[:, 1], info[:, 2] + 1))
    change = np.concatenate((info[:, 0], -info[:, 0]))
    order = np.lexsort((change, times))
    return int(change[order].cumsum().max())


def first_position(rows: Rows) -> tuple[int, int] | None:
    """Return the lowest (ledger, entry) of rows in any order; None without rows."""
    if not rows.shape[1]:
        return None
    ledger = int(rows[LEDGER].min())
    return ledger, int(rows[ENTRY][rows[LEDGER] == ledger].min())
