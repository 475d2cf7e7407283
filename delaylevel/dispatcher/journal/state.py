"""The state that the records of a journal add up to, and its snapshots."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from delaylevel.dispatcher.record import identity
from delaylevel.errors import DelayLevelError
from delaylevel.structures.deduplicator import DamagedSnapshotError, Deduplicator
from delaylevel.structures.id_columns import IdColumns, Mask, contained, to_array
from delaylevel.structures.rows import Int64s

from .records import (
    NOT_PUBLISHED,
    Commit,
    Disposition,
    Intent,
    LowWatermark,
    Paused,
    Record,
    Refused,
    Released,
    SnapshotChunk,
    decode,
    encode,
    packed_values,
    unpacked_values,
)

Some = TypeVar("Some", bound=Record)
_UNLIMITED = 1 << 62
# A broker takes messages up to 5 MiB by default; some are set to 1 MiB.
_CHUNK_BYTES = 900_000
_LEAST, _SAMPLE = 1_024, 16_384
_PLAIN, _PACKED = b"\0", b"\1"


def _compressed(data: bytes) -> bytes:
    """Return bytes that are compressed if a sample of them shows a gain."""
    if len(data) < _LEAST:
        return _PLAIN + data
    middle = max(0, len(data) // 2 - _SAMPLE // 2)
    sample = data[middle : middle + _SAMPLE]
    if len(zlib.compress(sample, 1)) < len(sample) * 9 // 10:
        return _PACKED + zlib.compress(data, 1)
    return _PLAIN + data


def _decompressed(data: bytes) -> bytes:
    return zlib.decompress(data[1:]) if data[:1] == _PACKED else data[1:]


def _ids_in(memory: Deduplicator) -> dict[str, bytes]:
    """Return the IDs of all keys for a snapshot."""
    keys = memory.keys()
    return {key: _compressed(memory.snapshot(key)) for key in keys}


def _restore(memory: Deduplicator, ids: Mapping[str, bytes]) -> None:
    """Restore the IDs that `_ids_in` returned."""
    for key, data in ids.items():
        memory.restore(_decompressed(data), key)


class CancelledIds:
    """IDs of cancelled messages, in two generations.

    An owner drops a cancelled message by its ID alone, so the ID must not be forgotten before the
    low watermark has passed the message. The older generation is forgotten as a whole, when the low
    watermark has passed all its messages and the current one has half of the capacity.
    """

    def __init__(self, capacity: int) -> None:
        self._half = capacity // 2
        self._current, self._previous = Deduplicator(_UNLIMITED), Deduplicator(_UNLIMITED)
        self._current_until = self._previous_until = 0

    def __len__(self) -> int:
        """Return the number of IDs; one in both generations counts twice."""
        return len(self._current) + len(self._previous)

    def is_duplicate(self, id: int, key: str) -> bool:  # noqa: A002 - as in a Deduplicator
        """Return whether an ID is remembered."""
        return self._current.is_duplicate(id, key) or self._previous.is_duplicate(id, key)

    def are_duplicates(self, ids: npt.ArrayLike, key: str) -> Mask:
        """Return for each ID whether it is remembered, shape (n,)."""
        return self._current.are_duplicates(ids, key) | self._previous.are_duplicates(ids, key)

    def contains(self, message_id: str, target: str, key: str, attempt: int = 0) -> bool:
        """Return True if a message is cancelled; ``attempt`` counts refusals by its target."""
        id_key, number = identity(message_id, target, key, attempt)
        return self.is_duplicate(number, id_key)

    def add(self, record: Disposition, low_watermark: int) -> None:
        """Remember the IDs of a record."""
        if len(self._current) >= self._half and low_watermark >= self._previous_until:
            self._previous, self._previous_until = self._current, self._current_until
            self._current, self._current_until = Deduplicator(_UNLIMITED), 0
        record.ids.save_in(self._current)
        self._current_until = max(self._current_until, record.until)

    def saved(self) -> list[Any]:
        """Return all IDs for a snapshot."""
        generations = self._current, self._previous
        return [self._current_until, self._previous_until, *map(_ids_in, generations)]

    def restore(self, saved: Sequence[Any]) -> None:
        """Restore the IDs that `saved` returned."""
        self._current_until, self._previous_until, current, previous = saved
        _restore(self._current, current)
        _restore(self._previous, previous)


class JournalState:
    """The state of a window partition after a sequence of records, in their order.

    Args:
        capacity: number of IDs to remember for each key, even, and at least 2.
    """

    def __init__(self, capacity: int = 100_000_000) -> None:
        self.low_watermark = 0  # packed position below which everything is released
        self.released = BitMap64()  # packed positions from the low watermark on
        self.memory = Deduplicator(capacity)  # IDs of what is released, but for dead letters
        self.open_intents: dict[int, Intent] = {}
        self.next_number = 0  # above those of all intents
        self.sequences: dict[str, int] = {}  # next sequence ID by target name
        self.refused = BitMap64()  # packed positions of what is set aside, until it is released
        # Paused targets whose messages wait, and the due time up to which messages may have been
        # sent to them, ms since the epoch.
        self.paused: dict[str, int] = {}
        # Due time up to which any owner may have sent messages. No record has it, but the
        # snapshots.
        self.sent_until_ms = 0
        # Twice as many IDs as in the memory for one key, so that none is forgotten earlier.
        self.cancelled = CancelledIds(2 * capacity)
        # IDs of the other messages that were not published, by the reason.
        self.set_aside = {kind: Deduplicator(2 * capacity) for kind in NOT_PUBLISHED}
        self._highest = -1  # highest released position: a bitmap finds its own only slowly
        self._serial = 0

    @classmethod
    def read(
        cls,
        records: Iterable[bytes],
        capacity: int = 100_000_000,
        on_release: Callable[[IdColumns], None] | None = None,
    ) -> JournalState:
        """Return the state after the records of a journal, from its first one or a snapshot on.

        A complete snapshot replaces everything before its first chunk, and records between its
        chunks come after it. An incomplete one is ignored. ``on_release`` is called with the IDs of
        messages that were released.
        """
        state = cls(capacity)
        chunks: list[bytes] = []
        since: list[Record] = []
        serial = highest = -1
        for data in records:
            record = decode(data)
            if not isinstance(record, SnapshotChunk):
                if on_release is not None and (ids := state._released_by(record)) is not None:
                    on_release(ids)
                state.apply(record)
                if chunks:
                    since.append(record)
                continue
            highest = max(highest, record.serial)
            if record.part == 0:
                chunks, since, serial = [], [], record.serial
            elif record.serial != serial or record.part != len(chunks):
                chunks, since = [], []  # an earlier chunk is missing
                continue
            chunks.append(record.data)
            if len(chunks) == record.parts:
                state = cls(capacity)
                state._load(b"".join(chunks))
                for each in since:
                    state.apply(each)  # they were reported when they were read
                chunks, since = [], []
        state._serial = max(state._serial, highest + 1)
        return state

    def apply(self, record: Some) -> Some:
        """Apply one record, and return it; a snapshot chunk changes nothing: `read` joins them."""
        if isinstance(record, Released):
            self._release(record.positions, record.ids, record.held)
        elif isinstance(record, Intent):
            self.open_intents[record.number] = record
            self.next_number = max(self.next_number, record.number + 1)
            if record.target:
                following = record.first + record.positions.size
                self.sequences[record.target] = max(self.next_sequence(record.target), following)
        elif isinstance(record, Commit):
            self._close(record)
        elif isinstance(record, LowWatermark):
            self.low_watermark = max(self.low_watermark, record.position)
            self.released.remove_range(0, self.low_watermark)
            if self.refused:
                self.refused.remove_range(0, self.low_watermark)
        elif isinstance(record, Refused):
            self.refused.update(to_array(record.positions))
        elif isinstance(record, Paused):
            # A later record of a target replaces the earlier one, or ends it.
            found = {**self.paused, **record.targets}
            self.paused = {name: at_ms for name, at_ms in found.items() if at_ms is not None}
        elif isinstance(record, Disposition):
            if record.kind == "cancelled":
                self.cancelled.add(record, self.low_watermark)
            else:
                record.ids.save_in(self.set_aside[record.kind])
        return record

    @property
    def proof(self) -> LowWatermark:
        """A record that changes nothing: once it is confirmed, no other owner had claimed."""
        return LowWatermark(self.low_watermark)

    def next_sequence(self, target: str) -> int:
        """Return the lowest sequence ID that was never used for a target."""
        return self.sequences.get(target, 1)  # 0 stands for a message without one

    def is_released(self, positions: Int64s) -> Mask:
        """Return which positions are released, shape (n,)."""
        released: Mask = positions < self.low_watermark
        ask = np.flatnonzero(~released & (positions <= self._highest))
        if ask.size and self.released:
            some, inverse = np.unique(positions[ask], return_inverse=True)
            released[ask] = contained(self.released, some)[inverse]
        return released

    def snapshot(self) -> list[bytes]:
        """Return the chunks of a snapshot, in order; only later records may come between them."""
        data = packed_values(
            {
                "numbers": [self.low_watermark, self.next_number, self._highest],
                "sent_until_ms": self.sent_until_ms,
                "released": _compressed(self.released.serialize()),
                "memory": _ids_in(self.memory),
                "intents": list(map(encode, self.open_intents.values())),
                "sequences": self.sequences,
                "refused": _compressed(self.refused.serialize()),
                "paused": self.paused,
                "cancelled": self.cancelled.saved(),
                "set_aside": list(map(_ids_in, self.set_aside.values())),
            }
        )
        cuts = range(0, len(data), _CHUNK_BYTES)
        # A reader must not join the first chunks of one snapshot and the last ones of another.
        serial, self._serial = self._serial, self._serial + 1
        return [
            encode(SnapshotChunk(serial, index, len(cuts), data[start : start + _CHUNK_BYTES]))
            for index, start in enumerate(cuts)
        ]

    def _load(self, data: bytes) -> None:
        try:
            saved = unpacked_values(data)
            self.low_watermark, self.next_number, self._highest = saved["numbers"]
            self.sent_until_ms = saved["sent_until_ms"]
            self.released = BitMap64.deserialize(_decompressed(saved["released"]))
            _restore(self.memory, saved["memory"])
            intents = [cast("Intent", decode(each)) for each in saved["intents"]]
            self.open_intents = {each.number: each for each in intents}
            self.sequences = saved["sequences"]
            self.refused = BitMap64.deserialize(_decompressed(saved["refused"]))
            self.paused = saved["paused"]
            self.cancelled.restore(saved["cancelled"])
            for memory, ids in zip(self.set_aside.values(), saved["set_aside"], strict=True):
                _restore(memory, ids)
        except (struct.error, KeyError, ValueError, zlib.error, DamagedSnapshotError) as error:
            raise DelayLevelError(f"a snapshot in the journal is damaged: {error}") from error

    def _close(self, commit: Commit) -> None:
        """Close an intent, and release its messages, or those that are stored."""
        intent = self.open_intents.pop(commit.number, None)
        if intent is None:
            return  # older than the first record that was read; a snapshot that follows covers it
        positions, ids = intent.positions, intent.ids
        if commit.stored is not None:
            keep = np.isin(positions, commit.stored)
            positions, ids = positions[keep], ids.at(keep)
        self._release(positions, ids, commit.held)

    def _released_by(self, record: Record) -> IdColumns | None:
        """Return the IDs of the messages that a Released or Commit record is going to release."""
        if isinstance(record, Released):
            return record.ids
        # Those that were stored before a takeover may have been released long before.
        if not isinstance(record, Commit) or record.stored is not None:
            return None
        intent = self.open_intents.get(record.number)
        return None if intent is None else intent.ids

    def _release(self, positions: Int64s, ids: IdColumns, held: Int64s) -> None:
        """Release messages, and remember their IDs but those of `held`."""
        self._pass(positions)
        if self.refused:
            self.refused -= BitMap64(to_array(positions))
        if held.size:
            # A dead letter that is replayed has the ID of the first one, and is no copy of it.
            ids = ids.at(~np.isin(positions, held))
        ids.save_in(self.memory)

    def _pass(self, positions: Int64s) -> None:
        # Most questions are about positions above all of these, and need no bitmap.
        if positions.size:
            self._highest = max(self._highest, int(positions.max()))
        above = positions[positions >= self.low_watermark] if self.low_watermark else positions
        self.released.update(to_array(above))
