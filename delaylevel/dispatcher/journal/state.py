"""The release log of a dispatcher: its records, and the state that they add up to."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable

import numpy as np
from pyroaring import BitMap64

from delaylevel.dispatcher.ids import Mask, contained, save_ids, to_array
from delaylevel.structures.deduplicator import DamagedSnapshotError, Deduplicator

from .codec import DamagedLogError, Int64s, Reader, Writer
from .records import (
    Commit,
    Intent,
    LowWatermark,
    Record,
    Resolved,
    SnapshotChunk,
    decode,
    encode,
    pack,
    unpack,
)

__all__ = [
    "Commit",
    "DamagedLogError",
    "Intent",
    "JournalState",
    "LowWatermark",
    "Record",
    "Resolved",
    "SnapshotChunk",
    "decode",
    "encode",
    "pack",
    "unpack",
]

_CHUNK_BYTES = 900_000


class JournalState:
    """What is released, from the records of a log in their order.

    The dispatcher that runs applies each record as it writes it; the next one reads them again.
    Both come to the same state.

    Attributes:
        mark: every position below this packed one is released.
        released: packed positions from the mark on that are released.
        memory: ids of released messages, of those that were not held.
        unfinished: intents without their done, by number.
        next_number: the lowest that no intent has had.
        sequences: the next sequence id of each outlet.
    """

    def __init__(self, capacity: int = 100_000_000) -> None:
        """Begin with nothing released.

        Args:
            capacity: the most ids that ``memory`` holds for one key; even, from 2.

        Raises:
            InvalidInputError: the capacity is odd or below 2.
        """
        self.mark = 0
        self.released = BitMap64()
        self.memory = Deduplicator(capacity)
        self.unfinished: dict[int, Intent] = {}
        self.next_number = 0
        self.sequences: dict[str, int] = {}
        self._highest = -1  # of what was released; a bitmap does not say it cheaply
        self._serial = 0

    @classmethod
    def read(cls, records: Iterable[bytes], capacity: int = 100_000_000) -> JournalState:
        """Fold a log that begins at its first record, or anywhere before a whole snapshot.

        A snapshot that was not written to its end is passed over. A whole one stands for all that
        came before its first part; what was written between its parts comes after it.

        Args:
            records: the records' bytes, in the order of the log.
            capacity: as for the class.

        Raises:
            DamagedLogError: a record is not as it was written.
        """
        state = cls(capacity)
        parts: list[bytes] = []
        since: list[Record] = []
        serial = highest = -1
        for data in records:
            record = decode(data)
            if not isinstance(record, SnapshotChunk):
                state.apply(record)
                if parts:
                    since.append(record)
                continue
            highest = max(highest, record.serial)
            if record.index == 0:
                parts, since, serial = [], [], record.serial
            elif record.serial != serial or record.index != len(parts):
                parts, since = [], []  # its beginning is missing
                continue
            parts.append(record.data)
            if len(parts) == record.count:
                state = cls(capacity)
                state._load(b"".join(parts))
                for each in since:
                    state.apply(each)
                parts, since = [], []
        state._serial = max(state._serial, highest + 1)
        return state

    def apply(self, record: Record) -> None:
        """Take in one record; a snapshot's part changes nothing, ``read`` puts them together."""
        if isinstance(record, Intent):
            self.unfinished[record.number] = record
            self.next_number = max(self.next_number, record.number + 1)
            for name, following in record.next_sequences().items():
                self.sequences[name] = max(self.sequences.get(name, 1), following)
        elif isinstance(record, Commit):
            self._finish(record.number, record.held, None)
        elif isinstance(record, Resolved):
            self._finish(record.number, None, record.released)
        elif isinstance(record, LowWatermark):
            self.mark = max(self.mark, record.position)
            self.released.remove_range(0, self.mark)

    def is_released(self, positions: Int64s) -> Mask:
        """Return which packed positions are released.

        Args:
            positions: shape (n,), in any order.
        """
        released: Mask = positions < self.mark
        ask = np.flatnonzero(~released & (positions <= self._highest))
        if ask.size and self.released:
            some, inverse = np.unique(positions[ask], return_inverse=True)
            released[ask] = contained(self.released, some)[inverse]
        return released

    def snapshot(self) -> list[bytes]:
        """Return the whole state as records, to be appended in their order.

        Records that are made while they are appended may lie between them, older ones may not.
        """
        writer = Writer()
        writer.ints(self.mark, self.next_number, self._highest)
        writer.squeezed(self.released.serialize())
        keys = [key for key in self.memory.keys() if self.memory.count(key)]  # noqa: SIM118
        writer.texts(keys)
        for key in keys:
            writer.squeezed(self.memory.snapshot(key))
        writer.ints(len(self.unfinished))
        for intent in self.unfinished.values():
            writer.blob(encode(intent))
        writer.texts(self.sequences)
        writer.ints(*self.sequences.values())
        data = writer.body()
        cuts = range(0, len(data), _CHUNK_BYTES)
        serial, self._serial = self._serial, self._serial + 1
        return [
            encode(SnapshotChunk(serial, index, len(cuts), data[start : start + _CHUNK_BYTES]))
            for index, start in enumerate(cuts)
        ]

    def _load(self, data: bytes) -> None:
        reader = Reader(data)
        try:
            self.mark, self.next_number, self._highest = (reader.int() for _ in range(3))
            self.released = BitMap64.deserialize(reader.squeezed())
            for key in reader.texts():
                self.memory.restore(reader.squeezed(), key)
            for _ in range(reader.int()):
                intent = decode(reader.blob())
                assert isinstance(intent, Intent)
                self.unfinished[intent.number] = intent
            names = reader.texts()
            self.sequences = {name: reader.int() for name in names}
        except (struct.error, ValueError, zlib.error, DamagedSnapshotError) as error:
            raise DamagedLogError(f"a snapshot in the release log is damaged: {error}") from error

    def _finish(self, number: int, held: Int64s | None, released: Int64s | None) -> None:
        """Close an intent: ``released`` of it are, or all; those ``held`` leave no id behind."""
        intent = self.unfinished.pop(number, None)
        if intent is None:
            return  # it lies before the log's beginning, and before a snapshot that follows
        positions, key_index, ids = intent.positions, intent.key_index, intent.ids
        keep = None
        if released is not None:
            keep = np.isin(positions, released)
            positions, key_index, ids = positions[keep], key_index[keep], ids[keep]
        if positions.size:
            self._highest = max(self._highest, int(positions.max()))
        above = positions[positions >= self.mark] if self.mark else positions
        self.released.update(to_array(above))
        if held is not None and held.size:
            keep = ~np.isin(positions, held)
            key_index, ids = key_index[keep], ids[keep]
        save_ids(self.memory, intent.id_keys, key_index, ids)
