"""Batches of due messages that have left the delay queue and are not committed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from delaylevel.errors import InvalidInputError
from delaylevel.structures.rows import Int64s

from .batches import DueBatch, MessageRecord


class BatchesInFlight:
    """The batches in flight, by number.

    Args:
        next_number: number of the next batch.
    """

    def __init__(self, next_number: int) -> None:
        self._batches: dict[int, DueBatch] = {}
        self._next_number = next_number

    def __len__(self) -> int:
        """Return the number of messages."""
        return sum(map(len, self._batches.values()))

    def batches(self) -> list[DueBatch]:
        """Return all batches."""
        return list(self._batches.values())

    def take_number(self) -> int:
        """Return a number that no batch has, for an intent without a batch."""
        self._next_number += 1
        return self._next_number - 1

    def put(self, due_ms: Int64s, positions: Int64s, records: list[MessageRecord]) -> DueBatch:
        """Add messages as a new batch; due times and packed positions have shape (n,)."""
        batch = DueBatch(self.take_number(), due_ms, positions, records)
        self._batches[batch.number] = batch
        return batch

    def get(self, number: int) -> DueBatch:
        """Return a batch.

        Raises:
            InvalidInputError: it is missing.
        """
        batch = self._batches.get(number)
        if batch is None:
            raise InvalidInputError(f"there is no batch {number} in flight")
        return batch

    def remove(self, number: int) -> None:
        """Remove a batch; errors as for `get`."""
        del self._batches[self.get(number).number]

    def divide(self, batch: DueBatch, parts: Iterable[Sequence[int]]) -> list[DueBatch]:
        """Replace a batch by several ones; the arguments are those of `DelayQueue.divide`."""
        self.remove(batch.number)
        divided = []
        for part in parts:
            index = np.asarray(part, dtype=np.int64)
            records = [batch.records[each] for each in part]
            divided.append(self.put(batch.due_ms[index], batch.positions[index], records))
        return divided
