"""The bytes of one journal record: a frame with a checksum, and columns inside."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from delaylevel.errors import DelayLevelError
from delaylevel.structures.rows import Int64s

_MAGIC = b"DLR"
_VERSION = 1
_FRAME = struct.Struct("<3sBBI")  # magic, version, kind, checksum of the rest
_INT = struct.Struct("<q")
_SIZE = struct.Struct("<I")
_COLUMN = struct.Struct("<IqBB")  # rows, minimum, trailing zero bits, bytes per value
_SAMPLE = 16_384
_PLAIN, _PACKED = b"\0", b"\1"


class DamagedJournalError(DelayLevelError):
    """A journal record that is truncated, changed, or not a record at all."""


class Writer:
    """Builder of the body of one record."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def ints(self, *values: int) -> None:
        """Add 64-bit integers."""
        self._parts += [_INT.pack(value) for value in values]

    def blob(self, data: bytes) -> None:
        """Add bytes, preceded by their length."""
        self._parts += [_SIZE.pack(len(data)), data]

    def compressed(self, data: bytes) -> None:
        """Add bytes, compressed if a sample of them shows a gain."""
        middle = max(0, len(data) // 2 - _SAMPLE // 2)
        sample = data[middle : middle + _SAMPLE]
        if len(zlib.compress(sample, 1)) < len(sample) * 9 // 10:
            self.blob(_PACKED + zlib.compress(data, 1))
        else:
            self.blob(_PLAIN + data)

    def texts(self, values: Iterable[str]) -> None:
        """Add strings."""
        found = [value.encode() for value in values]
        self.ints(len(found))
        for each in found:
            self.blob(each)

    def column(self, values: npt.NDArray[np.integer]) -> None:
        """Add integers as offsets from the minimum, without the bits and bytes that none uses.

        For positions in due order, which look random to a compressor, this is smaller and faster.
        """
        column = values.astype(np.int64, copy=False)
        if not column.size:
            self._parts.append(_COLUMN.pack(0, 0, 0, 0))
            return
        minimum = int(column.min())
        offsets = (column - minimum).view(np.uint64)
        used = int(np.bitwise_or.reduce(offsets))
        shift = (used & -used).bit_length() - 1 if used else 0
        width = ((used >> shift).bit_length() + 7) // 8
        planes = (offsets >> np.uint64(shift)).astype("<u8").view(np.uint8).reshape(-1, 8)
        self._parts.append(_COLUMN.pack(column.size, minimum, shift, width))
        self._parts.append(np.ascontiguousarray(planes[:, :width]).tobytes())

    def body(self) -> bytes:
        """Return everything that was added, without a frame."""
        return b"".join(self._parts)


class Reader:
    """Parser of a body, in the order in which it was written."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise DamagedJournalError(f"a record of {len(self._data)} bytes ends in the middle")
        part = self._data[self._at : end]
        self._at = end
        return part

    @property
    def at_end(self) -> bool:
        """True if everything is read."""
        return self._at == len(self._data)

    def int(self) -> int:
        """Return the next integer."""
        value: int = _INT.unpack(self._take(_INT.size))[0]
        return value

    def blob(self) -> bytes:
        """Return the next bytes."""
        return self._take(_SIZE.unpack(self._take(_SIZE.size))[0])

    def compressed(self) -> bytes:
        """Return the next bytes that `Writer.compressed` added."""
        data = self.blob()
        return zlib.decompress(data[1:]) if data[:1] == _PACKED else data[1:]

    def texts(self) -> tuple[str, ...]:
        """Return the next strings."""
        return tuple(self.blob().decode() for _ in range(self.int()))

    def column(self) -> Int64s:
        """Return the next column."""
        size, minimum, shift, width = _COLUMN.unpack(self._take(_COLUMN.size))
        planes = np.zeros((size, 8), dtype=np.uint8)
        packed = np.frombuffer(self._take(size * width), dtype=np.uint8)
        planes[:, :width] = packed.reshape(size, width)
        offsets = planes.view("<u8").reshape(-1).astype(np.int64)
        values: Int64s = (offsets << shift) + minimum
        return values


def framed(kind: int, body: bytes) -> bytes:
    """Return the bytes of a record: magic, version, kind, checksum and body."""
    checksum = zlib.crc32(body, zlib.crc32(bytes((_VERSION, kind))))
    return _FRAME.pack(_MAGIC, _VERSION, kind, checksum) + body


def unframed(data: bytes) -> tuple[int, Reader]:
    """Return the kind and the body of a record.

    Raises:
        DamagedJournalError: the bytes are not a record, were changed, or have another version.
    """
    if len(data) < _FRAME.size or not data.startswith(_MAGIC):
        raise DamagedJournalError(
            f"these {len(data)} bytes are not a journal record; another program wrote to this topic"
        )
    _, version, kind, checksum = _FRAME.unpack_from(data)
    if version != _VERSION:
        raise DamagedJournalError(
            f"a journal record has format {version}, this is {_VERSION}: "
            "run a dispatcher that is as new as the one that wrote it"
        )
    body = data[_FRAME.size :]
    if zlib.crc32(body, zlib.crc32(bytes((version, kind)))) != checksum:
        raise DamagedJournalError(f"a journal record of {len(data)} bytes is truncated or changed")
    return kind, Reader(body)
