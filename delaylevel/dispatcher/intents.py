"""Batches in flight, and the intents of an earlier owner."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from delaylevel.dispatcher.journal.records import UNCERTAIN, Intent, Resolved
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.errors import InvalidInputError
from delaylevel.structures.rows import Int64s

from .positions import IdColumns, Mask, to_array
from .record import Columns, DueBatch, MessageRecord


class BatchesInFlight:
    """The batches that are launched and not released, by number.

    Attributes:
        ids: the IDs of each batch.
    """

    def __init__(self, next_number: int) -> None:
        self._batches: dict[int, DueBatch] = {}
        self._next_number = next_number
        self.ids: dict[int, IdColumns] = {}

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

    def batch(self, due_ms: Int64s, positions: Int64s, records: list[MessageRecord]) -> DueBatch:
        """Return messages as a new batch; due times and packed positions have shape (n,)."""
        return DueBatch(self.take_number(), due_ms, positions, records)

    def add(self, batch: DueBatch, ids: IdColumns) -> None:
        """Add a batch that is launched."""
        self._batches[batch.number] = batch
        self.ids[batch.number] = ids

    def get(self, number: int) -> tuple[DueBatch, IdColumns]:
        """Return a batch and its IDs."""
        batch = self._batches.get(number)
        if batch is None:
            raise InvalidInputError(f"there is no batch {number} in flight")
        return batch, self.ids[number]

    def remove(self, number: int) -> None:
        """Remove a batch."""
        del self._batches[number], self.ids[number]


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
        return {intent.target for intent in self._intents.values()}

    def contains(self, positions: Int64s) -> Mask:
        """Return which packed positions are withheld, shape (n,)."""
        withheld = np.zeros(positions.size, dtype=np.bool_)
        if self.withheld:
            withheld[:] = [item in self.withheld for item in positions.tolist()]
        return withheld

    def keep(self, position: int, due_ms: int, record: MessageRecord) -> None:
        """Keep a withheld message that was read again."""
        self._offered_again[position] = due_ms, record

    def loose(self) -> Columns:
        """Return due times, packed positions and records of the messages that were read again."""
        due_ms = np.array([due for due, _ in self._offered_again.values()], dtype=np.int64)
        positions = np.array(list(self._offered_again), dtype=np.int64)
        return due_ms, positions, [record for _, record in self._offered_again.values()]

    def resolve(
        self, number: int, stored: npt.ArrayLike, take_number: Callable[[], int]
    ) -> tuple[list[Intent | Resolved], IdColumns, Columns]:
        """Close an intent.

        Args:
            stored: which of its messages the broker has stored, shape (n,).
            take_number: function that returns a number that no intent has.

        Returns:
            The records, the last of which is its own; the IDs of the messages that are stored; and
            those that are pending again.
        """
        intent = self._intents.get(number)
        if intent is None:
            raise InvalidInputError(f"there is no intent {number} to resolve")
        mask = np.asarray(stored, dtype=np.bool_)
        if mask.shape != intent.positions.shape:
            raise InvalidInputError(
                f"intent {number} has {intent.positions.size} messages, the mask {mask.size}"
            )
        records: list[Intent | Resolved] = []
        if intent.target and not mask.all():
            # The client of an earlier owner sends the others again once the name of its producer is
            # free, and no higher sequence ID came. So an intent of them stays open until they are
            # released again, and they do not expire before.
            left, ids = intent.positions[~mask], intent.ids.at(~mask)
            uncertain = Intent(take_number(), left, ids, first=UNCERTAIN)
            self._reopened.append(uncertain)
            records.append(uncertain)
        resolved = Resolved(number, intent.positions[mask])
        records.append(resolved)
        for record in records:
            self._state.apply(record)
        for position in resolved.released.tolist():
            self._offered_again.pop(position, None)
        return records, intent.ids.at(mask), self.reopen(number)

    def reopen(self, number: int) -> Columns:
        """Let the messages of an intent be pending again, and return those that were read."""
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

    def close_reopened(self) -> list[Resolved]:
        """Close the intents whose messages were pending again, and are all released now."""
        is_released = self._state.is_released
        closed = [one for one in self._reopened if is_released(one.positions).all()]
        numbers = {one.number for one in closed}
        self._reopened = [one for one in self._reopened if one.number not in numbers]
        records = [Resolved(one.number, one.positions[:0]) for one in closed]
        for record in records:
            self._state.apply(record)
        return records

    def _positions(self) -> BitMap64:
        positions = BitMap64()
        for intent in self._intents.values():
            positions.update(to_array(intent.positions))
        positions -= self._state.released
        positions.remove_range(0, self._state.low_watermark)
        return positions
