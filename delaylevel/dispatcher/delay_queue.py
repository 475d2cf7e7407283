"""The dispatcher's state machine: each message comes out once, when it is due."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from delaylevel.cluster.targets.pool import TargetKey
from delaylevel.dispatcher.cancellations import Cancellations, RecentReleases
from delaylevel.dispatcher.journal.records import (
    UNCERTAIN,
    Commit,
    Disposition,
    DispositionKind,
    Intent,
    LowWatermark,
    Paused,
    Refused,
    Released,
    Resolved,
    pack,
)
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.errors import DelayLevelError, InvalidInputError
from delaylevel.model.clock import Clock
from delaylevel.structures.id_columns import IdColumns, Mask, to_array
from delaylevel.structures.rows import DUE, ENTRY, LEDGER, Int64s, Rows
from delaylevel.structures.segments.pending import PendingSegments

from .pending import OpenMessages, PendingIndex, WaitingQueues
from .record import (
    Cancellation,
    Columns,
    DueBatch,
    FetchedBatch,
    MessageRecord,
    OfferResult,
    as_plain,
    joined,
)

# A call that finds only cancelled messages takes this many times the wanted number of them.
_LOOKS = 20


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

    def keep(self, position: int, due_ms: int, record: MessageRecord) -> None:
        """Keep a withheld message that was read again."""
        # It is not among the pending ones: if the broker has it, nothing must publish it again.
        self._offered_again[position] = due_ms, record

    def loose(self) -> Columns:
        """Return due times, packed positions and records of the messages that were read again."""
        return self._columns(list(self._offered_again))

    def _columns(self, positions: list[int]) -> Columns:
        found = [self._offered_again[position] for position in positions]
        due_ms = np.array([due for due, _ in found], dtype=np.int64)
        return due_ms, np.array(positions, dtype=np.int64), [record for _, record in found]

    def resolve(
        self, number: int, stored: npt.ArrayLike, free_number: int
    ) -> tuple[list[Intent | Resolved], IdColumns, Columns]:
        """Close an intent.

        Args:
            stored: which of its messages the broker has stored, shape (n,).
            free_number: a number that no intent has.

        Returns:
            The records, the last of which is its own; the IDs of the messages that are stored; and
            those that are pending again.
        """
        intent, mask = self._intents[number], np.asarray(stored, dtype=np.bool_)
        records: list[Intent | Resolved] = []
        if intent.target and not mask.all():
            # The client of an earlier owner sends the others again once the name of its producer is
            # free, and no higher sequence ID came. So an intent of them stays open until they are
            # released again, and they do not expire before.
            left, ids = intent.positions[~mask], intent.ids.at(~mask)
            uncertain = Intent(free_number, left, ids, first=UNCERTAIN)
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
        columns = self._columns(pending)
        for position in pending:
            del self._offered_again[position]
        return columns

    def reopened(self, positions: Int64s) -> Mask:
        """Return which messages an earlier owner may have sent, or may still send, shape (n,)."""
        found = np.zeros(positions.size, dtype=np.bool_)
        for intent in self._reopened:
            found |= np.isin(positions, intent.positions)
        # There are few such intents, and only after a takeover: they need no index.
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


class DelayQueue:
    """The messages of one window partition: offered in any order, released once, when due.

    A method that returns a journal record has already applied it to the state. The caller appends
    the records to the journal in the order in which the methods returned them, and keeps the order
    in time that `delaylevel.dispatcher.journal` describes.

    Not thread-safe.

    Attributes:
        pending: the pending messages; ``pending.segments`` answers queries about them.
        waiting: the due messages that wait for their target.
        open: all that was offered and is not released.
        unresolved: the intents from before the takeover.
    """

    def __init__(
        self,
        state: JournalState,
        segments: PendingSegments,
        *,
        clock: Clock,
        overflow: Callable[[], PendingSegments] | None = None,
        attribute: str | None = None,
        releases: RecentReleases | None = None,
        grace_ms: int = 60_000,
    ) -> None:
        """Create a queue without pending messages.

        Args:
            state: state at the end of the journal, owned by the queue from now on. The open
                intents in it have to be resolved.
            segments: empty segments, owned by the queue from now on.
            overflow: function that returns further empty segments, for the due messages of a target
                that takes them slowly; None to keep these in memory.
            attribute: as for `PendingIndex`.
            grace_ms: time after its due time until which the message of a cancellation is waited
                for, ms.
        """
        self.state = state
        self.pending = PendingIndex(segments, attribute)
        self.open = OpenMessages(state.low_watermark)
        self._launched = 0  # messages of the batches in `open.launched`
        self._clock = clock
        self._numbers = itertools.count(state.next_number)
        self.waiting = WaitingQueues(
            clock, None if overflow is None else lambda: PendingIndex(overflow(), attribute)
        )
        self.unresolved = UnresolvedIntents(state)
        self._releases = releases or RecentReleases()
        self.cancelling = Cancellations(
            state,
            self.pending,
            self.open,
            self._releases,
            clock,
            grace_ms=grace_ms,
        )

    def __len__(self) -> int:
        """Return the number of pending messages, without those in flight and cancelled ones."""
        return len(self.pending) + len(self.waiting) - self.cancelling.passed_over

    @property
    def in_flight(self) -> int:
        """Number of messages in batches, or offered again while their intent is unresolved."""
        return self._launched + len(self.unresolved)

    @property
    def memory_bytes(self) -> int:
        """Approximate memory in use, without messages in flight."""
        ids = len(self.open.ids) + len(self.state.memory)
        return self.pending.memory_bytes + self.waiting.memory_bytes + 8 * ids

    def offer(self, fetched: FetchedBatch) -> OfferResult:
        """Add messages from the window topic, also beyond the memory budget.

        Args:
            fetched: messages in any order. Successive calls follow the order of the topic.
        """
        rows = fetched.rows()
        if not len(fetched):
            return OfferResult(0, 0, 0)
        positions = pack(rows[LEDGER], rows[ENTRY])
        # By position first: a released dead letter has no ID in the memory, and is read again after
        # a takeover.
        released = self.state.is_released(positions)
        unknown = self.open.unknown(positions, ~released)
        requests = unknown[:0]
        if fetched.cancellations:
            asks = np.array([type(each) is Cancellation for each in fetched.records])[unknown]
            requests, unknown = unknown[asks], unknown[~asks]
        ids = IdColumns.of(fetched.records, unknown)
        unseen = ids.unseen_in([self.state.memory, self.open.ids, self.state.cancelled])
        tracked = unknown[unseen]
        self._add(fetched, rows, positions, tracked)
        if tracked.size:
            ids.at(unseen).save_in(self.open.ids)
            self.open.add(positions[tracked])
            self.cancelling.take_arrived(rows[DUE], positions, fetched.records, tracked)
        if requests.size:
            self.open.add(positions[requests])
            for each in requests.tolist():
                record = fetched.records[each]
                self.cancelling.add(Cancellation._make(record), int(positions[each]))
        # Last, because the low watermark may then pass what is not open: a copy, or a released one.
        self.open.last_offered = max(self.open.last_offered, int(positions.max()))
        return OfferResult(tracked.size, unknown.size - tracked.size, int(released.sum()))

    def advance(self, now_ms: int, max_messages: int = 1000) -> DueBatch | None:
        """Take messages that are due; None if there are none.

        They are launched, put back, or put into a queue of `waiting` next. After many cancelled
        ones, it leaves the next ones to the next call.

        Raises:
            DamagedSegmentError: a spill file is gone. Start again from the journal.
        """
        parts: list[Columns] = []
        left = max_messages
        for _ in range(_LOOKS):
            due_ms = self.pending.next_due_ms
            if left <= 0 or due_ms is None or due_ms > now_ms:
                break
            part = self.cancelling.filter(self.pending.take(now_ms, left))
            if part[2]:
                parts.append(part)
            left -= len(part[2])
        return DueBatch(*joined(parts)) if parts else None

    def put_back(self, batch: DueBatch) -> None:
        """Let the messages of a batch that is not launched be pending again."""
        self.pending.put_again(batch.due_ms, batch.positions, batch.records)

    def advance_waiting(self, target: TargetKey, max_messages: int) -> DueBatch | None:
        """Take the first messages that wait for a target; None if all of them are cancelled.

        Raises:
            DamagedSegmentError: a spill file is gone. Start again from the journal.
        """
        part = self.cancelling.filter(self.waiting.take(target, max_messages))
        return DueBatch(*part) if part[2] else None

    def launch(self, batch: DueBatch) -> None:
        """Take note that a batch without sequence IDs is sent; it cannot be cancelled any more."""
        self._launch(batch, IdColumns.of(batch.records))

    def intent(self, batch: DueBatch, target: str = "", first: int = 0) -> Intent:
        """Launch a batch with sequence IDs; return its intent, to be confirmed before it is sent.

        Args:
            target: name of the target; empty if all messages will be set aside.
            first: sequence ID of the first message.

        Raises:
            InvalidInputError: the broker could take a message for one that it has stored.
        """
        # The broker drops a message whose sequence ID is not above its last one, and confirms it:
        # the message would be lost.
        if target and first < self.state.next_sequence(target):
            raise InvalidInputError(f"sequence ID {first} of target {target} was used before")
        # A later sequence ID makes everything before it look stored.
        if target and any(each.target == target for each in self.unresolved.intents):
            raise InvalidInputError(f"target {target} has an intent from before the takeover")
        ids = IdColumns.of(batch.records)
        self._launch(batch, ids)
        intent = Intent(batch.number, batch.positions, ids, target, first)
        self.state.apply(intent)
        return intent

    def commit(
        self, number: int, held: npt.ArrayLike = (), at_ms: int | None = None
    ) -> Released | Commit:
        """Release a launched batch whose messages are all confirmed; return the record of that.

        Batches may be committed in any order.

        Args:
            held: packed positions of the messages that were set aside and may come back.
            at_ms: time of the release, ms since the epoch; now if None.
        """
        batch, ids = self.open.launched[number]
        held_positions = np.asarray(held, dtype=np.int64)
        record: Released | Commit = Released(batch.positions, ids, held_positions)
        if number in self.state.open_intents:
            record = Commit(number, held_positions)
        self._release(record, [number], batch.positions, ids, at_ms)
        return record

    def commit_all(self, numbers: Sequence[int], at_ms: int | Int64s | None = None) -> Released:
        """Release launched batches without sequence IDs, none of whose messages may come back.

        The record is one for all of them, and costs as much as a message. There may be a time for
        each message. Otherwise as `commit`.
        """
        batches, columns = zip(*map(self.open.launched.__getitem__, numbers), strict=True)
        positions = np.concatenate([batch.positions for batch in batches])
        record = Released(positions, IdColumns.join(columns), positions[:0])
        self._release(record, numbers, positions, record.ids, at_ms)
        return record

    def dispose(self, number: int, kind: DispositionKind, index: Sequence[int]) -> Disposition:
        """Return the record of messages that are not published, to precede their commit."""
        _, ids = self.open.launched[number]
        record = Disposition(kind, 0, ids.at(np.asarray(index, dtype=np.int64)))
        self.state.apply(record)
        return record

    def refuse(self, positions: Int64s) -> Refused:
        """Return the record of messages that will be set aside, to be confirmed before they are."""
        record = Refused(positions)
        self.state.apply(record)
        return record

    def pause(self, target: str) -> Paused:
        """Return the record of a paused target whose first message waits."""
        return self._pause({**self.state.paused, target: self.state.sent_until_ms})

    def resume(self, targets: Collection[str]) -> Paused | None:
        """Return the record to be confirmed before messages are sent to targets; None for none."""
        rest = {name: at for name, at in self.state.paused.items() if name not in targets}
        return None if len(rest) == len(self.state.paused) else self._pause(rest)

    def refused_earlier(self, batch: DueBatch) -> list[int]:
        """Return the indices of the messages that their target refused before a takeover."""
        refused = self.state.refused
        positions = batch.positions.tolist() if refused else []
        return [index for index, each in enumerate(positions) if each in refused]

    def resolve(self, number: int, stored: npt.ArrayLike) -> list[Intent | Resolved]:
        """Close an intent from before the takeover; messages not ``stored`` are pending again."""
        records, ids, again = self.unresolved.resolve(number, stored, next(self._numbers))
        for record in records:
            if isinstance(record, Resolved):
                self.open.discard(record.released)
        self._forget(ids)
        self.pending.put_again(*again)
        return records

    def reopen(self, number: int) -> None:
        """Let the messages of an intent be pending again although they may have been sent."""
        # The intent stays open until they are released again, so that none of them expires.
        self.pending.put_again(*self.unresolved.reopen(number))

    def checkpoint(self) -> LowWatermark | None:
        """Return the low watermark as a record, None if it has not moved."""
        position = self.open.low_watermark()
        if position <= self.state.low_watermark:
            return None
        record = LowWatermark(position)
        self.state.apply(record)
        return record

    def close(self) -> None:
        """Delete the spill files. The topic still has the pending messages."""
        self.pending.segments.close()
        self.waiting.close()

    def _add(self, fetched: FetchedBatch, rows: Rows, positions: Int64s, tracked: Int64s) -> None:
        """Add the tracked rows, except those in unresolved intents."""
        records = fetched.records
        withheld = np.zeros(tracked.size, dtype=np.bool_)
        if self.unresolved.withheld:
            withheld[:] = [each in self.unresolved.withheld for each in positions[tracked].tolist()]
        index = tracked[~withheld]
        if index.size:
            some = rows[:, index] if index.size < rows.shape[1] else rows
            # The messages are in memory already. Refused ones would have to wait there, too.
            self.pending.put(some, [records[each] for each in index.tolist()], force=True)
        for each in tracked[withheld].tolist():
            record = as_plain(records[each])
            self.unresolved.keep(int(positions[each]), int(rows[DUE, each]), record)

    def _pause(self, targets: Mapping[str, int]) -> Paused:
        record = Paused(targets)
        self.state.apply(record)
        return record

    def _launch(self, batch: DueBatch, ids: IdColumns) -> None:
        # Every way out of the queue leads through here, whatever has filtered it before. To publish
        # what an outcome calls cancelled is worse than to publish it late.
        if self.cancelling.cancelled and ids.seen_in(self.state.cancelled).any():
            raise DelayLevelError(
                "a cancelled message was about to be published; it was not: start again from the "
                "journal, and report this as a defect"
            )
        batch.number = next(self._numbers)
        self.open.launched[batch.number] = batch, ids
        self._launched += len(batch)
        # For the next Paused record: what is due later than this was not sent before the pause.
        state = self.state
        state.sent_until_ms = max(state.sent_until_ms, int(batch.due_ms.max()))

    def _release(
        self,
        record: Released | Commit,
        numbers: Iterable[int],
        positions: Int64s,
        ids: IdColumns,
        at_ms: int | Int64s | None,
    ) -> None:
        self.state.apply(record)
        self._releases.add(ids, self._clock.now_ms() if at_ms is None else at_ms)
        for number in numbers:
            batch, _ = self.open.launched.pop(number)
            self._launched -= len(batch)
        self.open.discard(positions)
        self._forget(ids)

    def _forget(self, ids: IdColumns) -> None:
        """Forget released messages."""
        ids.remove_from(self.open.ids)
        self.cancelling.take_released(ids)
