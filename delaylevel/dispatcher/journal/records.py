"""What a dispatcher writes down of its releases: records and their bytes."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, overload

import numpy as np
import numpy.typing as npt

from delaylevel.dispatcher.ids import Mask
from delaylevel.errors import InvalidInputError

from .codec import DamagedLogError, Int64s, Writer, framed, unframed

ENTRY_BITS = 35
_LEDGER_LIMIT = 1 << 28
_ENTRY_LIMIT = 1 << ENTRY_BITS


@overload
def pack(ledger: int, entry_id: int) -> int: ...
@overload
def pack(ledger: Int64s, entry_id: Int64s) -> Int64s: ...
def pack(ledger: int | Int64s, entry_id: int | Int64s) -> int | Int64s:
    """Pack positions into one integer each, which rises with the position.

    Args:
        ledger: below 2^28; an integer, or shape (n,).
        entry_id: entry << 10 | batch index (0 where it was not batched), below 2^35; likewise.

    Raises:
        InvalidInputError: a position does not fit; two messages would be taken for one.
    """
    if (
        isinstance(ledger, int)
        and isinstance(entry_id, int)
        and 0 <= ledger < _LEDGER_LIMIT
        and 0 <= entry_id < _ENTRY_LIMIT
    ):
        return ledger << ENTRY_BITS | entry_id
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


def unpack(positions: Int64s) -> tuple[Int64s, Int64s]:
    """Return the ledger ids and the entry ids of packed positions, shape (n,) each."""
    return positions >> ENTRY_BITS, positions & (_ENTRY_LIMIT - 1)


class _Record:
    """Records are equal where their bytes are."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and encode(self) == encode(other)  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return hash(encode(self))  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Intent(_Record):
    """What is about to be published: confirmed before the first message is sent.

    Attributes:
        number: of the batch.
        positions: packed, in the order of sending, shape (n,).
        id_keys: the distinct keys of the ids; ``""`` for ids that are not remembered.
        key_index: for each message the index of its key, shape (n,).
        ids: what is remembered of each once it is released, shape (n,).
        outlets: name and first sequence id of each producer that takes part. Within one the
            sequence ids rise by one, in the order of the arrays. Empty without deduplication.
        outlet_index: for each message the index of its outlet, or ``len(outlets)`` where it will
            not be published but set aside, shape (n,); empty without deduplication.
    """

    number: int
    positions: Int64s
    id_keys: tuple[str, ...]
    key_index: npt.NDArray[np.integer]
    ids: Int64s
    outlets: tuple[tuple[str, int], ...] = ()
    outlet_index: npt.NDArray[np.integer] = field(
        default_factory=lambda: np.empty(0, dtype=np.uint16)
    )

    def __post_init__(self) -> None:
        size = self.positions.size
        counted = self.outlet_index.size
        if not size == self.key_index.size == self.ids.size or (
            counted != size and (counted or self.outlets)
        ):
            raise InvalidInputError(
                "positions, key_index, ids, and outlet_index where there are outlets, must have "
                f"one length, not {size}, {self.key_index.size}, {self.ids.size} and "
                f"{counted}"
            )
        for index, count in (
            (self.key_index, len(self.id_keys)),
            (self.outlet_index, len(self.outlets) + 1),
        ):
            if index.size and not 0 <= int(index.min()) <= int(index.max()) < count:
                raise InvalidInputError(f"an index of an intent is not below {count}")

    def sequence_ids(self) -> Int64s:
        """Return the sequence id of each message, shape (n,); 0 where it has no outlet."""
        found = np.zeros(self.positions.size, dtype=np.int64)
        for index, (_, first) in enumerate(self.outlets):
            where = np.flatnonzero(self.outlet_index == index)
            found[where] = first + np.arange(where.size)
        return found

    def stored(self, last: Mapping[str, int]) -> Mask:
        """Return which messages are stored, by the last sequence id of each outlet.

        Args:
            last: as the broker reports it, for a producer whose sends were confirmed in order; an
                outlet that is missing has stored nothing.
        """
        if not self.outlets:
            return np.zeros(self.positions.size, dtype=np.bool_)
        lasts = np.array([*(last.get(name, -1) for name, _ in self.outlets), -1], dtype=np.int64)
        mask: Mask = self.sequence_ids() <= lasts[self.outlet_index]
        return mask

    def next_sequences(self) -> dict[str, int]:
        """Return for each outlet the sequence id after its last one here."""
        outlets = len(self.outlets)
        counts = np.bincount(self.outlet_index, minlength=outlets).tolist()[:outlets]
        return {
            name: first + count for (name, first), count in zip(self.outlets, counts, strict=True)
        }


