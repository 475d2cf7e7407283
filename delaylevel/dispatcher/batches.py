"""Batches of messages into and out of the delay queue, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from delaylevel.structures.rows import Int64s

from .record import WindowMessage

#: Values that ``marshal`` can write. The first two are (id_key, id).
MessageRecord: TypeAlias = "tuple[Any, ...]"


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
    """

    ledger_ids: list[int] = field(default_factory=list)
    entry_ids: list[int] = field(default_factory=list)
    due_ms: list[int] = field(default_factory=list)
    records: list[MessageRecord] = field(default_factory=list)
    attribute: Sequence[float] | None = None

    def __len__(self) -> int:
        """Return the number of messages."""
        return len(self.records)

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
        )


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
