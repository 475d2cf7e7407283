"""The dispatcher's state machine: each message comes out once, when it is due."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from delaylevel.cluster.targets.pool import TargetKey
from delaylevel.dispatcher.journal.records import (
    Commit,
    Intent,
    LowWatermark,
    Refused,
    Resolved,
    pack,
)
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.errors import InvalidInputError
from delaylevel.model.clock import Clock
from delaylevel.structures.deduplicator import Deduplicator
from delaylevel.structures.rows import DUE, ENTRY, LEDGER, Int64s, Rows
from delaylevel.structures.segments.pending import PendingSegments

from .batches import DueBatch, FetchedBatch, MessageRecord, OfferResult
from .ids import id_columns, save_ids, unseen_ids
from .intents import new_intent
from .open_positions import OpenPositions
from .pending import PendingIndex
from .unresolved import UnresolvedIntents
from .waiting import WaitingQueues


class DelayQueue:
    """The messages of one window partition: offered in any order, released once, when due.

    A method that returns a journal record has already applied it to the state. The caller appends
    the records to the journal in the order in which the methods returned them, and keeps the order
    in time that `delaylevel.dispatcher.journal` describes.

    Not thread-safe.

    Attributes:
        state: the state of the journal.
        pending: the pending messages; ``pending.segments`` answers queries about them.
        waiting: due messages whose targets are not ready.
        arrived_due_ms: earliest due time offered since it was set to None, ms since the epoch.
    """

    def __init__(
        self,
        state: JournalState,
        segments: PendingSegments,
        *,
        clock: Clock,
        overflow: Callable[[], PendingSegments] | None = None,
    ) -> None:
        """Create a queue without pending messages.

        Args:
            state: state at the end of the journal, owned by the queue from now on. The open
                intents in it have to be resolved.
            segments: empty segments with precision_ms=1, owned by the queue from now on.
            overflow: function that returns further empty segments, for the due messages of a target
                that takes them slowly; None to keep these in memory.

        Raises:
            InvalidInputError: the segments have another precision, or are not empty.
        """
        self.state = state
        self.pending = PendingIndex(segments, clock)
        # IDs of all messages that were offered. The state remembers those released earlier.
        self._offered_ids = Deduplicator(state.memory.capacity)
        self._open = OpenPositions(state.low_watermark)  # pending or in flight
        self._in_flight: dict[int, DueBatch] = {}
        self.waiting = WaitingQueues(clock, overflow)
        self._next_number = state.next_number
        self._unresolved = UnresolvedIntents(state)
        self.arrived_due_ms: int | None = None

    def __len__(self) -> int:
        """Return the number of pending messages, without those in flight."""
        return len(self.pending) + len(self.waiting)

    @property
    def in_flight(self) -> int:
        """Number of messages in batches, or offered again while their intent is unresolved."""
        return sum(map(len, self._in_flight.values())) + len(self._unresolved)

    @property
    def memory_bytes(self) -> int:
        """Approximate memory in use, without messages in flight."""
        ids = len(self._offered_ids) + len(self.state.memory)
        return self.pending.memory_bytes + self.waiting.memory_bytes + 8 * ids

    def offer(self, fetched: FetchedBatch) -> OfferResult:
        """Add messages from the window topic: all of them, or none.

        Args:
            fetched: messages in any order. Successive calls follow the order of the topic.

        Raises:
            InvalidInputError: columns differ in length, a position cannot be packed, or a record
                cannot be stored.
            SpillWriteError: the disk is full or fails, and the memory budget is used up.
        """
        try:
            rows: Rows = np.array(
                [fetched.due_ms, fetched.ledger_ids, fetched.entry_ids], dtype=np.int64
            )
        except (TypeError, ValueError, OverflowError):
            rows = np.empty((3, 0), dtype=np.int64)
        size = len(fetched)
        if rows.shape != (3, size):
            raise InvalidInputError(
                "ledger_ids, entry_ids, due_ms and records must have the same length, and all but "
                "records must hold integers"
            )
        if not size:
            return OfferResult(0, 0, 0)
        positions = pack(rows[LEDGER], rows[ENTRY])
        released = self.state.is_released(positions) | self._open.are_below(positions)
        unknown = self._open.unknown(positions, ~released)
        keys, key_index, ids = id_columns(fetched.records, unknown)
        unseen = unseen_ids((self.state.memory, self._offered_ids), keys, key_index, ids)
        tracked = unknown[unseen]
        self._add(fetched, rows, positions, tracked)
        if tracked.size:
            save_ids(self._offered_ids, keys, key_index[unseen], ids[unseen])
            self._open.add(positions[tracked])
            due_ms = int(rows[DUE, tracked].min())
            self.arrived_due_ms = min(due_ms, self.arrived_due_ms or due_ms)
        self._open.last_offered = max(self._open.last_offered, int(positions.max()))
        return OfferResult(tracked.size, unknown.size - tracked.size, int(released.sum()))

    def advance(self, now_ms: int, max_messages: int = 1000) -> DueBatch | None:
        """Return messages that are due, and put them in flight; None if there are none.

        Args:
            now_ms: latest due time to return, ms since the epoch.
            max_messages: maximum number of messages.

        Raises:
            DamagedSegmentError: a spill file is gone. Start again from the journal.
        """
        due_ms = self.next_due_ms()
        if due_ms is None or due_ms > now_ms or max_messages < 1:
            return None
        dues, positions, records = self.pending.take(now_ms, max_messages)
        if not records:
            return None
        return self._put_in_flight(dues, positions, records)

    def divide(self, batch: DueBatch, parts: Iterable[Sequence[int]]) -> list[DueBatch]:
        """Replace a batch without an intent by several ones.

        Args:
            parts: ascending indices of each part's messages. Together they are the whole batch.
        """
        del self._in_flight[self._batch(batch.number).number]
        divided = []
        for part in parts:
            index = np.asarray(part, dtype=np.int64)
            records = [batch.records[each] for each in part]
            due_ms, positions = batch.due_ms[index], batch.positions[index]
            divided.append(self._put_in_flight(due_ms, positions, records))
        return divided

    def defer(self, batch: DueBatch, target: TargetKey) -> None:
        """Let the messages of a batch without an intent wait until their target takes them.

        Raises:
            SpillError: the disk is full, or cannot be written. The batch is still in flight.
        """
        self.waiting.put(target, self._batch(batch.number))
        del self._in_flight[batch.number]

    def put_back(self, batch: DueBatch) -> None:
        """Let the messages of a batch without an intent be pending again."""
        self._put_back(self._batch(batch.number), np.arange(len(batch)))

    def withdraw(self, number: int, stored: npt.ArrayLike) -> Resolved:
        """Close the intent of a batch of which nothing else is sent.

        The messages that are not stored are pending again. Their outcomes are certain.

        Args:
            stored: which of its messages their target has stored, shape (n,).

        Raises:
            InvalidInputError: the batch or its intent is missing.
        """
        batch = self._batch(number)
        if number not in self.state.open_intents:
            raise InvalidInputError(f"batch {number} has no intent to withdraw")
        mask = np.asarray(stored, dtype=np.bool_)
        resolved = Resolved(number, batch.positions[mask])
        self.state.apply(resolved)
        self._open.discard(resolved.released)
        self._put_back(batch, np.flatnonzero(~mask))
        return resolved

    def advance_waiting(self, target: TargetKey, max_messages: int) -> DueBatch:
        """Return the first messages that wait for a target, and put them in flight.

        Raises:
            DamagedSegmentError: a spill file is gone. Start again from the journal.
        """
        return self._put_in_flight(*self.waiting.take(target, max_messages))

    def intent(
        self,
        batch: DueBatch,
        targets: Sequence[tuple[str, int]] = (),
        target_index: npt.ArrayLike = (),
    ) -> Intent:
        """Return the intent of a batch, to be confirmed before the batch is published.

        Args:
            batch: batch from ``advance``.
            targets: name and first sequence ID of each target, if the broker deduplicates. The
                first ID is at least that in ``state.sequences``, or 1 for a new target.
            target_index: index of each message's target, or ``len(targets)`` for a message that
                will be set aside, shape (n,).

        Raises:
            InvalidInputError: the batch already has an intent, a sequence ID was used before, or a
                target has an unresolved intent.
        """
        self._batch(batch.number)
        unresolved = self._unresolved.targets
        intent = new_intent(batch, targets, target_index, self.state, unresolved)
        self.state.apply(intent)
        return intent

    def commit(self, number: int, held: npt.ArrayLike = ()) -> Commit:
        """Return the commit of a batch whose messages are all confirmed, and release them.

        Batches may be committed in any order.

        Args:
            held: packed positions of the messages that were set aside and may come back.

        Raises:
            InvalidInputError: the batch or its intent is missing, or ``held`` is not part of it.
        """
        batch = self._batch(number)
        if number not in self.state.open_intents:
            raise InvalidInputError(f"batch {number} has no intent; write one before publishing")
        held_positions = np.asarray(held, dtype=np.int64)
        if held_positions.size and not np.isin(held_positions, batch.positions).all():
            raise InvalidInputError(f"a held position is not in batch {number}")
        commit = Commit(number, held_positions)
        self.state.apply(commit)
        del self._in_flight[number]
        self._open.discard(batch.positions)
        return commit

    def refuse(self, positions: Int64s) -> Refused:
        """Return the record of messages that will be set aside, to be confirmed before they are.

        Args:
            positions: packed positions of messages in flight, shape (k,).
        """
        record = Refused(positions)
        self.state.apply(record)
        return record

    def refused_earlier(self, batch: DueBatch) -> list[int]:
        """Return the indices of the messages that their target refused before a takeover."""
        refused = self.state.refused
        positions = batch.positions.tolist() if refused else []
        return [index for index, each in enumerate(positions) if each in refused]

    def unresolved_intents(self) -> list[Intent]:
        """Return the intents from before the takeover that are not resolved."""
        return self._unresolved.intents

    def resolve(self, number: int, stored: npt.ArrayLike) -> Resolved:
        """Close an intent from before the takeover. The messages not stored are pending again.

        Args:
            number: number of an intent that was open at the start.
            stored: which of its messages the broker has stored, shape (n,).

        Raises:
            InvalidInputError: there is no such intent, or the shape differs.
        """
        resolved, again = self._unresolved.resolve(number, stored)
        self._open.discard(resolved.released)
        self.pending.put_again(*again)
        return resolved

    def low_watermark(self) -> int:
        """Return the packed position below which everything is released; it never decreases."""
        return self._open.low_watermark(self._unresolved.withheld)

    def checkpoint(self) -> LowWatermark | None:
        """Return the low watermark as a record, None if it has not moved."""
        position = self.low_watermark()
        if position <= self.state.low_watermark:
            return None
        record = LowWatermark(position)
        self.state.apply(record)
        return record

    def next_due_ms(self) -> int | None:
        """Return the earliest due time of the pending messages, ms since the epoch, or None."""
        return self.pending.next_due_ms

    def close(self) -> None:
        """Delete the spill files. The topic still has the pending messages."""
        self.pending.segments.close()
        self.waiting.close()

    def _add(self, fetched: FetchedBatch, rows: Rows, positions: Int64s, tracked: Int64s) -> None:
        """Add the tracked rows to the pending ones, without those in unresolved intents.

        It changes nothing if it raises an error.
        """
        records = fetched.records
        withheld = self._unresolved.contains(positions[tracked])
        index = tracked[~withheld]
        if index.size:
            some = rows[:, index] if index.size < rows.shape[1] else rows
            values: npt.NDArray[np.float64] | None = None
            if fetched.attribute is not None:
                values = np.asarray(fetched.attribute, dtype=np.float64)[index]
            self.pending.put(some, [tuple(records[each]) for each in index.tolist()], values)
        for each in tracked[withheld].tolist():
            record = tuple(records[each])
            self._unresolved.keep(int(positions[each]), int(rows[DUE, each]), record)

    def _put_in_flight(
        self, due_ms: Int64s, positions: Int64s, records: list[MessageRecord]
    ) -> DueBatch:
        batch = DueBatch(self._next_number, due_ms, positions, records)
        self._next_number += 1
        self._in_flight[batch.number] = batch
        return batch

    def _put_back(self, batch: DueBatch, index: Int64s) -> None:
        records = [batch.records[each] for each in index.tolist()]
        self.pending.put_again(batch.due_ms[index], batch.positions[index], records)
        del self._in_flight[batch.number]

    def _batch(self, number: int) -> DueBatch:
        batch = self._in_flight.get(number)
        if batch is None:
            raise InvalidInputError(f"there is no batch {number} in flight")
        return batch
