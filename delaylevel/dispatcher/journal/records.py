"""The records of the journal, their bytes, and positions packed into one integer."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from delaylevel.dispatcher.positions import IdColumns, Mask, small_index
from delaylevel.errors import DelayLevelError, InvalidInputError
from delaylevel.model.position import Position
from delaylevel.structures.rows import Int64s

_MAGIC = b"DLR"
_FORMAT = 1
_FRAME = struct.Struct("<3sBBI")  # magic, version, kind, checksum of the rest
_INT = struct.Struct("<q")
_SIZE = struct.Struct("<I")
_COLUMN = struct.Struct("<IqBB")  # rows, minimum, trailing zero bits, bytes per value
_SAMPLE = 16_384
ENTRY_BITS = 35
#: The highest batch index that has a packed position.
LAST_INDEX = (1 << 10) - 1
_LEDGER_LIMIT = 1 << 28
_ENTRY_LIMIT = 1 << ENTRY_BITS
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

    def text(self, value: str) -> None:
        """Add a string."""
        self.blob(value.encode())

    def texts(self, values: Iterable[str]) -> None:
        """Add strings."""
        found = list(values)
        self.ints(len(found))
        for each in found:
            self.text(each)

    def named(self, values: Mapping[str, int]) -> None:
        """Add strings, and the integer of each."""
        self.texts(values)
        self.ints(*values.values())

    def ids(self, ids: IdColumns) -> None:
        """Add the IDs of messages."""
        self.texts(ids.keys)
        self.column(ids.key_index)
        self.column(ids.numbers)

    def column(self, values: npt.NDArray[np.integer]) -> None:
        """Add integers as offsets from the minimum, without the bits and bytes that none uses."""
        # For positions in due order, which look random to a compressor, this is smaller and faster.
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

    def number(self) -> int:
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

    def text(self) -> str:
        """Return the next string."""
        return self.blob().decode()

    def texts(self) -> tuple[str, ...]:
        """Return the next strings."""
        return tuple(self.text() for _ in range(self.number()))

    def named(self) -> dict[str, int]:
        """Return the next strings with their integers."""
        return {name: self.number() for name in self.texts()}

    def ids(self) -> IdColumns:
        """Return the next IDs."""
        return IdColumns(self.texts(), small_index(self.column()), self.column())

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
    checksum = zlib.crc32(body, zlib.crc32(bytes((_FORMAT, kind))))
    return _FRAME.pack(_MAGIC, _FORMAT, kind, checksum) + body


def unframed(data: bytes) -> tuple[int, Reader]:
    """Return the kind and the body of a record."""
    if len(data) < _FRAME.size or not data.startswith(_MAGIC):
        raise DamagedJournalError(
            f"these {len(data)} bytes are not a journal record; another program wrote to this topic"
        )
    _, version, kind, checksum = _FRAME.unpack_from(data)
    if version != _FORMAT:
        raise DamagedJournalError(
            f"a journal record has format {version}, this is {_FORMAT}: "
            "run a dispatcher that is as new as the one that wrote it"
        )
    body = data[_FRAME.size :]
    if zlib.crc32(body, zlib.crc32(bytes((version, kind)))) != checksum:
        raise DamagedJournalError(f"a journal record of {len(data)} bytes is truncated or changed")
    return kind, Reader(body)


@overload
def pack(ledger: int, entry_id: int) -> int: ...
@overload
def pack(ledger: Int64s, entry_id: Int64s) -> Int64s: ...
def pack(ledger: int | Int64s, entry_id: int | Int64s) -> int | Int64s:
    """Pack each position into one integer. Integers compare as the positions do.

    Args:
        ledger: ledger ID below 2^28; an integer, or shape (n,).
        entry_id: entry << 10 | batch index (0 if not batched), below 2^35; an integer, or shape
            (n,).

    Raises:
        InvalidInputError: a position does not fit; two messages would have the same integer.
    """
    ledgers, entries = np.asarray(ledger, dtype=np.int64), np.asarray(entry_id, dtype=np.int64)
    bad = (ledgers < 0) | (ledgers >= _LEDGER_LIMIT) | (entries < 0) | (entries >= _ENTRY_LIMIT)
    if bad.any():
        index = int(np.argmax(bad))
        one, other = int(ledgers.flat[index]), int(entries.flat[index])
        raise InvalidInputError(
            f"position {one}:{other >> 10}:{other & 1023} does not fit 63 bits (ledger below 2^28, "
            "entry below 2^25, at most 1,024 messages in a batch): the dispatcher cannot read this "
            "window topic; create a new one"
        )
    packed = ledgers << ENTRY_BITS | entries
    return packed if isinstance(ledger, np.ndarray) else int(packed)


def pack_message(position: Position) -> int:
    """Pack the position of a message; those behind LAST_INDEX of a batch have the one of that."""
    return pack(position.ledger, position.entry << 10 | min(max(position.batch, 0), LAST_INDEX))


def unpack(positions: Int64s) -> tuple[Int64s, Int64s]:
    """Return the ledger IDs and the entry IDs of packed positions, shape (n,) each."""
    return positions >> ENTRY_BITS, positions & (_ENTRY_LIMIT - 1)


def entry_of(position: int) -> Position:
    """Return the entry that holds a packed position."""
    return Position(position >> ENTRY_BITS, (position & (_ENTRY_LIMIT - 1)) >> 10)


class Released(NamedTuple):
    """Batches without intents, all of whose messages are published, set aside or dropped.

    Attributes:
        held: packed positions of the messages whose IDs are not remembered, as in a `Commit`.
    """

    positions: Int64s
    ids: IdColumns
    held: Int64s


#: The first sequence ID in an intent of messages that an earlier owner may still send.
UNCERTAIN = -1


class Intent(NamedTuple):
    """The messages of a batch that is about to be published with sequence IDs.

    Attributes:
        positions: packed positions in the order of sending, shape (n,).
        ids: remembered once the messages are released.
        target: name of the target's producer; empty if nothing is sent.
        first: sequence ID of the first message; it rises by one from message to message. 0 if all
            messages are set aside, and UNCERTAIN if an earlier owner may still send them.
    """

    number: int
    positions: Int64s
    ids: IdColumns
    target: str = ""
    first: int = 0

    def stored(self, last: int) -> Mask:
        """Return which messages a target has stored whose last sequence ID is this, shape (n,)."""
        stored: Mask = np.arange(self.positions.size) <= last - self.first
        return stored if self.target else np.zeros_like(stored)


class Commit(NamedTuple):
    """The confirmation of all messages of an intent.

    Attributes:
        held: packed positions of the messages whose IDs are not remembered, because they are dead
            letters and may be replayed, shape (k,).
    """

    number: int
    held: Int64s


class Resolved(NamedTuple):
    """The outcome of an intent without a commit; the messages not listed are pending again.

    Attributes:
        released: packed positions of the messages that the broker has stored, shape (k,).
    """

    number: int
    released: Int64s


class LowWatermark(NamedTuple):
    """The packed position below which everything is released."""

    position: int


class Refused(NamedTuple):
    """Messages that their target has certainly not stored, and that are set aside instead.

    Only with deduplication. It is confirmed before a later sequence ID is sent to the target, and
    before the messages are stored elsewhere. After a takeover they are set aside again, and not
    published.

    Attributes:
        positions: packed positions of the messages, shape (k,).
    """

    positions: Int64s


class Paused(NamedTuple):
    """The paused targets with messages that wait for the end of their pause; it replaces the last.

    It is confirmed before a message is sent to a target that it lists no longer.

    Attributes:
        targets: due time up to which messages may have been sent to each target, by its name, ms
            since the epoch.
    """

    targets: Mapping[str, int]


class DispositionKind(IntEnum):
    """The reason for which a message is not published. The numbers are stored."""

    CANCELLED = 1
    HELD = 2
    DROPPED = 3
    EXPIRED = 4


class Disposition(NamedTuple):
    """Messages that are not published.

    A cancelled message was pending, and has no other record: its ID is enough to drop it. Of the
    others, the Released or Commit record follows.

    Attributes:
        until: packed position above that of all messages, if they are cancelled; otherwise 0. Their
            IDs are kept until the low watermark is there.
    """

    kind: DispositionKind
    until: int
    ids: IdColumns


class Answered(NamedTuple):
    """Cancellations whose outcomes the outcomes topic has confirmed: released, without IDs.

    Attributes:
        positions: packed positions of the cancellations, shape (k,).
    """

    positions: Int64s


class SnapshotChunk(NamedTuple):
    """Part ``part`` of ``parts`` of the snapshot with the number ``serial``; the first one is 0."""

    serial: int
    part: int
    parts: int
    data: bytes


Record: TypeAlias = (
    Released
    | Intent
    | Commit
    | Resolved
    | LowWatermark
    | Refused
    | Paused
    | Disposition
    | Answered
    | SnapshotChunk
)
# How to write and to read a field.
_Field: TypeAlias = "tuple[Callable[[Writer, Any], None], Callable[[Reader], Any]]"
_NUMBER: _Field = Writer.ints, Reader.number
_COLUMN_OF: _Field = Writer.column, Reader.column
_IDS: _Field = Writer.ids, Reader.ids
_REASON: _Field = Writer.ints, lambda reader: DispositionKind(reader.number())
#: The fields of each kind of record. The numbers of the kinds are stored.
_LAYOUTS: Mapping[int, tuple[Callable[..., Record], tuple[_Field, ...]]] = {
    1: (Intent, (_NUMBER, _COLUMN_OF, _IDS, (Writer.text, Reader.text), _NUMBER)),
    2: (Commit, (_NUMBER, _COLUMN_OF)),
    3: (Resolved, (_NUMBER, _COLUMN_OF)),
    4: (LowWatermark, (_NUMBER,)),
    5: (SnapshotChunk, (_NUMBER, _NUMBER, _NUMBER, (Writer.blob, Reader.blob))),
    6: (Refused, (_COLUMN_OF,)),
    7: (Released, (_COLUMN_OF, _IDS, _COLUMN_OF)),
    8: (Disposition, (_REASON, _NUMBER, _IDS)),
    9: (Answered, (_COLUMN_OF,)),
    10: (Paused, ((Writer.named, Reader.named),)),
}
_KINDS = {record: kind for kind, (record, _) in _LAYOUTS.items()}


def encode(record: Record) -> bytes:
    """Return a record's bytes."""
    kind, writer = _KINDS[type(record)], Writer()
    for (write, _), value in zip(_LAYOUTS[kind][1], record, strict=True):
        write(writer, value)
    return framed(kind, writer.body())


def decode(data: bytes) -> Record:
    """Return the record from its bytes, or raise DamagedJournalError."""
    kind, reader = unframed(data)
    if kind not in _LAYOUTS:
        raise DamagedJournalError(f"a journal record has the unknown kind {kind}")
    record, fields = _LAYOUTS[kind]
    try:
        return record(*(read(reader) for _, read in fields))
    except (struct.error, ValueError, zlib.error) as error:
        raise DamagedJournalError(f"a journal record cannot be read: {error}") from error
