"""The dispatcher's state machine: what is offered comes out once, when it is due."""

from __future__ import annotations

import heapq
import marshal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyroaring import BitMap64

from ._timebucket_codec import DUE, ENTRY, LEDGER, Int64s, Rows, sort_rows
from ._timebucket_front import Front
from ._window_ids import contained, distinct, save_ids, to_array, unseen_ids
from ._window_records import ENTRY_BITS
from .clock import Clock
from .dedup import Deduplicator
from .errors import DelayLevelError, InvalidInputError
from .releaselog import Done, Intent, Mark, ReleaseState, Settled, pack, unpack
from .segments import PendingSegments
from .timebucket import TimeBucketTracker

__all__ = ["Arrivals", "Batch", "MessageRecord", "Offered", "Window"]

#: Values that ``marshal`` takes; the first two are (id_key, id).
MessageRecord: TypeAlias = "tuple[Any, ...]"

#: The format without references between values: faster for records that share none.
_MARSHAL = 2
#: What a row costs beside the segments, about: the tracker, the set of open positions, the ids.
_ROW_BYTES = 20


@dataclass(slots=True)
class Arrivals:
    """Messages of a window topic as columns of one length.

    Attributes:
        ledger_ids: of their positions.
        entry_ids: entry << 10 | batch index, 0 where it was not batched.
        due_ms: exact due times.
        records: tuples, named ones too, of values that ``marshal`` takes; the first two are
            (id_key, id), the key ``""`` for what has no copies. They come out as plain tuples.
        attribute: a number for each, for the questions about what is pending; the size of the
            stored record where None.
    """

    ledger_ids: list[int] = field(default_factory=list)
    entry_ids: list[int] = field(default_factory=list)
    due_ms: list[int] = field(default_factory=list)
    records: list[MessageRecord] = field(default_factory=list)
    attribute: Sequence[float] | None = None

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.records)


class Offered(NamedTuple):
    """What became of arrivals; the rest of them were pending already.

    Attributes:
        tracked: will come out.
        duplicates: copies of what was released, or is pending under another position.
        released: were released already.
    """

    tracked: int
    duplicates: int
    released: int


@dataclass(frozen=True, eq=False)
class Batch:
    """What is due, in the order (due, position).

    Attributes:
        number: of the batch, for ``confirm`` and ``give_back``.
        due_ms, ledger_ids, entry_ids: shape (n,).
        positions: packed, shape (n,).
        records: n of them.
    """

    number: int
    due_ms: Int64s
    ledger_ids: Int64s
    entry_ids: Int64s
    positions: Int64s
    records: list[MessageRecord]

    def __len__(self) -> int:
        """Return how many messages it holds."""
        return len(self.records)


