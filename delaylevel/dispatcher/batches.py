"""Batches of messages into and out of the delay queue, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from delaylevel.errors import InvalidInputError
from delaylevel.structures.rows import Int64s, Rows

from .record import Cancellation, WindowMessage

#: Values that ``marshal`` can write. The first two are (id_key, id).
MessageRecord: TypeAlias = "tuple[Any, ...]"


#: Due times (ms since the epoch), packed positions and records, each of length n.
Columns: TypeAlias = "tuple[Int64s, Int64s, list[MessageRecord]]"


def is_cancellation(record: tuple[Any, ...]) -> bool:
    """Return True if a record is a cancellation, as it was read or as a plain tuple."""
    return len(record) == len(Cancellation._fields)


@dataclass(slots=True)
class FetchedBatch:
    """Messages from the window topic, as columns of equal length.

    Attributes:
        ledger_ids: ledger IDs of the positions.
        entry_ids: entry << 10 | batch index (0 if not batched).
        due_ms: exact due times, ms since the epoch.
        records: tuples of values that ``marshal`` can write, which come out as plain tuples. The
            first two values are (id_key, id); a message with the key ``""`` has no copies.
        attribute: a number for each message, for queries about pending messages; None for the size
            of the stored record.
        cancellations: number of the records that are a `Cancellation`.
    """

    ledger_ids: list[int] = field(default_factory=list)
    entry_ids: list[int] = field(default_factory=list)
    due_ms: list[int] = field(default_factory=list)
    records: list[MessageRecord] = field(default_factory=list)
    attribute: Sequence[float] | None = None
    cancellations: int = 0

    def __len__(self) -> int:
        """Return the number of messages."""
        return len(self.records)

    def rows(self) -> Rows:
        """Return due times, ledger IDs and entry IDs, shape (3, n).

        Raises:
            InvalidInputError: the columns differ in length, or hold something else.
        """
        try:
            rows: Rows = np.array([self.due_ms, self.ledger_ids, self.entry_ids], dtype=np.int64)
        except (TypeError, ValueError, OverflowError):
            rows = np.empty((3, 0), dtype=np.int64)
        if rows.shape != (3, len(self)):
            raise InvalidInputError(
                "ledger_ids, entry_ids, due_ms and records must have the same length, and all but "
                "records must hold integers"
            )
        return rows

    def split(self, count: int) -> tuple[FetchedBatch, FetchedBatch]:
        """Return the first ``count`` messages, and the others."""
        return self._between(0, count), self._between(count, len(self))

    def _between(self, start: int, stop: int) -> FetchedBatch:
        return FetchedBatch(
            self.ledger_ids[start:stop],
            self.entry_ids[start:stop],
            self.due_ms[start:stop],
            self.records[start:stop],
            None if self.attribute is None else self.attribute[start:stop],
            self.cancellations and sum(map(_is_read, self.records[start:stop])),
        )


def _is_read(record: tuple[Any, ...]) -> bool:
    return type(record) is Cancellation


class OfferResult(NamedTuple):
    """Counts of fetched messages by outcome; the other messages were already pending.

    Attributes:
        tracked: messages that are pending now.
        duplicates: copies of a message that is pending or was released.
        released: messages that were already released.
    """

    tracked: int
    duplicates: int
    released: int


@dataclass(frozen=True, eq=False)
class DueBatch:
    """Messages that are due, in the order (due time, position).

    Attributes:
        number: number of the batch and of its intent.
        due_ms: due times, ms since the epoch, shape (n,).
        positions: packed positions, shape (n,).
    """

    number: int
    due_ms: Int64s
    positions: Int64s
    records: list[MessageRecord]

    def __len__(self) -> int:
        """Return the number of messages."""
        return len(self.records)

    @cached_property
    def messages(self) -> list[WindowMessage]:
        """The records as messages, shape (n,)."""
        # This is what _make does, without a call in Python for each message.
        return [tuple.__new__(WindowMessage, record) for record in self.records]


def joined(parts: Sequence[Columns]) -> Columns:
    """Return successive messages as one part.

    Args:
        parts: at least one part.
    """
    if len(parts) == 1:
        return parts[0]
    return (
        np.concatenate([due_ms for due_ms, _, _ in parts]),
        np.concatenate([positions for _, positions, _ in parts]),
        [record for _, _, records in parts for record in records],
    )
