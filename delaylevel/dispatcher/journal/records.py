"""The records of the journal, their bytes, and positions packed into one integer."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias, overload

import numpy as np
import numpy.typing as npt

from delaylevel.dispatcher.positions import Mask
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
Record: TypeAlias = (
    "Released | Intent | Commit | Resolved | LowWatermark | Refused | Paused | Disposition "
    "| Answered | SnapshotChunk"
)


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


class _Record:
    """Base class: records with the same bytes are equal."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and encode(self) == encode(other)  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return hash(encode(self))  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Released(_Record):
    """Batches without intents, all of whose messages are published, set aside or dropped.

    Attributes:
        id_keys: distinct keys of the IDs; ``""`` for IDs that are not remembered.
        key_index: index of each message's key, shape (n,).
        ids: ID of each message, shape (n,).
        held: packed positions of the messages whose IDs are not remembered, as in a `Commit`.
    """

    positions: Int64s
    id_keys: tuple[str, ...]
    key_index: npt.NDArray[np.integer]
    ids: Int64s
    held: Int64s

    def __post_init__(self) -> None:
        _check_columns(self.positions, self.id_keys, self.key_index, self.ids)


def _check_columns(
    positions: Int64s, id_keys: tuple[str, ...], key_index: npt.NDArray[np.integer], ids: Int64s
) -> None:
    if not positions.size == key_index.size == ids.size:
        raise InvalidInputError(
            "positions, key_index and ids must have one length, not "
            f"{positions.size}, {key_index.size} and {ids.size}"
        )
    _check_index(key_index, len(id_keys))


def _check_index(index: npt.NDArray[np.integer], count: int) -> None:
    if index.size and not 0 <= int(index.min()) <= int(index.max()) < count:
        raise InvalidInputError(f"an index of a batch is not below {count}")


@dataclass(frozen=True, eq=False)
class Intent(_Record):
    """The messages of a batch that is about to be published with sequence IDs.

    Attributes:
        positions: packed positions in the order of sending, shape (n,).
        id_keys, key_index, ids: as in a `Released`; remembered once the messages are released.
        targets: name and first sequence ID of each target's producer. Within a target the
            sequence IDs rise by one, in the order of the arrays. Empty if nothing is sent.
        target_index: index of each message's target, or ``len(targets)`` for a message that is set
            aside instead, shape (n,); empty if an earlier owner may still send the messages.
    """

    number: int
    positions: Int64s
    id_keys: tuple[str, ...]
    key_index: npt.NDArray[np.integer]
    ids: Int64s
    targets: tuple[tuple[str, int], ...] = ()
    target_index: npt.NDArray[np.integer] = field(
        default_factory=lambda: np.empty(0, dtype=np.uint16)
    )

    def __post_init__(self) -> None:
        _check_columns(self.positions, self.id_keys, self.key_index, self.ids)
        _check_index(self.target_index, len(self.targets) + 1)
        size, counted = self.positions.size, self.target_index.size
        if counted != size and (counted or self.targets):
            raise InvalidInputError(
                f"target_index must have the length of positions, {size}, not {counted}"
            )

    def sequence_ids(self) -> Int64s:
        """Return the sequence ID of each message, shape (n,); 0 for one without a target."""
        found = np.zeros(self.positions.size, dtype=np.int64)
        for index, (_, first) in enumerate(self.targets):
            where = np.flatnonzero(self.target_index == index)
            found[where] = first + np.arange(where.size)
        return found

    def stored(self, last: Mapping[str, int]) -> Mask:
        """Return which messages the broker has stored, shape (n,).

        Args:
            last: last stored sequence ID by target name. A target that is missing here has stored
                nothing.
        """
        if not self.targets:
            return np.zeros(self.positions.size, dtype=np.bool_)
        lasts = np.array([*(last.get(name, -1) for name, _ in self.targets), -1], dtype=np.int64)
        mask: Mask = self.sequence_ids() <= lasts[self.target_index]
        return mask

    def next_sequences(self) -> dict[str, int]:
        """Return for each target the sequence ID after the last one of this intent."""
        size = len(self.targets)
        counts = np.bincount(self.target_index, minlength=size).tolist()[:size]
        return {
            name: first + count for (name, first), count in zip(self.targets, counts, strict=True)
        }


@dataclass(frozen=True, eq=False)
class Commit(_Record):
    """The confirmation of all messages of an intent.

    Attributes:
        held: packed positions of the messages whose IDs are not remembered, because they are dead
            letters and may be replayed, shape (k,).
    """

    number: int
    held: Int64s


@dataclass(frozen=True, eq=False)
class Resolved(_Record):
    """The outcome of an intent without a commit; the messages not listed are pending again.

    Attributes:
        released: packed positions of the messages that the broker has stored, shape (k,).
    """

    number: int
    released: Int64s


@dataclass(frozen=True, eq=False)
class LowWatermark(_Record):
    """The packed position below which everything is released."""

    position: int


@dataclass(frozen=True, eq=False)
class Refused(_Record):
    """Messages that their target has certainly not stored, and that are set aside instead.

    Only with deduplication. It is confirmed before a later sequence ID is sent to the target, and
    before the messages are stored elsewhere. After a takeover they are set aside again, and not
    published.

    Attributes:
        positions: packed positions of the messages, shape (k,).
    """

    positions: Int64s


