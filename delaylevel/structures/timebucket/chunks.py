"""The chunk format: a few thousand rows of (due, ledger, entry) packed into bytes.

A chunk holds rows in the order of their positions, so that the differences between neighbours are
small. The three columns (due offset, ledger step, entry gap) are split into byte planes, which are
compressed separately: sequences shrink to almost nothing, random due times nearly to their entropy.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import zstandard

from delaylevel.structures.rows import BY_POSITION, DUE, ENTRY, LEDGER, Int64s, Key, Rows, sort_rows

#: Maximum number of rows in a chunk; the lengths of its planes are stored in 16 bits.
CHUNK_ROWS = 8192

_HEADER = struct.Struct("<I8q")
_PLANE = struct.Struct("<BH")
_FIRST = struct.Struct("<q")
_CONSTANT, _PACKED, _RAW = 0, 1, 2
_SPREAD, _STEADY = b"\0", b"\1"


class ChunkInfo(NamedTuple):
    """Header of a chunk, readable without decoding the chunk.

    Attributes:
        rows: number of rows.
        min_due, max_due: range of due times, ms.
        key_ledger, key_entry: lowest position of the rows due at ``min_due``.
        first_ledger, first_entry: lowest position.
        last_ledger, last_entry: highest position.
    """

    rows: int
    min_due: int
    max_due: int
    key_ledger: int
    key_entry: int
    first_ledger: int
    first_entry: int
    last_ledger: int
    last_entry: int


def chunk_info(chunk: bytes) -> ChunkInfo:
    """Read a chunk's header."""
    return ChunkInfo._make(_HEADER.unpack_from(chunk))


def chunk_key(chunk: bytes) -> Key:
    """Return the lowest (due, ledger, entry) of a chunk."""
    header = _HEADER.unpack_from(chunk)
    return header[1], header[3], header[4]


class ChunkCodec:
    """Encoder and decoder of chunks, with a few tens of kilobytes of working memory.

    The lowest ``shift`` bits of every due time are zero.
    """

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
        n = due.size
        least = int(due.argmin())
        min_due = int(due[least])
        step = np.zeros(n, dtype=np.int64)
        np.subtract(ledger[1:], ledger[:-1], out=step[1:])
        gap = np.zeros(n, dtype=np.int64)
        np.subtract(entry[1:], entry[:-1], out=gap[1:])
        change = np.flatnonzero(step)
        gap[change] = entry[change]
        parts = [
            _HEADER.pack(
                n,
                min_due,
                int(due.max()),
                int(ledger[least]),
                int(entry[least]),
                int(ledger[0]),
                int(entry[0]),
                int(ledger[-1]),
                int(entry[-1]),
            )
        ]
        self._encode_due((due - min_due) >> self._shift, parts)
        self._encode_column(step, parts)
        self._encode_column(gap, parts)
        return b"".join(parts)

    def _encode_due(self, offset: Int64s, parts: list[bytes]) -> None:
        """Encode differences if many are zero or none is negative, otherwise plain offsets."""
        change = np.zeros_like(offset)
        np.subtract(offset[1:], offset[:-1], out=change[1:])
        steady = offset.size - np.count_nonzero(change) > offset.size // 4 or change.min() >= 0
        parts.append(_STEADY if steady else _SPREAD)
        if steady:
            # Zigzag encoding: small differences of either sign become small positive numbers.
            parts.append(_FIRST.pack(int(offset[0])))
            offset = (change << 1) ^ (change >> 63)
        self._encode_column(offset, parts)

    def _decode_due(self, chunk: bytes, info: ChunkInfo) -> tuple[Int64s, int]:
        at = _HEADER.size
        steady = chunk[at : at + 1] == _STEADY
        if not steady:
            offset, at = self._decode_column(chunk, at + 1, info.rows)
        else:
            change, end = self._decode_column(chunk, at + 1 + _FIRST.size, info.rows)
            offset = ((change >> 1) ^ -(change & 1)).cumsum()
            offset += _FIRST.unpack_from(chunk, at + 1)[0]
            at = end
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
            if bool((plane == plane[0]).all()):
                parts.append(_PLANE.pack(_CONSTANT, int(plane[0])))
                continue
            data = self._compress(plane.tobytes())
            if len(data) < plane.size:
                parts.append(_PLANE.pack(_PACKED, len(data)))
                parts.append(data)
            else:
                parts.append(_PLANE.pack(_RAW, plane.size))
                parts.append(plane.tobytes())

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
                if length:
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
