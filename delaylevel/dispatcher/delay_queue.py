"""The dispatcher's state machine: what is offered comes out once, when it is due."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyroaring import BitMap64

from delaylevel.dispatcher.journal.state import (
    Commit,
    Intent,
    JournalState,
    LowWatermark,
    Resolved,
    pack,
    unpack,
)
from delaylevel.errors import InvalidInputError
from delaylevel.model.clock import Clock
from delaylevel.structures.deduplicator import Deduplicator
from delaylevel.structures.rows import DUE, ENTRY, LEDGER, Int64s, Rows
from delaylevel.structures.segments.pending import PendingSegments
from delaylevel.structures.timebucket.tracker import TimeBucketTracker

from .columns import Arrivals, Batch, MessageRecord, Offered, id_columns
from .ids import contained, save_ids, to_array, unseen_ids
from .pending import PendingIndex

__all__ = ["Arrivals", "Batch", "DelayQueue", "MessageRecord", "Offered"]


class DelayQueue:
    """What one window partition holds: offered in any order, released when due, each once.

    Methods that return a record have applied it to the state; the caller appends the records to
    the release log in the order in which they were made. Of the order in time it has to keep:

    - An intent is confirmed in the log before the first of its messages is sent.
    - Within an outlet, a message is sent once what lies before it is stored or, where it is held,
      stored in the held topic: the last sequence id then says how far an intent got.
    - The source is acknowledged up to a mark once that is confirmed in the log.
    - After a takeover an outlet's intents are settled before it publishes anything.

    Not safe for use by several threads.
    """

    def __init__(
        self,
        state: JournalState,
        segments: PendingSegments,
        *,
        tracker: TimeBucketTracker | None = None,
        clock: Clock,
        memory_capacity: int | None = None,
    ) -> None:
        """Begin, with nothing pending, where a log ends.

        Args:
            state: of the log; the window's from now on. Its unfinished intents are to be settled.
            segments: empty, with precision_ms=1; the window's from now on.
            tracker: empty, with precision_ms=1; a new one where None.
            clock: the present time.
            memory_capacity: the most ids for each key that are remembered of what is pending or
                was released since the start; the state's capacity where None.

        Raises:
            InvalidInputError: tracker or segments are not exact, or not empty.
        """
        self.state = state
        self._waiting = PendingIndex(segments, tracker, clock)
        self._met = Deduplicator(memory_capacity or state.memory.capacity)
        self._open = BitMap64()  # pending or in flight
        self._floor = state.mark
        self._offered = state.mark - 1
        self._returned: list[tuple[int, int, MessageRecord]] = []
        self._batches: dict[int, Batch] = {}
        self._next_number = state.next_number
        self._unsettled = dict(state.unfinished)
        self._parked: dict[int, tuple[int, MessageRecord]] = {}
        self._pinned = self._pinned_positions()

    def __len__(self) -> int:
        """Return how many messages are pending: offered, and not in flight."""
        return len(self._waiting) + len(self._returned)

    @property
    def in_flight(self) -> int:
        """How many are in batches, or in intents that are to be settled and were offered again."""
        return sum(map(len, self._batches.values())) + len(self._parked)

    @property
    def memory_bytes(self) -> int:
        """About what is held in memory; what is in flight is left out."""
        ids = len(self._met) + len(self.state.memory)
        return self._waiting.memory_bytes + 8 * ids

    def offer(self, arrivals: Arrivals) -> Offered:
        """Take in messages that were read from the window topic.

        Args:
            arrivals: in any order within themselves; calls follow the order of the topic.

        Raises:
            InvalidInputError: columns that differ in length, a position that cannot be packed, a
                record that cannot be stored.
            SpillFullError: the disk is full. In either case nothing was taken.
        """
        try:
            rows: Rows = np.array(
                [arrivals.due_ms, arrivals.ledger_ids, arrivals.entry_ids], dtype=np.int64
            )
        except (TypeError, ValueError, OverflowError):
            rows = np.empty((3, 0), dtype=np.int64)
        size = len(arrivals)
        if rows.shape != (3, size):
            raise InvalidInputError(
                "ledger_ids, entry_ids, due_ms and records of arrivals must have one length, "
                "and all but records hold integers"
            )
        if not size:
            return Offered(0, 0, 0)
        positions = pack(rows[LEDGER], rows[ENTRY])
        released = self.state.is_released(positions) | (positions < self._floor)
        fresh = self._without_known(positions, ~released)
        keys, key_index, ids = id_columns(arrivals.records, fresh)
        unseen = unseen_ids((self.state.memory, self._met), keys, key_index, ids)
        taken = fresh[unseen]
        self._take(arrivals, rows, positions, taken)
        if taken.size:
            save_ids(self._met, keys, key_index[unseen], ids[unseen])
            self._open.update(to_array(positions[taken]))
        self._offered = max(self._offered, int(positions.max()))
        return Offered(taken.size, fresh.size - taken.size, int(released.sum()))

    def advance(self, now_ms: int, max_messages: int = 1000) -> Batch | None:
        """Return what is due, and hold it as in flight; None where nothing is.

        Args:
            now_ms: nothing that is due later comes out.
            max_messages: at most so many, from 1. What was given back comes before all else.

        Raises:
            DamagedSegmentError: a spill file is gone: start again from the log.
        """
        due = self.next_due_ms()
        if due is None or due > now_ms or max_messages < 1:
            return None
        back: list[tuple[int, int, MessageRecord]] = []
        while self._returned and self._returned[0][0] <= now_ms and len(back) < max_messages:
            back.append(heapq.heappop(self._returned))
        dues, positions, records = self._waiting.take(now_ms, max_messages - len(back))
        if back:
            dues = np.concatenate([np.array([row[0] for row in back], dtype=np.int64), dues])
            positions = np.concatenate(
                [np.array([row[1] for row in back], dtype=np.int64), positions]
            )
            records = [row[2] for row in back] + records
            order = np.lexsort((positions, dues))
            dues, positions = dues[order], positions[order]
            records = [records[index] for index in order.tolist()]
        if not records:
            return None
        ledgers, entries = unpack(positions)
        batch = Batch(self._next_number, dues, ledgers, entries, positions, records)
        self._next_number += 1
        self._batches[batch.number] = batch
        return batch

    def intent(
        self,
        batch: Batch,
        outlets: Sequence[tuple[str, int]] = (),
        outlet_index: npt.ArrayLike = (),
    ) -> Intent:
        """Return what is to be logged before a batch is published.

        Args:
            batch: from ``advance``.
            outlets: (name, first sequence id) of the producers, where the broker removes copies;
                a first id is at least ``state.sequences`` (1 for a new outlet).
            outlet_index: for each message the index of its outlet, or ``len(outlets)`` where it
                will be set aside, shape (n,).

        Raises:
            InvalidInputError: it has an intent already, an outlet's ids were used before, or the
                outlet has an intent that is to be settled first.
        """
        self._batch(batch.number)
        if batch.number in self.state.unfinished:
            raise InvalidInputError(f"batch {batch.number} has an intent already")
        if len({name for name, _ in outlets}) < len(outlets):
            raise InvalidInputError("an outlet is given twice")
        for name, first in outlets:
            least = self.state.sequences.get(name, 1)
            if first < least:
                raise InvalidInputError(
                    f"sequence id {first} of outlet {name} was used before; begin at {least}"
                )
            if any(
                name == each for intent in self._unsettled.values() for each, _ in intent.outlets
            ):
                raise InvalidInputError(
                    f"outlet {name} has an intent from before the takeover; settle it first"
                )
        keys, key_index, ids = id_columns(batch.records, None)
        intent = Intent(
            batch.number,
            batch.positions,
            tuple(keys),
            key_index.astype(np.uint16 if len(keys) < 1 << 16 else np.uint32),
            ids,
            tuple(outlets),
            np.asarray(outlet_index, dtype=np.uint16),
        )
        self.state.apply(intent)
        return intent

    def confirm(self, number: int, held: npt.ArrayLike = ()) -> Commit:
        """Return what is to be logged once all of an intent is confirmed, in any order of numbers.

        Args:
            number: the batch's.
            held: packed positions of what was set aside in the held topic instead.

        Raises:
            InvalidInputError: no such batch, it has no intent, or ``held`` are not of it.
        """
        batch = self._batch(number)
        if number not in self.state.unfinished:
            raise InvalidInputError(f"batch {number} has no intent; log one before publishing")
        aside = np.asarray(held, dtype=np.int64)
        if aside.size and not np.isin(aside, batch.positions).all():
            raise InvalidInputError(f"a held position is not in batch {number}")
        done = Commit(number, aside)
        self.state.apply(done)
        del self._batches[number]
        self._close(batch.positions)
        return done

    def give_back(self, number: int) -> Resolved | None:
        """Make a batch pending again of which nothing was sent.

        Returns:
            None where the batch has no intent. Otherwise what is to be logged, and confirmed
            before anything more is published through the intent's outlets: a takeover that finds
            the intent, and a later sequence id at the broker, takes all of it for stored.

        Raises:
            InvalidInputError: no such batch.
        """
        batch = self._batch(number)
        del self._batches[number]
        columns = zip(batch.due_ms.tolist(), batch.positions.tolist(), batch.records, strict=True)
        for row in columns:
            heapq.heappush(self._returned, row)
        if number not in self.state.unfinished:
            return None
        settled = Resolved(number, np.empty(0, dtype=np.int64))
        self.state.apply(settled)
        return settled

    def settle(self, number: int, released_mask: npt.ArrayLike) -> Resolved:
        """Close an intent of the log that has no done; what was not stored is pending again.

        Args:
            number: one of ``state.unfinished`` at the start.
            released_mask: which of its messages are stored, shape (n,).

        Raises:
            InvalidInputError: no such intent, or another shape.
        """
        intent = self._unsettled.get(number)
        if intent is None:
            raise InvalidInputError(f"there is no intent {number} to settle")
        mask = np.asarray(released_mask, dtype=np.bool_)
        if mask.shape != intent.positions.shape:
            raise InvalidInputError(
                f"intent {number} has {intent.positions.size} messages, the mask {mask.size}"
            )
        settled = Resolved(number, intent.positions[mask])
        self.state.apply(settled)
        del self._unsettled[number]
        self._pinned = self._pinned_positions()
        self._close(settled.released)
        for position in settled.released.tolist():
            self._parked.pop(position, None)
        for position in intent.positions.tolist():
            if position in self._parked and position not in self._pinned:
                due, record = self._parked.pop(position)
                heapq.heappush(self._returned, (due, position, record))
        return settled

    def mark(self) -> int:
        """Return the packed position below which everything is released; it never goes back."""
        mark = self._offered + 1
        if self._open:
            mark = min(mark, self._open.min())
        if self._pinned:
            mark = min(mark, self._pinned.min())
        self._floor = max(self._floor, mark)
        return self._floor

    def checkpoint(self) -> LowWatermark | None:
        """Return the mark to be logged, None where it has not moved."""
        position = self.mark()
        if position <= self.state.mark:
            return None
        mark = LowWatermark(position)
        self.state.apply(mark)
        return mark

    def next_due_ms(self) -> int | None:
        """Return the due time of what comes out next, None where nothing is pending."""
        due = self._waiting.next_due_ms()
        if not self._returned:
            return due
        returned = self._returned[0][0]
        return returned if due is None else min(due, returned)

    def counts(self, edges_ms: npt.ArrayLike) -> Int64s:
        """Count what is pending between given times.

        Args:
            edges_ms: ascending times, ms, shape (k + 1,), k from 1.

        Returns:
            Shape (k,): how many are due in [edges_ms[i], edges_ms[i + 1]).
        """
        returned = np.array([row[0] for row in self._returned], dtype=np.int64)
        return self._waiting.counts(edges_ms, returned)

    def rows_between(
        self,
        due_from_ms: int,
        due_to_ms: int,
        attribute_min: float = -np.inf,
        attribute_max: float = np.inf,
    ) -> pa.Table:
        """Return what is pending in a range, as ``PendingSegments.rows_between``."""
        segments = self._waiting.segments
        return segments.rows_between(due_from_ms, due_to_ms, attribute_min, attribute_max)

    def average_between(
        self,
        due_from_ms: int,
        due_to_ms: int,
        attribute_min: float = -np.inf,
        attribute_max: float = np.inf,
    ) -> float | None:
        """Return the average attribute of a range, as ``PendingSegments.average_between``."""
        segments = self._waiting.segments
        return segments.average_between(due_from_ms, due_to_ms, attribute_min, attribute_max)

    def close(self) -> None:
        """Delete the spill files; what is pending is read again from the topic."""
        self._waiting.segments.close()

    def _without_known(self, positions: Int64s, candidates: npt.NDArray[np.bool_]) -> Int64s:
        """Return the indices of candidates that are not pending yet, each position once."""
        index = np.flatnonzero(candidates)
        some = positions[index]
        if some.size > 1 and not bool((some[1:] > some[:-1]).all()):
            some, first = np.unique(some, return_index=True)
            index = index[first]
        if some.size and int(some[0]) <= self._offered:
            index = index[~contained(self._open, some)]
        return np.sort(index)

    def _take(self, arrivals: Arrivals, rows: Rows, positions: Int64s, taken: Int64s) -> None:
        """Put rows where they wait; raises before anything is changed."""
        records = arrivals.records
        if self._pinned:
            parked = np.array([x in self._pinned for x in positions[taken].tolist()], np.bool_)
        else:
            parked = np.zeros(taken.size, dtype=np.bool_)
        stored = taken[~parked]
        if stored.size:
            some = rows[:, stored] if stored.size < rows.shape[1] else rows
            values: npt.NDArray[np.float64] | None = None
            if arrivals.attribute is not None:
                values = np.asarray(arrivals.attribute, dtype=np.float64)[stored]
            self._waiting.put(some, [tuple(records[index]) for index in stored.tolist()], values)
        for index in taken[parked].tolist():
            self._parked[int(positions[index])] = int(rows[DUE, index]), tuple(records[index])

    def _batch(self, number: int) -> Batch:
        batch = self._batches.get(number)
        if batch is None:
            raise InvalidInputError(f"there is no batch {number} in flight")
        return batch

    def _close(self, positions: Int64s) -> None:
        discard = self._open.discard
        for position in positions.tolist():
            discard(position)

    def _pinned_positions(self) -> BitMap64:
        pinned = BitMap64()
        for intent in self._unsettled.values():
            pinned.update(to_array(intent.positions))
        pinned -= self.state.released
        pinned.remove_range(0, self.state.mark)
        return pinned