@dataclass(frozen=True, eq=False)
class Paused(_Record):
    """The paused targets with messages that wait for the end of their pause; it replaces the last.

    It is confirmed before a message is sent to a target that it lists no longer.

    Attributes:
        targets: name of each target, and due time up to which messages may have been sent to it, ms
            since the epoch.
    """

    targets: tuple[tuple[str, int], ...]


class DispositionKind(IntEnum):
    """The reason for which a message is not published. The numbers are stored."""

    CANCELLED = 1
    HELD = 2
    DROPPED = 3
    EXPIRED = 4


@dataclass(frozen=True, eq=False)
class Disposition(_Record):
    """Messages that are not published.

    A cancelled message was pending, and has no other record: its ID is enough to drop it. Of the
    others, the Released or Commit record follows.

    Attributes:
        id_keys, key_index, ids: IDs of the messages, as in a `Released`.
        until: packed position above that of all messages, if they are cancelled; otherwise 0. Their
            IDs are kept until the low watermark is there.
    """

    kind: DispositionKind
    id_keys: tuple[str, ...]
    key_index: npt.NDArray[np.integer]
    ids: Int64s
    until: int = 0


@dataclass(frozen=True, eq=False)
class Answered(_Record):
    """Cancellations whose outcomes the outcomes topic has confirmed: released, without IDs.

    Attributes:
        positions: packed positions of the cancellations, shape (k,).
    """

    positions: Int64s


@dataclass(frozen=True, eq=False)
class SnapshotChunk(_Record):
    """Part ``index`` of ``count`` of the snapshot with the number ``serial``."""

    serial: int
    index: int
    count: int
    data: bytes


_INTENT, _COMMIT, _RESOLVED, _LOW_WATERMARK, _CHUNK, _REFUSED = range(1, 7)
_RELEASED, _DISPOSITION, _ANSWERED, _PAUSED = range(7, 11)


def encode(record: Record) -> bytes:
    """Return a record's bytes."""
    writer = Writer()
    if isinstance(record, Released):
        kind = _RELEASED
        writer.texts(record.id_keys)
        for column in (record.positions, record.key_index, record.ids, record.held):
            writer.column(column)
    elif isinstance(record, Intent):
        kind = _INTENT
        writer.ints(record.number)
        writer.texts(record.id_keys)
        writer.texts(name for name, _ in record.targets)
        writer.ints(*(first for _, first in record.targets))
        for column in (record.positions, record.key_index, record.ids, record.target_index):
            writer.column(column)
    elif isinstance(record, Commit):
        kind = _COMMIT
        writer.ints(record.number)
        writer.column(record.held)
    elif isinstance(record, Resolved):
        kind = _RESOLVED
        writer.ints(record.number)
        writer.column(record.released)
    elif isinstance(record, LowWatermark):
        kind = _LOW_WATERMARK
        writer.ints(record.position)
    elif isinstance(record, Refused):
        kind = _REFUSED
        writer.column(record.positions)
    elif isinstance(record, Paused):
        kind = _PAUSED
        writer.texts(name for name, _ in record.targets)
        writer.ints(*(due_ms for _, due_ms in record.targets))
    elif isinstance(record, Disposition):
        kind = _DISPOSITION
        writer.ints(record.kind, record.until)
        writer.texts(record.id_keys)
        writer.column(record.key_index)
        writer.column(record.ids)
    elif isinstance(record, Answered):
        kind = _ANSWERED
        writer.column(record.positions)
    else:
        kind = _CHUNK
        writer.ints(record.serial, record.index, record.count)
        writer.blob(record.data)
    return framed(kind, writer.body())


def decode(data: bytes) -> Record:
    """Return the record from its bytes, or raise DamagedJournalError."""
    kind, reader = unframed(data)
    try:
        if kind == _RELEASED:
            keys = reader.texts()
            positions, key_index, ids, held = (reader.column() for _ in range(4))
            return Released(positions, keys, _small(key_index), ids, held)
        if kind == _INTENT:
            number, keys, names = reader.int(), reader.texts(), reader.texts()
            targets = tuple((name, reader.int()) for name in names)
            positions, key_index, ids, target_index = (reader.column() for _ in range(4))
            return Intent(
                number, positions, keys, _small(key_index), ids, targets, _small(target_index)
            )
        if kind == _COMMIT:
            return Commit(reader.int(), reader.column())
        if kind == _RESOLVED:
            return Resolved(reader.int(), reader.column())
        if kind == _LOW_WATERMARK:
            return LowWatermark(reader.int())
        if kind == _REFUSED:
            return Refused(reader.column())
        if kind == _PAUSED:
            names = reader.texts()
            return Paused(tuple((name, reader.int()) for name in names))
        if kind == _DISPOSITION:
            why, until, keys = DispositionKind(reader.int()), reader.int(), reader.texts()
            return Disposition(why, keys, _small(reader.column()), reader.column(), until)
        if kind == _ANSWERED:
            return Answered(reader.column())
        if kind == _CHUNK:
            return SnapshotChunk(reader.int(), reader.int(), reader.int(), reader.blob())
    except (struct.error, ValueError, zlib.error) as error:
        raise DamagedJournalError(f"a journal record cannot be read: {error}") from error
    raise DamagedJournalError(f"a journal record has the unknown kind {kind}")


def _small(index: Int64s) -> npt.NDArray[np.integer]:
    return index.astype(np.uint16 if not index.size or int(index.max()) < 1 << 16 else np.uint32)
