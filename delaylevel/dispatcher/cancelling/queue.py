"""Cancellations in a delay queue, and the cancelled messages that leave it.

A cancelled message is not searched for. It stays where it is, and is dropped by its ID as soon as
it is taken out, for whatever reason. After a takeover, it is a copy of a known message.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from delaylevel.dispatcher.intents import BatchesInFlight, IdColumns, UnresolvedIntents
from delaylevel.dispatcher.journal.records import (
    Answered,
    Disposition,
    DispositionKind,
    Intent,
    Record,
    Resolved,
)
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.dispatcher.pending import PendingIndex
from delaylevel.dispatcher.positions import (
    IdMemory,
    Mask,
    OpenPositions,
    id_columns,
    remove_ids,
    seen_ids,
)
from delaylevel.dispatcher.record import (
    Cancellation,
    Columns,
    MessageRecord,
    WindowMessage,
    as_plain,
    is_cancellation,
)
from delaylevel.model.clock import Clock
from delaylevel.structures.id_set import RemovableIds
from delaylevel.structures.rows import Int64s

from .decisions import (
    CancelDecision,
    Cancellations,
    RecentReleases,
)

_TARGET = WindowMessage._fields.index("target")
_NEVER_MS = 1 << 62


class CancellationQueue:
    """The cancellations of a delay queue.

    Args:
        pending: the pending messages, which include cancellations that wait.
        open_positions: positions of these messages, and of the cancellations.
        unresolved: intents of an earlier owner.
    """

    def __init__(
        self,
        state: JournalState,
        pending: PendingIndex,
        pending_ids: RemovableIds,
        open_positions: OpenPositions,
        unresolved: UnresolvedIntents,
        in_flight: BatchesInFlight,
        releases: RecentReleases,
        clock: Clock,
        *,
        grace_ms: int,
        unclear_until_ms: int,
    ) -> None:
        self._cancellations = Cancellations(
            state, pending_ids, in_flight.launched, releases, grace_ms
        )
        self._unclear_until_ms = unclear_until_ms
        self._state = state
        self._pending = pending
        self._pending_ids = pending_ids
        self._open = open_positions
        self._unresolved = unresolved
        self._in_flight = in_flight
        self._clock = clock

    @property
    def passed_over(self) -> int:
        """Number of pending records that are never published."""
        return self._cancellations.revoked + self._cancellations.rows

    @property
    def waiting(self) -> int:
        """Number of cancellations that wait for their message."""
        return self._cancellations.rows

    @property
    def cancelled(self) -> int:
        """Number of cancelled messages that are still among the pending ones."""
        return self._cancellations.revoked

    @property
    def memories(self) -> list[IdMemory]:
        """Memories of the IDs of messages that are pending, released or cancelled."""
        return [self._state.memory, self._pending_ids, self._state.dispositions.cancelled]

    # -- into the queue

    def take_requests(
        self, positions: Int64s, records: Sequence[MessageRecord], index: Int64s
    ) -> None:
        """Add the cancellations at these indices of what was read."""
        self._open.add(positions[index])
        for each in index.tolist():
            record = records[each]
            assert isinstance(record, Cancellation)
            self._cancellations.add(int(positions[each]), record)

    def take_arrived(
        self, due_ms: Int64s, positions: Int64s, records: Sequence[MessageRecord], index: Int64s
    ) -> None:
        """Look at the messages at these indices of what was read; they are pending now."""
        self._note_refused(positions, records, index)
        self._note_unclear(due_ms, records, index)
        if not len(self._cancellations.early):
            return
        early = self._cancellations.early.seen(*id_columns(records, index))
        for each in index[early].tolist():
            message = WindowMessage._make(as_plain(records[each])[: len(WindowMessage._fields)])
            named = Cancellation(*message[:4], message.message_id, message.key)
            self._cancellations.arrived(named)

    def _note_unclear(
        self, due_ms: Int64s, records: Sequence[MessageRecord], index: Int64s
    ) -> None:
        """Take note of pending messages that an earlier owner may have sent."""
        old = index[due_ms[index] <= self._unclear_until_ms]
        if not old.size:
            return
        if self._state.paused:
            targets = [as_plain(records[each])[_TARGET] for each in old.tolist()]
            limits_ms = [self._state.paused.get(target, _NEVER_MS) for target in targets]
            old = old[due_ms[old] <= np.array(limits_ms, dtype=np.int64)]
        self._cancellations.unclear(*id_columns(records, old))

    def _note_refused(
        self, positions: Int64s, records: Sequence[MessageRecord], index: Int64s
    ) -> None:
        """Take note of pending messages that their target has refused."""
        if not self._state.refused:
            return
        found = [each for each in index.tolist() if int(positions[each]) in self._state.refused]
        if found:
            columns = id_columns(records, np.array(found, dtype=np.int64))
            self._cancellations.unclear(*columns)

    # -- decisions

    @property
    def undecided(self) -> bool:
        """True if `decide` has something to decide."""
        return bool(self._cancellations)

    @property
    def proof_ms(self) -> int | None:
        """Time up to which everything has to be read for a decision, ms since the epoch, or None.

        It may be in the future.
        """
        return self._cancellations.proof_ms

    def decide_again(
        self, keys: Sequence[str], key_index: npt.NDArray[np.integer], ids: Int64s
    ) -> None:
        """Decide on the cancellations that wait for these messages; arguments as ``save_ids``."""
        self._cancellations.decide_again(keys, key_index, ids)

    def has_read(self, position: int) -> bool:
        """Return True if everything up to a packed position was offered, or is released."""
        return self._open.has_read(position)

    def released(
        self, keys: Sequence[str], key_index: npt.NDArray[np.integer], ids: Int64s
    ) -> None:
        """Take note of messages that are released; arguments as ``save_ids``."""
        remove_ids(self._pending_ids, keys, key_index, ids)
        self._cancellations.released(keys, key_index, ids)

    def everything_is_read(self, until_ms: int) -> None:
        """Take note that everything is read that was stored before a time, ms since the epoch."""
        self._cancellations.everything_is_read(until_ms)

    def decide(self) -> tuple[list[Record], list[CancelDecision]]:
        """Return records, and outcomes to be published once the journal has confirmed them."""
        if not self._cancellations:
            return [], []
        until = self._open.last_offered + 1
        records, decisions, early = self._cancellations.decide(self._clock.now_ms(), until)
        self._keep([(each.cancellation, each.position, each.deadline_ms) for each in early])
        return records, decisions

    def postpone(self, decisions: Sequence[CancelDecision], until_ms: int) -> None:
        """Decide on cancellations again later: their outcomes cannot be published now."""
        again = [each for each in decisions if each.position is not None]
        self._cancellations.wait_for([each.cancellation for each in again])
        self._keep([(each.cancellation, each.position, until_ms) for each in again])

    def answered(self, positions: Int64s) -> Answered:
        """Return the record of cancellations whose outcomes are stored, and release them."""
        record = Answered(positions)
        self._state.apply(record)
        self._open.discard(positions)
        return record

    # -- the journal

    def dispose(self, number: int, kind: DispositionKind, index: Sequence[int]) -> Disposition:
        """Return the record of messages that are not published, to precede their commit."""
        keys, key_index, ids = self._in_flight.launched[number]
        some = np.asarray(index, dtype=np.int64)
        record = Disposition(kind, keys, key_index[some], ids[some])
        self._state.apply(record)
        return record

    def keep_uncertain(self, number: int, stored: Mask) -> Intent | None:
        """Return an intent of what an earlier owner may still send, to precede a Resolved record.

        Args:
            stored: which of its messages the broker has stored, shape (n,).

        Returns:
            An intent without sequence IDs, which stays open; None if nothing is uncertain.
        """
        # Its client sends it again once the name of its producer is free, and no higher sequence ID
        # came. So these messages do not expire before they are released.
        intent = self._state.open_intents[number]
        index = np.flatnonzero((intent.sequence_ids() > 0) & ~stored)
        if not index.size:
            return None
        uncertain = Intent(
            self._in_flight.take_number(),
            intent.positions[index],
            intent.id_keys,
            intent.key_index[index],
            intent.ids[index],
        )
        self._state.apply(uncertain)
        self._unresolved.keep_open(uncertain)
        return uncertain

    def close_reopened(self) -> list[Resolved]:
        """Close the intents whose messages were pending again, and are all released now."""
        closed = []
        for intent in self._unresolved.released_again():
            closed.append(Resolved(intent.number, intent.positions[:0]))
            self._state.apply(closed[-1])
        return closed

    # -- out of the queue

    def filter(self, columns: Columns) -> Columns:
        """Drop the cancelled ones of messages, and decide on the cancellations among them."""
        cancellations = self._cancellations
        if not cancellations.needs_filter:
            return columns
        due_ms, positions, records = columns
        keep = np.ones(len(records), dtype=np.bool_)
        if cancellations.rows:
            keep[:] = [not is_cancellation(record) for record in records]
            for each in np.flatnonzero(~keep).tolist():
                waited = Cancellation(*records[each])
                cancellations.add_waited(int(positions[each]), waited)
        index = np.flatnonzero(keep)
        if cancellations.revoked and index.size:
            keys, key_index, ids = id_columns(records, index)
            gone = seen_ids(self._state.dispositions.cancelled, keys, key_index, ids)
            if gone.any():
                remove_ids(self._pending_ids, keys, key_index[gone], ids[gone])
                self._open.discard(positions[index[gone]])
                cancellations.revoked -= int(gone.sum())
                index = index[~gone]
        if index.size == len(records):
            return columns
        return due_ms[index], positions[index], [records[each] for each in index.tolist()]

    def has_cancelled(self, columns: IdColumns) -> bool:
        """Return True if one of these IDs is that of a cancelled message."""
        if not self._cancellations.revoked:
            return False
        return bool(seen_ids(self._state.dispositions.cancelled, *columns).any())

    def _keep(self, rows: Sequence[tuple[Cancellation, int | None, int]]) -> None:
        """Add cancellations with their positions to the pending messages, until times in ms."""
        found = [(tuple(each), position, at) for each, position, at in rows if position is not None]
        if found:
            positions = np.array([position for _, position, _ in found], dtype=np.int64)
            due_ms = np.array([at_ms for *_, at_ms in found], dtype=np.int64)
            self._pending.put_again(due_ms, positions, [record for record, *_ in found])
            self._cancellations.rows += len(found)
