"""The dispatcher's state machine: a message comes out once, when it is due, or is cancelled.

Cancellations
-------------
A decision is a journal record before it is an outcome. `Cancellations` decides and makes the
records; it does no input or output. A cancelled message is not searched for: it stays where it is,
and is dropped by its ID as soon as it is taken out, for whatever reason. After a takeover, it is a
copy of a known message.

A message is cancelled only if neither this owner nor an earlier one can have sent it: it is
pending, and was not due some seconds after the takeover, nor after the latest record of an earlier
owner, by its clock. An owner sends only what is due, and only within a second after its journal
confirmed a record. So what was due later was not sent by an earlier owner, not even by one that was
suspended or cut off, or whose clock was ahead. Nor was what is stored 5 s after the takeover: no
earlier owner has read it. A clock that was days ahead makes nothing unclear that comes later.

For the ID of a cancellation, the first of these that applies:

==========================================  =======================================================
the ID                                      decision
==========================================  =======================================================
is cancelled                                ``cancelled``, again
was held, dropped or expired                ``unknown``, with the reason
was released                                ``too late``, with the time if it is known
is being published                          none: it waits for the release
was refused by its target before            none: it waits, because the held topic may have it
was due before the takeover, or up to       none: it waits for the release, because an earlier
5 s after it, by the clock of either        owner may have sent it. While its target is paused,
owner, and was stored by then               this holds only for what was due before the pause.
is pending                                  ``cancelled``, after a Disposition record
is anything else                            none: it waits for the message until its due time plus
                                            a grace period, then ``unknown``. Everything that was
                                            stored before that time must have been read.
==========================================  =======================================================

A cancellation that waits for its message is a row among the pending messages, which may be on disk.
Only its ID is kept in memory, so that the message is cancelled when it arrives.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from delaylevel.cluster.targets.pool import TargetKey
from delaylevel.dispatcher.journal.records import (
    UNCERTAIN,
    Commit,
    Disposition,
    DispositionKind,
    Intent,
    LowWatermark,
    Paused,
    Record,
    Refused,
    Released,
)
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.errors import DelayLevelError, InvalidInputError
from delaylevel.model.clock import Clock
from delaylevel.model.outcome import Outcome, OutcomeStatus
from delaylevel.structures.id_columns import (
    IdColumns,
    Identity,
    Mask,
    RecentTimes,
    contained,
    to_array,
)
from delaylevel.structures.id_set import RemovableIds
from delaylevel.structures.rows import Int64s
from delaylevel.structures.segments.pending import PendingSegments

from .pending import PendingIndex, WaitingQueues
from .record import Batch, Cancellation, WindowMessage, as_message

#: Time after a takeover, and after the latest record, up to which an earlier owner may send what is
#: due, ms: one second after that record, and some more to be sure.
UNCLEAR_MS = 5_000
_REASONS: dict[DispositionKind, str] = {
    "held": "its target could not be written: the message is held, or was",
    "dropped": "dropped: its target does not exist",
    "expired": "expired",
}
# Number of reads of a call that finds only cancelled messages.
_LOOKS = 20


@dataclass(slots=True)
class CancelRequest:
    """A cancellation, with its outcome once it is decided."""

    cancellation: Cancellation
    # Packed; None if it is among the pending messages, too: then another request follows for it.
    position: int | None
    deadline_ms: int
    waited: bool = False  # for its message, until its time was over
    # Everything that was stored before is known to be read, ms since the epoch; 0 if not known.
    read_ms: int = 0
    outcome: Outcome | None = None


class Cancellations:
    """The cancellations of a delay queue; those that wait are among its pending messages."""

    def __init__(
        self, queue: DelayQueue, releases: RecentTimes, clock: Clock, grace_ms: int
    ) -> None:
        self._queue = queue
        self._state = queue.state
        self._releases = releases
        self._clock = clock
        self._grace_ms = grace_ms
        self._unclear_until_ms = queue.state.sent_until_ms  # by earlier owners
        self.waiting = 0  # number of cancellations that wait for their messages
        self.cancelled = 0  # number of cancelled messages among the pending or waiting ones
        self._undecided: list[CancelRequest] = []
        self._unproven: list[CancelRequest] = []
        # By the message that is being published, or was perhaps.
        self._awaited: dict[Identity, list[CancelRequest]] = {}
        # IDs for which cancellations wait among the pending messages, with their numbers. Two for
        # one ID may differ in the due time: the first one that ends must not end the wait of the
        # other one.
        self._early: Counter[Identity] = Counter()
        # IDs of pending messages that an earlier owner may have sent or set aside.
        self._unclear = RemovableIds()

    @property
    def passed_over(self) -> int:
        """Number of pending records that are never published."""
        return self.cancelled + self.waiting

    # -- into the queue

    def add(self, cancellation: Cancellation, position: int | None, waited: bool = False) -> None:
        """Add a cancellation that `decide` decides on; arguments as for a `CancelRequest`."""
        deadline_ms = cancellation.due_ms + self._grace_ms
        self._undecided.append(CancelRequest(cancellation, position, deadline_ms, waited))

    def take_arrived(self, fetched: Batch, index: Int64s) -> None:
        """Look at the messages at these indices of what was read; they are pending now."""
        records = fetched.records
        unclear = index[self._are_unclear(fetched, index)]
        if unclear.size:
            IdColumns.of(records, unclear).save_in(self._unclear)
        for each in index.tolist() if self._early else ():
            if records[each][:2] not in self._early:
                continue
            message = as_message(records[each])
            self.add(Cancellation(*message[:4], message.message_id, message.key), None)

    def _are_unclear(self, fetched: Batch, index: Int64s) -> Mask:
        """Return which messages an earlier owner may have sent or set aside, shape (n,)."""
        # These wait for their release instead of a decision: an outcome that says cancelled must
        # not follow a message that an earlier owner has sent.
        due_ms = fetched.due_ms[index]
        unclear: Mask = due_ms <= self._unclear_until_ms
        paused, refused = self._state.paused, self._state.refused
        for row in np.flatnonzero(unclear).tolist() if paused else ():
            # Of a paused target, only what was due before the pause was sent.
            until_ms = paused.get(as_message(fetched.records[index[row]]).target)
            unclear[row] = until_ms is None or due_ms[row] <= until_ms
        if refused:
            unclear |= np.array([each in refused for each in fetched.positions[index].tolist()])
        return unclear

    # -- decisions

    @property
    def undecided(self) -> bool:
        """True if `decide` has something to decide."""
        return bool(self._undecided)

    @property
    def proof_ms(self) -> int | None:
        """Time up to which all has to be read for a decision, ms since the epoch, or None."""
        return min((each.deadline_ms for each in self._unproven), default=None)

    def everything_is_read(self, until_ms: int) -> None:
        """Take note that everything is read that was stored before a time, ms since the epoch."""
        unproven, self._unproven = self._unproven, []
        for request in unproven:
            if request.deadline_ms <= until_ms:
                request.read_ms = until_ms
                self._undecided.append(request)
            else:
                self._unproven.append(request)

    def earlier_is_read(self) -> None:
        """Take note that everything is read that an earlier owner can have read."""
        self._unclear_until_ms = 0

    def take_released(self, ids: IdColumns) -> None:
        """Decide on the cancellations that wait for the release of these messages."""
        if len(self._unclear):
            ids.remove_from(self._unclear)
        for identity in ids.identities() if self._awaited else ():
            self._undecided += self._awaited.pop(identity, ())

    def decide(self) -> tuple[list[Record], list[CancelRequest]]:
        """Decide on everything that was added.

        The requests that have an outcome are published once the journal has confirmed the records.
        """
        requests, self._undecided = self._undecided, []
        if not requests:
            return [], []
        now_ms = self._clock.now_ms()
        ids = IdColumns.of([each.cancellation for each in requests])
        kinds = {
            row: kind
            # Of several, the first one counts: what was held may still come.
            for kind, memory in reversed(self._state.set_aside.items())
            for row in np.flatnonzero(ids.seen_in(memory)).tolist()
        }
        cancelled, released, unclear, pending = (
            ids.seen_in(memory).tolist()
            for memory in (
                self._state.cancelled,
                self._state.memory,
                self._unclear,
                self._queue.ids,
            )
        )
        launched = {
            identity
            for _, batch_ids in self._queue.launched.values()
            for identity in batch_ids.at(np.isin(batch_ids.numbers, ids.numbers)).identities()
        }
        times = self._releases.times_of(ids.at(np.array(released)).identities())
        revoked: dict[Identity, None] = {}
        early: list[CancelRequest] = []
        decided: list[CancelRequest] = []

        def end(
            request: CancelRequest,
            status: OutcomeStatus,
            reason: str = "",
            released_ms: int | None = None,
        ) -> None:
            _, _, due_ms, target, message_id, key, _ = request.cancellation
            request.outcome = Outcome(
                status, message_id, target, due_ms, now_ms, released_ms, reason, key
            )
            decided.append(request)

        # In this order: what is certain, then what may change, then what is missing.
        for row, (request, identity) in enumerate(zip(requests, ids.identities(), strict=True)):
            if cancelled[row] or identity in revoked:
                end(request, OutcomeStatus.CANCELLED)
            elif row in kinds:
                end(request, OutcomeStatus.UNKNOWN, _REASONS[kinds[row]])
            elif released[row]:
                end(request, OutcomeStatus.TOO_LATE, released_ms=times.get(identity))
            elif identity in launched or unclear[row]:
                self._awaited.setdefault(identity, []).append(request)
            elif pending[row]:
                revoked[identity] = None
                end(request, OutcomeStatus.CANCELLED)
            elif request.position is None:
                continue  # the cancellation is among the pending messages, and comes from there
            elif not request.waited:
                early.append(request)
            elif request.read_ms < request.deadline_ms:
                self._unproven.append(request)
            else:
                reason = f"no such message was there {self._grace_ms} ms after its due time"
                end(request, OutcomeStatus.UNKNOWN, reason)
        for identity in (each.cancellation[:2] for each in decided if each.waited):
            self._early[identity] -= 1
            if self._early[identity] <= 0:
                del self._early[identity]
        self._keep(early)
        if not revoked:
            return [], decided
        # The messages are pending, so none of them is above the last position that was offered.
        until = self._queue.last_offered + 1
        record = Disposition("cancelled", until, IdColumns.of(list(revoked)))
        self._state.apply(record)
        self.cancelled += len(revoked)
        return [record], decided

    def postpone(self, requests: Sequence[CancelRequest], until_ms: int) -> None:
        """Decide on cancellations again later: their outcomes cannot be published now."""
        for each in requests:
            each.deadline_ms = until_ms
        self._keep(requests)

    def answered(self, positions: Int64s) -> Released:
        """Return the record of cancellations whose outcomes are stored, and release them."""
        none = IdColumns.of([])
        self._queue.forget(positions, none)
        return self._state.apply(Released(positions, none, positions[:0]))

    def _keep(self, requests: Sequence[CancelRequest]) -> None:
        """Add cancellations to the pending messages, until their deadlines."""
        found = [each for each in requests if each.position is not None]
        if found:
            due_ms = np.array([each.deadline_ms for each in found], dtype=np.int64)
            positions = np.array([each.position for each in found], dtype=np.int64)
            records = [each.cancellation for each in found]
            self._queue.pending.put(Batch(due_ms, positions, records))
            self._early.update(each.cancellation[:2] for each in found)
            self.waiting += len(found)

    # -- out of the queue

    def filter(self, batch: Batch) -> Batch:
        """Drop the cancelled ones of messages, and decide on the cancellations among them."""
        if not self.passed_over:
            return batch
        positions, records = batch.positions, batch.records
        keep = np.ones(len(records), dtype=np.bool_)
        # The time of such a cancellation is over: it does not come back to the pending messages.
        if self.waiting:
            for each, record in enumerate(records):
                if isinstance(record, Cancellation):
                    keep[each] = False
                    self.waiting -= 1
                    self.add(record, int(positions[each]), waited=True)
        index = np.flatnonzero(keep)
        if self.cancelled and index.size:
            ids = IdColumns.of(records, index)
            # The state keeps these IDs, so a copy that is read later is left out, too.
            gone = ids.seen_in(self._state.cancelled)
            if gone.any():
                self._queue.forget(positions[index[gone]], ids.at(gone))
                self.cancelled -= int(gone.sum())
                index = index[~gone]
        if index.size == len(records):
            return batch
        (rest,) = batch.divide([index.tolist()])
        return rest


class DelayQueue:
    """The messages of one window partition: offered in any order, released once, when due.

    A method that returns a journal record has already applied it to the state. The caller appends
    the records to the journal in the order in which the methods returned them, and keeps the order
    in time that `delaylevel.dispatcher.journal` describes. Not thread-safe.

    Args:
        state: state at the end of the journal, whose open intents have to be resolved.
        overflow: function that returns further segments, for the due messages of a slow target.
    """

    def __init__(
        self,
        state: JournalState,
        segments: PendingSegments,
        *,
        clock: Clock,
        overflow: Callable[[], PendingSegments],
        attribute: str,
        releases: RecentTimes,
        grace_ms: int,
    ) -> None:
        self.state = state
        self.pending = PendingIndex(segments, attribute)
        # Due messages that wait for their target.
        self.waiting = WaitingQueues(
            clock, lambda: PendingIndex(overflow(), attribute), segments.budget_bytes
        )
        self.ids = RemovableIds()  # of the messages that were offered and are not released
        # Highest packed position that was offered, or everything below is released.
        self.last_offered = state.low_watermark - 1
        self.launched: dict[int, tuple[Batch, IdColumns]] = {}  # by number
        self.unresolved = dict(state.open_intents)  # from before the takeover
        self._open = BitMap64()  # packed positions of what was offered and is not released
        self._launched = 0  # messages of the launched batches
        self._numbers = itertools.count(state.next_number)
        # Number of unresolved intents by packed position; and those of these messages that were
        # read again, with their due times.
        self._withheld = Counter(
            each for intent in self.unresolved.values() for each in intent.positions.tolist()
        )
        self._offered_again: dict[int, tuple[int, WindowMessage]] = {}
        # Open intents of messages that are pending again, and perhaps were sent. There are few, and
        # only after a takeover: they need no index.
        self._reopened: list[Intent] = []
        self._releases = releases
        self.cancelling = Cancellations(self, releases, clock, grace_ms)

    def __len__(self) -> int:
        """Return the number of pending messages, without those in flight and cancelled ones."""
        return len(self.pending) + len(self.waiting) - self.cancelling.passed_over

    @property
    def in_flight(self) -> int:
        """Number of messages in batches, or offered again while their intent is unresolved."""
        return self._launched + len(self._offered_again)

    @property
    def memory_bytes(self) -> int:
        """Approximate memory in use, without messages in flight."""
        ids = len(self.ids) + len(self.state.memory)
        return self.pending.memory_bytes + self.waiting.memory_bytes + 8 * ids

    @property
    def loose(self) -> list[Batch]:
        """The messages that are outside the segments."""
        launched = (batch for batch, _ in self.launched.values())
        return [*launched, *self.waiting.loose, self._again(list(self._offered_again))]

    # -- in

    def offer(self, fetched: Batch) -> tuple[int, int]:
        """Add messages from the window topic; return the numbers of new ones and of copies."""
        positions = fetched.positions
        if not len(fetched):
            return 0, 0
        # By position first: a released dead letter has no ID in the memory, and is read again after
        # a takeover.
        unknown = self._unknown(positions, ~self.state.is_released(positions))
        requests = unknown[:0]
        if fetched.has_cancellations:
            asks = np.array([type(each) is Cancellation for each in fetched.records])[unknown]
            requests, unknown = unknown[asks], unknown[~asks]
        ids = IdColumns.of(fetched.records, unknown)
        unseen = ids.unseen_in([self.state.memory, self.ids, self.state.cancelled])
        tracked = unknown[unseen]
        self._add(fetched, tracked)
        if tracked.size:
            ids.at(unseen).save_in(self.ids)
            self._open.update(to_array(positions[tracked]))
            self.cancelling.take_arrived(fetched, tracked)
        if requests.size:
            self._open.update(to_array(positions[requests]))
            for each in requests.tolist():
                record = cast("Cancellation", fetched.records[each])
                self.cancelling.add(record, int(positions[each]))
        # Last, because the low watermark may then pass what is not open: a copy, or a released one.
        self.last_offered = max(self.last_offered, int(positions.max()))
        return tracked.size, unknown.size - tracked.size

    def _unknown(self, positions: Int64s, candidates: Mask) -> Int64s:
        """Return the indices of the candidates that are not open yet, each position once."""
        index = np.flatnonzero(candidates)
        some = positions[index]
        if some.size > 1 and not bool((some[1:] > some[:-1]).all()):
            some, first = np.unique(some, return_index=True)
            index = index[first]
        if some.size and int(some[0]) <= self.last_offered:
            index = index[~contained(self._open, some)]
        return np.sort(index)

    def _add(self, fetched: Batch, tracked: Int64s) -> None:
        """Add the tracked messages to the pending ones, or keep them if an intent has them."""
        index = tracked
        if self._withheld:
            positions = fetched.positions[tracked].tolist()
            keeps = np.array([each in self._withheld for each in positions], dtype=np.bool_)
            for each in tracked[keeps].tolist():
                # If the broker has it, nothing must publish it again.
                found = int(fetched.due_ms[each]), as_message(fetched.records[each])
                self._offered_again[int(fetched.positions[each])] = found
            index = tracked[~keeps]
        # The messages are in memory already. Refused ones would have to wait there, too.
        if index.size == len(fetched):
            self.pending.put(fetched)
        else:
            self.pending.put(*fetched.divide([index.tolist()]))

    # -- out

    def advance(self, now_ms: int, max_messages: int = 1000) -> Batch | None:
        """Take messages that are due, to launch them or put them into a queue; None for none."""
        for _ in range(_LOOKS):
            due_ms = self.pending.next_due_ms
            if due_ms is None or due_ms > now_ms:
                break
            part = self.cancelling.filter(self.pending.take(now_ms, max_messages))
            if part.records:
                return part
        return None

    def advance_waiting(self, target: TargetKey, max_messages: int) -> Batch | None:
        """Take the first messages that wait for a target; None if all of them are cancelled."""
        part = self.cancelling.filter(self.waiting.take(target, max_messages))
        return part if part.records else None

    def launch(self, batch: Batch) -> None:
        """Take note that a batch without sequence IDs is sent; it cannot be cancelled any more."""
        self._launch(batch, IdColumns.of(batch.records))

    def intent(self, batch: Batch, target: str = "", first: int = 0) -> Intent:
        """Launch a batch with sequence IDs; return its intent, to be confirmed before it is sent.

        The name of the target is empty if all messages will be set aside.
        """
        # The broker drops a message whose sequence ID is not above its last one, and confirms it:
        # the message would be lost.
        if target and first < self.state.next_sequence(target):
            raise InvalidInputError(f"sequence ID {first} of target {target} was used before")
        # A later sequence ID makes everything before it look stored.
        if target and any(each.target == target for each in self.unresolved.values()):
            raise InvalidInputError(f"target {target} has an intent from before the takeover")
        ids = IdColumns.of(batch.records)
        self._launch(batch, ids)
        return self.state.apply(Intent(batch.number, batch.positions, ids, target, first))

    def _launch(self, batch: Batch, ids: IdColumns) -> None:
        # Every way out of the queue leads through here, whatever has filtered it before. To publish
        # what an outcome calls cancelled is worse than to publish it late.
        if self.cancelling.cancelled and ids.seen_in(self.state.cancelled).any():
            raise DelayLevelError(
                "a cancelled message was about to be published; it was not: start again from the "
                "journal, and report this as a defect"
            )
        batch.number = next(self._numbers)
        self.launched[batch.number] = batch, ids
        self._launched += len(batch)
        # For the next Paused record: what is due later than this was not sent before the pause.
        state = self.state
        state.sent_until_ms = max(state.sent_until_ms, int(batch.due_ms.max()))

    def commit(
        self, numbers: Sequence[int], held: Int64s, at_ms: int | Int64s
    ) -> Released | Commit:
        """Release launched batches whose messages are all confirmed; return the record of that.

        A batch with an intent has a record of its own; those without share one, which costs as much
        as a message. ``held`` are the messages that were set aside and may come back.
        """
        batches, columns = zip(*map(self.launched.pop, numbers), strict=True)
        positions = np.concatenate([each.positions for each in batches])
        ids = IdColumns.join(columns)
        record: Released | Commit = Released(positions, ids, held)
        if numbers[0] in self.state.open_intents:
            (number,) = numbers
            record = Commit(number, held)
        self.state.apply(record)
        self._releases.add(ids, at_ms)
        self._launched -= positions.size
        self.forget(positions, ids)
        self.cancelling.take_released(ids)
        return record

    def forget(self, positions: Int64s, ids: IdColumns) -> None:
        """Take note that messages or cancellations are not open any more."""
        discard = self._open.discard
        for position in positions.tolist():
            discard(position)
        ids.remove_from(self.ids)

    def dispose(self, number: int, kind: DispositionKind, index: Sequence[int]) -> Disposition:
        """Return the record of messages that are not published, to precede their commit."""
        _, ids = self.launched[number]
        return self.state.apply(Disposition(kind, 0, ids.at(np.asarray(index, dtype=np.int64))))

    def refuse(self, positions: Int64s) -> Refused:
        """Return the record of messages that will be set aside, to be confirmed before they are."""
        return self.state.apply(Refused(positions))

    def refused_earlier(self, batch: Batch) -> list[int]:
        """Return the indices of the messages that their target refused before a takeover."""
        refused = self.state.refused
        positions = batch.positions.tolist() if refused else []
        return [index for index, each in enumerate(positions) if each in refused]

    def pause(self, target: str) -> Paused:
        """Return the record of a paused target whose first message waits."""
        return self.state.apply(Paused({target: self.state.sent_until_ms}))

    def resume(self, targets: Collection[str]) -> Paused | None:
        """Return the record to be confirmed before messages are sent to targets; None for none."""
        ended = dict.fromkeys(name for name in targets if name in self.state.paused)
        return self.state.apply(Paused(ended)) if ended else None

    def checkpoint(self) -> LowWatermark | None:
        """Return the low watermark as a record, None if it has not moved."""
        # What an unresolved intent has is either not offered yet, or open as everything else is.
        position = self.last_offered + 1
        if self._open:
            position = min(position, self._open.min())
        if position <= self.state.low_watermark:
            return None
        return self.state.apply(LowWatermark(position))

    def close(self) -> None:
        """Delete the spill files. The topic still has the pending messages."""
        self.pending.segments.close()
        self.waiting.close()

    # -- intents from before the takeover

    def resolve(self, number: int, stored: npt.ArrayLike) -> list[Intent | Commit]:
        """Close an intent; its messages that the broker has not ``stored`` are pending again."""
        intent, mask = self.unresolved[number], np.asarray(stored, dtype=np.bool_)
        records: list[Intent | Commit] = []
        if intent.target and not mask.all():
            # The client of an earlier owner sends the others again once the name of its producer is
            # free, and no higher sequence ID came. So an intent of them stays open until they are
            # released again, and they do not expire before.
            left, ids = intent.positions[~mask], intent.ids.at(~mask)
            uncertain = Intent(next(self._numbers), left, ids, first=UNCERTAIN)
            self._reopened.append(uncertain)
            records.append(uncertain)
        released, ids = intent.positions[mask], intent.ids.at(mask)
        records.append(Commit(number, released[:0], released))
        for record in records:
            self.state.apply(record)
        for position in released.tolist():
            self._offered_again.pop(position, None)
        self.forget(released, ids)
        self.cancelling.take_released(ids)
        self.reopen(number)
        return records

    def reopen(self, number: int) -> None:
        """Let the messages of an intent be pending again, although they may have been sent."""
        intent = self.unresolved.pop(number)
        if number in self.state.open_intents:
            # It stays open until they are released again, so that none of them expires.
            self._reopened.append(intent)
        positions: list[int] = intent.positions.tolist()
        self._withheld.subtract(positions)
        left = [position for position in positions if not self._withheld[position]]
        for position in left:
            del self._withheld[position]
        again = [position for position in left if position in self._offered_again]
        # Those that are not read again yet come to the pending ones when they are.
        self.pending.put(self._again(again))
        for position in again:
            del self._offered_again[position]

    def _again(self, positions: list[int]) -> Batch:
        """Return messages that were read again."""
        found = [self._offered_again[position] for position in positions]
        due_ms = np.array([due for due, _ in found], dtype=np.int64)
        records = [record for _, record in found]
        return Batch(due_ms, np.array(positions, dtype=np.int64), records)

    def may_be_sent(self, positions: Int64s) -> Mask:
        """Return which messages an earlier owner may have sent, or may still send, shape (n,)."""
        found = np.zeros(positions.size, dtype=np.bool_)
        for intent in self._reopened:
            found |= np.isin(positions, intent.positions)
        return found

    def close_reopened(self) -> list[Commit]:
        """Close the intents whose messages were pending again, and are all released now."""
        is_released = self.state.is_released
        closed = [one for one in self._reopened if is_released(one.positions).all()]
        numbers = {one.number for one in closed}
        self._reopened = [one for one in self._reopened if one.number not in numbers]
        none = np.zeros(0, dtype=np.int64)
        records = [Commit(one.number, none, none) for one in closed]
        for record in records:
            self.state.apply(record)
        return records
