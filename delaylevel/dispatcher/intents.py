"""Batches in flight, and the intents of those with sequence IDs: new ones and earlier ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from delaylevel.dispatcher.journal.records import Intent, Resolved
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.errors import InvalidInputError
from delaylevel.structures.rows import Int64s

from .positions import Mask, id_columns, joined_keys, to_array
from .record import DueBatch, MessageRecord


class IdColumns(NamedTuple):
    """The IDs of a batch; the arguments of ``save_ids``."""

    keys: tuple[str, ...]
    key_index: npt.NDArray[np.integer]
    ids: Int64s


def ids_of(batch: DueBatch) -> IdColumns:
    """Return the IDs of a batch."""
    keys, key_index, ids = id_columns(batch.records, None)
    return IdColumns(tuple(keys), _small(key_index, len(keys)), ids)


def joined_ids(parts: Sequence[IdColumns]) -> IdColumns:
    """Return the IDs of several batches."""
    if len(parts) == 1:
        return parts[0]
    keys, key_index = joined_keys((each.keys, each.key_index) for each in parts)
    ids = np.concatenate([each.ids for each in parts])
    return IdColumns(tuple(keys), _small(key_index, len(keys)), ids)


def _small(key_index: npt.NDArray[np.integer], keys: int) -> npt.NDArray[np.integer]:
    return key_index.astype(np.uint16 if keys < 1 << 16 else np.uint32)


def new_intent(
    batch: DueBatch,
    targets: Sequence[tuple[str, int]],
    target_index: npt.ArrayLike,
    state: JournalState,
    unresolved: Collection[str],
) -> Intent:
    """Return the intent of a batch; the other arguments are those of `DelayQueue.intent`.

    Args:
        state: state of the journal; it is not changed.
        unresolved: names of the targets with intents from before the takeover.
    """
    if batch.number in state.open_intents:
        raise InvalidInputError(f"batch {batch.number} already has an intent")
    if len({name for name, _ in targets}) < len(targets):
        raise InvalidInputError("a target is given twice")
    for name, first in targets:
        least = state.sequences.get(name, 1)
        if first < least:
            raise InvalidInputError(
                f"sequence ID {first} of target {name} was used before; begin at {least}"
            )
        if name in unresolved:
            raise InvalidInputError(
                f"target {name} has an intent from before the takeover; resolve it first"
            )
    index = np.asarray(target_index, dtype=np.uint16)
    return Intent(batch.number, batch.positions, *ids_of(batch), tuple(targets), index)


class BatchesInFlight:
    """The batches in flight, by number."""

    def __init__(self, next_number: int) -> None:
        self._batches: dict[int, DueBatch] = {}
        self._next_number = next_number
        self.launched: dict[int, IdColumns] = {}

    def __len__(self) -> int:
        """Return the number of messages."""
        return sum(map(len, self._batches.values()))

    def batches(self) -> list[DueBatch]:
        """Return all batches."""
        return list(self._batches.values())

    def take_number(self) -> int:
        """Return a number that no batch has."""
        self._next_number += 1
        return self._next_number - 1

    def put(self, due_ms: Int64s, positions: Int64s, records: list[MessageRecord]) -> DueBatch:
        """Add messages as a new batch; due times and packed positions have shape (n,)."""
        batch = DueBatch(self.take_number(), due_ms, positions, records)
        self._batches[batch.number] = batch
        return batch

    def get(self, number: int) -> DueBatch:
        """Return a batch in flight."""
        batch = self._batches.get(number)
        if batch is None:
            raise InvalidInputError(f"there is no batch {number} in flight")
        return batch

    def remove(self, number: int) -> None:
        """Remove a batch; errors as for `get`."""
        del self._batches[self.get(number).number]
        self.launched.pop(number, None)

    def divide(self, batch: DueBatch, parts: Iterable[Sequence[int]]) -> list[DueBatch]:
        """Replace a batch by several ones; the arguments are those of `DelayQueue.divide`."""
        self.remove(batch.number)
        divided = []
        for part in parts:
            index = np.asarray(part, dtype=np.int64)
            records = [batch.records[each] for each in part]
            divided.append(self.put(batch.due_ms[index], batch.positions[index], records))
        return divided


class UnresolvedIntents:
    """The open intents of an earlier owner, and those of their messages that were read again.

    Attributes:
        withheld: packed positions in the intents that are not released.
    """

    def __init__(self, state: JournalState) -> None:
        self._state = state
        self._intents = dict(state.open_intents)
        self.withheld = self._positions()
        self._reopened: list[Intent] = []
        self._offered_again: dict[int, tuple[int, MessageRecord]] = {}

    def __len__(self) -> int:
        """Return the number of messages that were read again."""
        return len(self._offered_again)

    @property
    def intents(self) -> list[Intent]:
        """The intents that are not resolved."""
        return list(self._intents.values())

    @property
    def targets(self) -> set[str]:
        """Names of the targets of the intents."""
        return {name for intent in self._intents.values() for name, _ in intent.targets}

    def contains(self, positions: Int64s) -> Mask:
        """Return which packed positions are withheld, shape (n,)."""
        withheld = np.zeros(positions.size, dtype=np.bool_)
        if self.withheld:
            withheld[:] = [item in self.withheld for item in positions.tolist()]
        return withheld

    def keep(self, position: int, due_ms: int, record: MessageRecord) -> None:
        """Keep a withheld message that was read again."""
        self._offered_again[position] = due_ms, record

    def loose(self) -> tuple[Int64s, Int64s, list[MessageRecord]]:
        """Return due times, packed positions and records of the messages that were read again."""
        due_ms = np.array([due for due, _ in self._offered_again.values()], dtype=np.int64)
        positions = np.array(list(self._offered_again), dtype=np.int64)
        return due_ms, positions, [record for _, record in self._offered_again.values()]

    def resolve(
        self, number: int, stored: npt.ArrayLike
    ) -> tuple[Resolved, tuple[Int64s, Int64s, list[MessageRecord]]]:
        """Close an intent.

        Args:
            stored: which of its messages the broker has stored, shape (n,).

        Returns:
            The record; due times, packed positions and records of the messages that are pending
            again.
        """
        intent = self._intents.get(number)
        if intent is None:
            raise InvalidInputError(f"there is no intent {number} to resolve")
        mask = np.asarray(stored, dtype=np.bool_)
        if mask.shape != intent.positions.shape:
            raise InvalidInputError(
                f"intent {number} has {intent.positions.size} messages, the mask {mask.size}"
            )
        resolved = Resolved(number, intent.positions[mask])
        self._state.apply(resolved)
        for position in resolved.released.tolist():
            self._offered_again.pop(position, None)
        return resolved, self.reopen(number)

    def reopen(self, number: int) -> tuple[Int64s, Int64s, list[MessageRecord]]:
        """Release the messages of an intent; the result is the second one of `resolve`."""
        intent = self._intents.pop(number)
        if number in self._state.open_intents:
            self._reopened.append(intent)
        self.withheld = self._positions()
        pending = [
            position
            for position in intent.positions.tolist()
            if position in self._offered_again and position not in self.withheld
        ]
        again = [self._offered_again.pop(position) for position in pending]
        due_ms = np.array([due for due, _ in again], dtype=np.int64)
        positions = np.array(pending, dtype=np.int64)
        return due_ms, positions, [record for _, record in again]

    def reopened(self, positions: Int64s) -> Mask:
        """Return which messages an earlier owner may have sent, or may still send, shape (n,)."""
        found = np.zeros(positions.size, dtype=np.bool_)
        for intent in self._reopened:
            found |= np.isin(positions, intent.positions)
        return found

    def keep_open(self, intent: Intent) -> None:
        """Add an open intent whose messages are pending again, or will be."""
        self._reopened.append(intent)

    def released_again(self) -> list[Intent]:
        """Return the intents that are not closed although all of their messages are released."""
        found = [
            intent for intent in self._reopened if self._state.is_released(intent.positions).all()
        ]
        closed = {intent.number for intent in found}
        self._reopened = [each for each in self._reopened if each.number not in closed]
        return found

    def _positions(self) -> BitMap64:
        positions = BitMap64()
        for intent in self._intents.values():
            positions.update(to_array(intent.positions))
        positions -= self._state.released
        positions.remove_range(0, self._state.low_watermark)
        return positions
