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
from delaylevel.errors import DelayLevelError, InvalidInputError
from delaylevel.model.clock import Clock
from delaylevel.structures.removable_ids import RemovableIds
from delaylevel.structures.rows import DUE, ENTRY, LEDGER, Int64s, Rows
from delaylevel.structures.segments.pending import PendingSegments

from .batches import Columns, DueBatch, FetchedBatch, OfferResult, joined
from .batches_in_flight import BatchesInFlight
from .cancellation_queue import CancellationQueue
from .ids import Mask, id_columns, save_ids, unseen_ids
from .intents import new_intent
from .open_positions import OpenPositions
from .packing import as_plain
from .pending import PendingIndex
from .record import Cancellation
from .releases import RecentReleases
from .unresolved import UnresolvedIntents
from .waiting import WaitingQueues

# A call that finds only cancelled messages takes this many times the wanted number of them.
_LOOKS = 20


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
        cancelling: the cancellations, and the cancelled messages.
        releases: times of the last releases.
        arrived_due_ms: earliest due time offered since it was set to None, ms since the epoch.
    """

    def __init__(
        self,
        state: JournalState,
        segments: PendingSegments,
        *,
        clock: Clock,
        overflow: Callable[[], PendingSegments] | None = None,
        releases: RecentReleases | None = None,
        grace_ms: int = 60_000,
    ) -> None:
        """Create a queue without pending messages.

        Args:
            state: state at the end of the journal, owned by the queue from now on. The open
                intents in it have to be resolved.
            segments: empty segments with precision_ms=1, owned by the queue from now on.
            overflow: function that returns further empty segments, for the due messages of a target
                that takes them slowly; None to keep these in memory.
            releases: times of the last releases, the ``on_release`` of the state.
            grace_ms: time after its due time until which the message of a cancellation is waited
                for, ms.

        Raises:
            InvalidInputError: the segments have another precision, or are not empty.
        """
        self.state = state
        self.pending = PendingIndex(segments)
        # IDs of the messages that are pending or in flight. The state remembers released ones.
        self._pending_ids = RemovableIds()
        self._open = OpenPositions(state.low_watermark)  # pending or in flight
        self._in_flight = BatchesInFlight(state.next_number)
        self.waiting = WaitingQueues(clock, overflow)
        self._unresolved = UnresolvedIntents(state)
        self.releases = releases or RecentReleases(clock.now_ms)
        state.on_release = self.releases
        ids, opened, flown = self._pending_ids, self._open, (self._unresolved, self._in_flight)
        self.cancelling = CancellationQueue(
            state, self.pending, ids, opened, *flown, self.releases, clock, grace_ms
        )
        self.arrived_due_ms: int | None = None

    def __len__(self) -> int:
        """Return the number of pending messages, without those in flight and cancelled ones."""
        return len(self.pending) + len(self.waiting) - self.cancelling.passed_over

    @property
    def in_flight(self) -> int:
        """Number of messages in batches, or offered again while their intent is unresolved."""
        return len(self._in_flight) + len(self._unresolved)

    @property
    def memory_bytes(self) -> int:
        """Approximate memory in use, without messages in flight."""
        ids = len(self._pending_ids) + len(self.state.memory)
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
        rows = fetched.rows()
        if not len(fetched):
            return OfferResult(0, 0, 0)
        positions = pack(rows[LEDGER], rows[ENTRY])
        released = self.state.is_released(positions) | self._open.are_below(positions)
        unknown = self._open.unknown(positions, ~released)
        requests = unknown[:0]
        if fetched.cancellations:
            asks = np.array([type(each) is Cancellation for each in fetched.records])[unknown]
            requests, unknown = unknown[asks], unknown[~asks]
        keys, key_index, ids = id_columns(fetched.records, unknown)
        unseen = unseen_ids(self.cancelling.memories, keys, key_index, ids)
        tracked = unknown[unseen]
        self._add(fetched, rows, positions, tracked)
        if tracked.size:
            save_ids(self._pending_ids, keys, key_index[unseen], ids[unseen])
            self._open.add(positions[tracked])
            due_ms = int(rows[DUE, tracked].min())
            self.arrived_due_ms = min(due_ms, self.arrived_due_ms or due_ms)
            self.cancelling.take_arrived(rows[DUE], positions, fetched.records, tracked)
        if requests.size:
            self.cancelling.take_requests(positions, fetched.records, requests)
        self._open.last_offered = max(self._open.last_offered, int(positions.max()))
        return OfferResult(tracked.size, unknown.size - tracked.size, int(released.sum()))

    def advance(self, now_ms: int, max_messages: int = 1000) -> DueBatch | None:
        """Return messages that are due, and put them in flight; None if there are none.

        After many cancelled ones, it leaves the next ones to the next call.

        Args:
            now_ms: latest due time to return, ms since the epoch.
            max_messages: maximum number of messages.

        Raises:
            DamagedSegmentError: a spill file is gone. Start again from the journal.
        """
        parts: list[Columns] = []
        left = max_messages
        for _ in range(_LOOKS):
            due_ms = self.next_due_ms()
            if left <= 0 or due_ms is None or due_ms > now_ms:
                break
            part = self.cancelling.filter(self.pending.take(now_ms, left))
            if part[2]:
                parts.append(part)
            left -= len(part[2])
        return self._in_flight.put(*joined(parts)) if parts else None

    def divide(self, batch: DueBatch, parts: Iterable[Sequence[int]]) -> list[DueBatch]:
        """Replace a batch without an intent by several ones.

        Args:
            parts: ascending indices of each part's messages. Together they are the whole batch.
        """
        return self._in_flight.divide(batch, parts)

    def defer(self, batch: DueBatch, target: TargetKey) -> None:
        """Let the messages of a batch without an intent wait until their target takes them.

        Raises:
            SpillError: the disk is full, or cannot be written. The batch is still in flight.
        """
        self.waiting.put(target, self._in_flight.get(batch.number))
        self._in_flight.remove(batch.number)

    def put_back(self, batch: DueBatch) -> None:
        """Let the messages of a batch without an intent be pending again."""
        self._put_back(self._in_flight.get(batch.number), np.arange(len(batch)))

    def withdraw(self, number: int, stored: npt.ArrayLike) -> Resolved:
        """Close the intent of a batch of which nothing else is sent.

        The messages that are not stored are pending again. Their outcomes are certain.

        Args:
            stored: which of its messages their target has stored, shape (n,).

        Raises:
            InvalidInputError: the batch or its intent is missing.
        """
        batch = self._in_flight.get(number)
        if number not in self.state.open_intents:
            raise InvalidInputError(f"batch {number} has no intent to withdraw")
        mask = np.asarray(stored, dtype=np.bool_)
        intent = self.state.open_intents[number]
        resolved = Resolved(number, batch.positions[mask])
        self.state.apply(resolved)
        self._open.discard(resolved.released)
        again = np.flatnonzero(~mask)
        self._close(intent, mask)
        self.cancelling.note_refused(batch.positions, batch.records, again)
        self._put_back(batch, again)
        return resolved

    def advance_waiting(self, target: TargetKey, max_messages: int) -> DueBatch | None:
        """Return the first messages that wait for a target, and put them in flight.

        Returns:
            The messages; None if all of them are cancelled.

        Raises:
            DamagedSegmentError: a spill file is gone. Start again from the journal.
        """
        part = self.cancelling.filter(self.waiting.take(target, max_messages))
        return self._in_flight.put(*part) if part[2] else None

    def without_cancelled(self, batch: DueBatch) -> DueBatch | None:
        """Return a batch without an intent, or what is left of it after cancellations."""
        rest = self.cancelling.filter((batch.due_ms, batch.positions, batch.records))
        if len(rest[2]) == len(batch):
            return batch
        self._in_flight.remove(batch.number)
        return self._in_flight.put(*rest) if rest[2] else None

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
        self._in_flight.get(batch.number)
        unresolved = self._unresolved.targets
        intent = new_intent(batch, targets, target_index, self.state, unresolved)
        if self.cancelling.has_cancelled(intent):
            raise DelayLevelError(
                "a cancelled message was about to be published; it was not: start again from the "
                "journal, and report this as a defect"
            )
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
        batch = self._in_flight.get(number)
        if number not in self.state.open_intents:
            raise InvalidInputError(f"batch {number} has no intent; write one before publishing")
        held_positions = np.asarray(held, dtype=np.int64)
        if held_positions.size and not np.isin(held_positions, batch.positions).all():
            raise InvalidInputError(f"a held position is not in batch {number}")
        intent = self.state.open_intents[number]
        commit = Commit(number, held_positions)
        self.state.apply(commit)
        self._in_flight.remove(number)
        self._open.discard(batch.positions)
        self._close(intent, None)
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

    def reopened(self, batch: DueBatch) -> Mask:
        """Return which messages an earlier owner may have sent, or may still send, shape (n,)."""
        return self._unresolved.reopened(batch.positions)

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
        intent = self.state.open_intents.get(number)
        resolved, again = self._unresolved.resolve(number, stored)
        self._open.discard(resolved.released)
        assert intent is not None
        self._close(intent, np.asarray(stored, dtype=np.bool_))
        self.pending.put_again(*again)
        return resolved

    def reopen(self, number: int) -> None:
        """Let the messages of an intent be pending again although they may have been sent.

        The intent stays open until they are released again, so that none of them is cancelled.
        """
        self.pending.put_again(*self._unresolved.reopen(number))

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
            self.pending.put(some, [records[each] for each in index.tolist()], values)
        for each in tracked[withheld].tolist():
            record = as_plain(records[each])
            self._unresolved.keep(int(positions[each]), int(rows[DUE, each]), record)

    def _close(self, intent: Intent, released: Mask | None) -> None:
        """Forget the messages of an intent that are released, all if None."""
        keys, key_index, ids = intent.id_keys, intent.key_index, intent.ids
        some = slice(None) if released is None else released
        self.cancelling.released(keys, key_index[some], ids[some])
        self.cancelling.decide_again(keys, key_index, ids)

    def _put_back(self, batch: DueBatch, index: Int64s) -> None:
        records = [batch.records[each] for each in index.tolist()]
        self.pending.put_again(batch.due_ms[index], batch.positions[index], records)
        self._in_flight.remove(batch.number)