@dataclass(frozen=True, eq=False)
class Commit(_Record):
    """All of an intent is confirmed.

    Attributes:
        number: the intent's.
        held: packed positions of what was set aside in the held topic instead, shape (k,).
    """

    number: int
    held: Int64s


@dataclass(frozen=True, eq=False)
class Resolved(_Record):
    """Of an intent that has no done, this was found stored; the rest is pending again.

    Attributes:
        number: the intent's.
        released: packed positions, shape (k,).
    """

    number: int
    released: Int64s


@dataclass(frozen=True, eq=False)
class LowWatermark(_Record):
    """Everything below this packed position is released."""

    position: int


@dataclass(frozen=True, eq=False)
class SnapshotChunk(_Record):
    """A part of a whole state.

    Attributes:
        serial: of the snapshot.
        index, count: which part, of how many.
        data: its bytes.
    """

    serial: int
    index: int
    count: int
    data: bytes


Record: TypeAlias = "Intent | Commit | Resolved | LowWatermark | SnapshotChunk"
_INTENT, _DONE, _SETTLED, _MARK, _CHUNK = range(1, 6)


def encode(record: Record) -> bytes:
    """Return a record's bytes."""
    writer = Writer()
    if isinstance(record, Intent):
        kind = _INTENT
        writer.ints(record.number)
        writer.texts(record.id_keys)
        writer.texts(name for name, _ in record.outlets)
        writer.ints(*(first for _, first in record.outlets))
        for column in (record.positions, record.key_index, record.ids, record.outlet_index):
            writer.column(column)
    elif isinstance(record, Commit):
        kind = _DONE
        writer.ints(record.number)
        writer.column(record.held)
    elif isinstance(record, Resolved):
        kind = _SETTLED
        writer.ints(record.number)
        writer.column(record.released)
    elif isinstance(record, LowWatermark):
        kind = _MARK
        writer.ints(record.position)
    else:
        kind = _CHUNK
        writer.ints(record.serial, record.index, record.count)
        writer.blob(record.data)
    return framed(kind, writer.body())


def decode(data: bytes) -> Record:
    """Return the record that some bytes hold.

    Raises:
        DamagedLogError: they are not one, or not as they were written.
    """
    kind, reader = unframed(data)
    try:
        if kind == _INTENT:
            number, keys, names = reader.int(), reader.texts(), reader.texts()
            outlets = tuple((name, reader.int()) for name in names)
            positions, key_index, ids, outlet_index = (reader.column() for _ in range(4))
            return Intent(
                number, positions, keys, _small(key_index), ids, outlets, _small(outlet_index)
            )
        if kind == _DONE:
            return Commit(reader.int(), reader.column())
        if kind == _SETTLED:
            return Resolved(reader.int(), reader.column())
        if kind == _MARK:
            return LowWatermark(reader.int())
        if kind == _CHUNK:
            return SnapshotChunk(reader.int(), reader.int(), reader.int(), reader.blob())
    except (struct.error, ValueError, zlib.error) as error:
        raise DamagedLogError(f"a record of the release log cannot be read: {error}") from error
    raise DamagedLogError(f"a record of the release log is of an unknown kind, {kind}")


def _small(index: Int64s) -> npt.NDArray[np.integer]:
    return index.astype(np.uint16 if not index.size or int(index.max()) < 1 << 16 else np.uint32)