class Window:
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
        state: ReleaseState,
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
        self._segments = segments
        self._clock = clock
        self._lowest_due: int | None = None
        if tracker is None:
            tracker = TimeBucketTracker(precision_ms=1, clock=self._tracker_now)
        self._tracker = tracker
        if self._tracker.precision_ms != 1 or segments._mask != -1:
            raise InvalidInputError("tracker and segments must have precision_ms=1")
        if len(self._tracker) or len(segments):
            raise InvalidInputError("tracker and segments must be empty")
        self._late = Front()  # what a tracker with a clock of its own has refused
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
        return len(self._segments) + len(self._returned)

    @property
    def in_flight(self) -> int:
        """How many are in batches, or in intents that are to be settled and were offered again."""
        return sum(map(len, self._batches.values())) + len(self._parked)

    @property
    def memory_bytes(self) -> int:
        """About what is held in memory; what is in flight is left out."""
        rows = len(self._tracker) + self._late.rows
        ids = len(self._met) + len(self.state.memory)
        return self._segments.memory_bytes + _ROW_BYTES * rows + 8 * ids

    def offer(self, arrivals: Arrivals) -> Offered:
        """Take in messages that were read from the window topic.

        Args:
            arrivals: in any order within themselves; calls follow the order of the topic.

        Raises:
            InvalidInputError: columns that differ in length, a position that cannot be packed, a
                record that cannot be stored.
            IntakeStoppedError: the disk is full. In either case nothing was taken.
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
        keys, key_index, ids = _id_columns(arrivals.records, fresh)
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
        dues, positions, payloads = self._read(now_ms, max_messages - len(back))
        records = [marshal.loads(payload) for payload in payloads]
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
        keys, key_index, ids = _id_columns(batch.records, None)
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

    def confirm(self, number: int, held: npt.ArrayLike = ()) -> Done:
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
        done = Done(number, aside)
        self.state.apply(done)
        del self._batches[number]
        self._close(batch.positions)
        return done

    def give_back(self, number: int) -> Settled | None:
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
        settled = Settled(number, np.empty(0, dtype=np.int64))
        self.state.apply(settled)
        return settled

    def settle(self, number: int, released_mask: npt.ArrayLike) -> Settled:
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
        settled = Settled(number, intent.positions[mask])
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

    def checkpoint(self) -> Mark | None:
        """Return the mark to be logged, None where it has not moved."""
        position = self.mark()
        if position <= self.state.mark:
            return None
        mark = Mark(position)
        self.state.apply(mark)
        return mark

    def next_due_ms(self) -> int | None:
        """Return the due time of what comes out next, None where nothing is pending."""
        dues = [self._tracker.next_deliver_at_ms(), self._late.min_due()]
        dues.append(self._returned[0][0] if self._returned else None)
        return min((due for due in dues if due is not None), default=None)

    def counts(self, edges_ms: npt.ArrayLike) -> Int64s:
        """Count what is pending between given times.

        Args:
            edges_ms: ascending times, ms, shape (k + 1,), k from 1.

        Returns:
            Shape (k,): how many are due in [edges_ms[i], edges_ms[i + 1]).
        """
        counts = self._tracker.counts(edges_ms)
        edges = np.asarray(edges_ms, dtype=np.int64)
        dues = [rows[DUE] for rows in self._late.parts()]
        dues.append(np.array([row[0] for row in self._returned], dtype=np.int64))
        index = edges.searchsorted(np.concatenate(dues), side="right")
        found: Int64s = counts + np.bincount(index, minlength=edges.size + 1)[1:-1]
        return found

    def rows_between(
        self,
        due_from_ms: int,
        due_to_ms: int,
        attribute_min: float = -np.inf,
        attribute_max: float = np.inf,
    ) -> pa.Table:
        """Return what is pending in a range, as ``PendingSegments.rows_between``."""
        return self._segments.rows_between(due_from_ms, due_to_ms, attribute_min, attribute_max)

    def average_between(
        self,
        due_from_ms: int,
        due_to_ms: int,
        attribute_min: float = -np.inf,
        attribute_max: float = np.inf,
    ) -> float | None:
        """Return the average attribute of a range, as ``PendingSegments.average_between``."""
        return self._segments.average_between(due_from_ms, due_to_ms, attribute_min, attribute_max)

    def close(self) -> None:
        """Delete the spill files; what is pending is read again from the topic."""
        self._segments.close()

    def _tracker_now(self) -> int:
        """Return the time, but no later than just before what is being added: all is tracked."""
        now = self._clock.now_ms()
        return now if self._lowest_due is None else min(now, self._lowest_due - 1)

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
            try:
                payloads = [
                    marshal.dumps(tuple(records[index]), _MARSHAL) for index in stored.tolist()
                ]
            except ValueError as error:
                raise InvalidInputError(
                    f"a record of an arrival cannot be stored: {error}"
                ) from None
            some = rows[:, stored] if stored.size < rows.shape[1] else rows
            values: npt.NDArray[np.float64] | None = None
            if arrivals.attribute is not None:
                values = np.asarray(arrivals.attribute, dtype=np.float64)[stored]
            self._segments.append(some[DUE], some[LEDGER], some[ENTRY], payloads, values)
            self._track(some)
        for index in taken[parked].tolist():
            self._parked[int(positions[index])] = int(rows[DUE, index]), tuple(records[index])

    def _track(self, rows: Rows) -> None:
        dues = rows[DUE]
        self._lowest_due = int(dues.min())
        refused = dues.size - self._tracker.add_messages(rows[LEDGER], rows[ENTRY], dues)
        self._lowest_due = None
        if refused:  # the earliest of them
            edge = np.partition(dues, refused - 1)[refused - 1]
            self._late.add(sort_rows(rows[:, dues <= edge]))

    def _read(self, now_ms: int, rows: int) -> tuple[Int64s, Int64s, list[bytes]]:
        """Take what is due from the segments, and the same from what says that it is pending."""
        found = self._segments.read_due(now_ms, rows)
        size = len(found.payloads)
        positions = found.ledger_ids << ENTRY_BITS | found.entry_ids
        late = np.empty(0, dtype=np.int64)
        if size and self._late.rows:
            last = int(found.due_ms[-1]), int(found.ledger_ids[-1]), int(found.entry_ids[-1]) + 1
            part = self._late.take(size, last)
            late = part[LEDGER] << ENTRY_BITS | part[ENTRY]
        ledgers, entries = self._tracker.get_scheduled_messages(size - late.size, now_ms)
        tracked = ledgers << ENTRY_BITS | entries
        if late.size:
            agree = np.array_equal(np.sort(np.concatenate((late, tracked))), np.sort(positions))
        else:
            agree = np.array_equal(tracked, positions)
        if not agree:
            raise DelayLevelError(
                f"tracker and segments disagree on what is due at {now_ms}; nothing of it was "
                "released: start again from the log, and report this as a defect"
            )
        return found.due_ms, positions, found.payloads

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


def _id_columns(
    records: list[MessageRecord], index: Int64s | None
) -> tuple[list[str], npt.NDArray[np.integer], Int64s]:
    """Return distinct keys, the index of each record's key, and the ids."""
    if index is not None and index.size < len(records):
        records = [records[each] for each in index.tolist()]
    try:
        keys, key_index = distinct([record[0] for record in records])
        return keys, key_index, np.array([record[1] for record in records], dtype=np.int64)
    except (IndexError, TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(
            f"a record must begin with (id_key: str, id: int below 2**63): {error}"
        ) from None
