"""The records of the journal, and their bytes."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from delaylevel.errors import DelayLevelError
from delaylevel.model.position import Position
from delaylevel.structures.id_columns import IdColumns
from delaylevel.structures.positions import ENTRY_BITS, ENTRY_MASK, LAST_INDEX, pack
from delaylevel.structures.rows import Int64s, small_index

_MAGIC = b"DLR"
_FORMAT = 4
_FRAME = struct.Struct("<3sBBI")  # magic, version, kind, checksum of the rest
_SIZE = struct.Struct("<I")
_COLUMN = struct.Struct("<IqBB")  # rows, minimum, trailing zero bits, bytes per value
# What stands in the text for an array or bytes. No name of a target is the same.
_ARRAY, _BYTES = "column", "binary"


def packed_values(value: Any) -> bytes:
    """Return the bytes of a value: JSON, and behind it the arrays and bytes that are in it."""
    parts: list[bytes] = []

    def keep(each: Any) -> dict[str, int]:
        is_array = isinstance(each, np.ndarray)
        parts.append(_packed_column(each) if is_array else each)
        return {_ARRAY if is_array else _BYTES: len(parts[-1])}

    text = json.dumps(value, default=keep, separators=(",", ":")).encode()
    return b"".join((_SIZE.pack(len(text)), text, *parts))


def unpacked_values(data: bytes) -> Any:
    """Return the value that `packed_values` was called with; tuples come back as lists."""
    (size,) = _SIZE.unpack_from(data)
    start = at = _SIZE.size + size

    def take(each: dict[str, Any]) -> Any:
        # The parts lie in the order of the text, in which JSON calls this for the innermost ones.
        nonlocal at
        if each.keys() not in ({_ARRAY}, {_BYTES}):
            return each
        ((kind, length),) = each.items()
        part, at = data[at : at + length], at + length
        return _unpacked_column(part) if kind == _ARRAY else part

    return json.loads(data[_SIZE.size : start], object_hook=take)


def _packed_column(values: npt.NDArray[np.integer]) -> bytes:
    """Return integers as offsets from the minimum, without the bits and bytes that none uses."""
    # For positions in due order, which look random to a compressor, this is smaller and faster.
    column = values.astype(np.int64, copy=False)
    if not column.size:
        return b""
    minimum = int(column.min())
    offsets = (column - minimum).view(np.uint64)
    used = int(np.bitwise_or.reduce(offsets))
    shift = (used & -used).bit_length() - 1 if used else 0
    width = ((used >> shift).bit_length() + 7) // 8
    planes = (offsets >> np.uint64(shift)).astype("<u8").view(np.uint8).reshape(-1, 8)
    packed: bytes = planes[:, :width].tobytes()
    return _COLUMN.pack(column.size, minimum, shift, width) + packed


def _unpacked_column(data: bytes) -> Int64s:
    if not data:
        return np.zeros(0, dtype=np.int64)
    size, minimum, shift, width = _COLUMN.unpack_from(data)
    planes = np.zeros((size, 8), dtype=np.uint8)
    planes[:, :width] = np.frombuffer(data, np.uint8, offset=_COLUMN.size).reshape(size, width)
    offsets = planes.view("<u8").reshape(-1).astype(np.int64)
    values: Int64s = (offsets << shift) + minimum
    return values


def pack_message(position: Position) -> int:
    """Pack the position of a message; those behind LAST_INDEX of a batch have the one of that."""
    entry_id = position.entry << 10 | min(max(position.batch, 0), LAST_INDEX)
    return int(pack(np.array([position.ledger]), np.array([entry_id]))[0])


def entry_of(position: int) -> Position:
    """Return the entry that holds a packed position."""
    return Position(position >> ENTRY_BITS, (position & ENTRY_MASK) >> 10)


class Released(NamedTuple):
    """Batches without intents, all of whose messages are published, set aside or dropped.

    Or cancellations whose outcomes the outcomes topic has confirmed; then without IDs.
    """

    positions: Int64s
    ids: IdColumns
    held: Int64s  # as in a `Commit`


#: The first sequence ID in an intent of messages that an earlier owner may still send.
UNCERTAIN = -1


class Intent(NamedTuple):
    """The messages of a batch that is about to be published with sequence IDs."""

    number: int
    positions: Int64s  # in the order of sending
    ids: IdColumns  # remembered once the messages are released
    target: str = ""  # name of the target's producer; empty if nothing is sent
    # Sequence ID of the first message; it rises by one from message to message. 0 if all messages
    # are set aside, and UNCERTAIN if an earlier owner may still send them.
    first: int = 0


class Commit(NamedTuple):
    """The end of an intent: its messages are released, or pending again after a takeover."""

    number: int
    # Positions of messages whose IDs are not remembered: dead letters, which may be replayed.
    held: Int64s
    # Positions of the messages that the broker had stored at a takeover; None if all are released.
    stored: Int64s | None = None


class LowWatermark(NamedTuple):
    """The packed position below which everything is released."""

    position: int


class Refused(NamedTuple):
    """Messages that their target has certainly not stored, and that are set aside instead.

    Only with deduplication. It is confirmed before a later sequence ID is sent to the target, and
    before the messages are stored elsewhere. After a takeover they are set aside again, and not
    published.
    """

    positions: Int64s


class Paused(NamedTuple):
    """The begin or the end of the time in which messages wait for the end of their target's pause.

    An end is confirmed before a message of the target is sent or set aside.
    """

    # Due time up to which messages may have been sent, by target, in ms; None at the end.
    targets: Mapping[str, int | None]


#: The reason for which a message is not published; the last three are also counters.
DispositionKind = Literal["cancelled", "held", "dropped", "expired"]
#: Those of messages that a target, its absence or their expiry has kept back.
NOT_PUBLISHED: tuple[DispositionKind, ...] = ("held", "dropped", "expired")


class Disposition(NamedTuple):
    """Messages that are not published.

    A cancelled message was pending, and has no other record: its ID is enough to drop it. Of the
    others, the Released or Commit record follows.
    """

    kind: DispositionKind
    # Position above those of cancelled messages, whose IDs are kept until the low watermark is
    # there; 0 for others.
    until: int
    ids: IdColumns


class SnapshotChunk(NamedTuple):
    """Part ``part`` of ``parts`` of the snapshot with the number ``serial``; the first one is 0."""

    serial: int
    part: int
    parts: int
    data: bytes


Record: TypeAlias = (
    Released | Intent | Commit | LowWatermark | Refused | Paused | Disposition | SnapshotChunk
)
#: The kinds of records. The numbers are stored.
_KINDS: Mapping[int, type[Any]] = {
    1: Intent,
    2: Commit,
    3: LowWatermark,
    4: SnapshotChunk,
    5: Refused,
    6: Released,
    7: Disposition,
    8: Paused,
}
_NUMBERS = {record: kind for kind, record in _KINDS.items()}


def encode(record: Record) -> bytes:
    """Return a record's bytes: magic, version, kind, checksum, and the fields."""
    kind, body = _NUMBERS[type(record)], packed_values(record)
    return _FRAME.pack(_MAGIC, _FORMAT, kind, _checksum(kind, body)) + body


def decode(data: bytes) -> Record:
    """Return the record from its bytes, or raise a DelayLevelError."""
    if len(data) < _FRAME.size or not data.startswith(_MAGIC):
        raise DelayLevelError(
            f"these {len(data)} bytes are not a journal record; another program wrote to this topic"
        )
    _, version, kind, checksum = _FRAME.unpack_from(data)
    if version != _FORMAT:
        raise DelayLevelError(
            f"a journal record has format {version}, this is {_FORMAT}: "
            "run a dispatcher of the version that wrote it"
        )
    body = data[_FRAME.size :]
    if kind not in _KINDS or checksum != _checksum(kind, body):
        raise DelayLevelError(f"a journal record of {len(data)} bytes is truncated or changed")
    fields = dict(zip(_KINDS[kind]._fields, unpacked_values(body), strict=True))
    if "ids" in fields:
        keys, index, numbers = fields["ids"]
        fields["ids"] = IdColumns(tuple(keys), small_index(index), numbers)
    record: Record = _KINDS[kind](**fields)
    return record


def _checksum(kind: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(bytes((_FORMAT, kind))))
