"""Sending of messages whose intents are in the journal, each at its due time.

An intent may be ahead of the due times of its messages (see `LookAhead`). Three things must hold
when such a message is sent: it is due, its intent is confirmed, and the journal has confirmed a
record that was written just before. The last one protects against two owners: a process that was
suspended while another one took over writes a record first, and it is not confirmed.

What has expired since its intent was written, because the journal was slow or the process was
suspended, is refused instead of sent.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, repeat
from operator import attrgetter

import numpy as np

from delaylevel.cluster.targets.pool import TargetKey, TargetPool
from delaylevel.cluster.targets.producer import TargetProducer
from delaylevel.dispatcher.delay_queue import DelayQueue
from delaylevel.dispatcher.journal.records import Intent, LowWatermark, Record
from delaylevel.dispatcher.journal.topic import Journal
from delaylevel.dispatcher.positions import Mask
from delaylevel.dispatcher.record import DueBatch
from delaylevel.model.clock import Clock
from delaylevel.model.due_time import expired_reason, expires_at_ms
from delaylevel.model.level_topic import LevelTopicDescription

from .targets import target_name

#: A message given to the pool: its flight or recall, and its index there.
PoolItem = tuple["Flight | Recall", int]
# Successive messages of a flight, by index.
_Run = tuple["Flight", range]
#: The longest time by which an intent is ahead of a due time. A crash may repeat as much.
LONGEST_MS = 300
_SHORTEST_MS = 16
#: The shortest time in which the journal usually confirms an intent, with a reserve.
_LEAD_MS = 50
# After this time without messages, targets are closed, and opening them takes longer.
_IDLE_MS = 1_000
# Pause after a plan of which most was put back, because the targets were not ready.
_PAUSE_MS = 100
# Limits of one plan, and of all messages whose intents are ahead.
_PLAN = 125
_PLANNED = 2_000
_PLANNED_BYTES = 8 << 20
# Without a call in Python for each message.
_EXPIRES = attrgetter("expires_ms")
# Age of the last confirmed record from which another one has to be confirmed before messages are
# sent whose intent was written ahead.
_PROOF_S = 1.0
# A send costs as much as several messages. Messages are sent together, as far as that makes them
# late by a few milliseconds only.
_TOGETHER = 4
_SHORTEST_PAUSE_S = 0.004
_LONGEST_PAUSE_S = 0.016
# From this number on, messages are sent by a later call instead of a wait for the journal. The next
# ones are prepared meanwhile.
_MANY = 200
# Time over which the rate of the messages is measured.
_RATE_S = 0.1


@dataclass(eq=False)
class Flight:
    """A batch of one target with an intent and without a commit.

    Attributes:
        key: the target; None if all messages are set aside.
        left: number of messages without an outcome, sent or not.
        refused: reasons for messages that are set aside, by index.
        aside: number of messages whose copy in the held or dead-letter topic is not confirmed.
        may_return: indices of dead letters. A replay brings them back with the same ID and attempt,
            while a held message comes back with the next attempt.
        counted: counter and key there of each message that is set aside.
        size: bytes of all payloads, once some of the messages are being set aside.
        first_number: sequence ID of the first message, with deduplication.
        ahead: True if the intent is ahead of the due times; all others are due.
        record: number of records that the journal has to have confirmed before a message is sent.
        sent: number of messages that were sent, or refused instead; always the first ones.
        unclear: True if it is not known of some messages if they are stored.
        confirmed_ms: time of the last outcome so far, ms since the epoch; 0 before the first one.
        cut: True if nothing else is sent, and the rest is going to be pending again.
    """

    batch: DueBatch
    key: TargetKey | None
    left: int = 0
    refused: dict[int, str] = field(default_factory=dict)
    aside: int = 0
    may_return: list[int] = field(default_factory=list)
    counted: list[tuple[str, str]] = field(default_factory=list)
    size: int | None = None
    first_number: int = 0
    ahead: bool = False
    record: int = 0
    sent: int = 0
    unclear: bool = False
    confirmed_ms: int = 0
    cut: bool = False

    @cached_property
    def dues(self) -> list[int]:
        """Due time of each message, ms since the epoch."""
        dues: list[int] = self.batch.due_ms.tolist()
        return dues

    @property
    def next_due_ms(self) -> int:
        """Due time of the first message that is not sent, ms since the epoch; 0 if it was due."""
        return self.dues[self.sent] if self.ahead else 0

    @property
    def last_due_ms(self) -> int:
        """Due time of the last message, ms since the epoch; 0 if it was due."""
        return self.dues[-1] if self.ahead else 0

    def due_until(self, now_ms: int) -> int:
        """Return the number of messages that are due; these are the first ones."""
        if not self.ahead:
            return len(self.batch)
        return bisect_right(self.dues, now_ms, self.sent)

    def stored(self) -> Mask:
        """Return which messages are stored, shape (n,), once no outcome is missing."""
        mask: Mask = np.arange(len(self.batch)) < self.sent
        mask[list(self.refused)] = False
        return mask


@dataclass(eq=False)
class Recall:
    """An intent from before the takeover, and what is known of its messages."""

    intent: Intent
    left: int = 0
    stored: set[int] = field(default_factory=set)  # indices


# An intent that is written for the messages of the next fraction of a second costs as much as one
# for a single message, and none of its messages waits for the journal.
#
# With deduplication, a message that arrives later than the intent and is due before its last
# message *cuts* the intent: sequence IDs have to rise in the order of sending, so the intent is
# withdrawn as far as it is not sent, and written again. A cut costs more than it saves if it
# happens all the time. So each one halves the time by which intents are ahead, which then grows
# again slowly.
class LookAhead:
    """Time up to which the intents of pending messages are written, ms since the epoch."""

    def __init__(self) -> None:
        self._longest_ms = LONGEST_MS
        # Everything pending up to this due time was looked at. What is there again was put back.
        self._horizon_ms = -1
        self._pause_until_ms = 0
        self._message_bytes = 32 << 10  # average of the last plan

    def next_ms(self, pending_due_ms: int | None, arrived_due_ms: int | None) -> int | None:
        """Return the time of the next plan, ms since the epoch; None if nothing is pending.

        Args:
            pending_due_ms: earliest due time of the pending messages, or None.
            arrived_due_ms: earliest due time of those that arrived since the last plan, or None.
        """
        if pending_due_ms is None:
            return None
        due_ms = max(pending_due_ms, self._horizon_ms + 1)
        if arrived_due_ms is not None:
            due_ms = min(due_ms, arrived_due_ms)
        lead_ms = LONGEST_MS if due_ms - self._horizon_ms > _IDLE_MS else _LEAD_MS
        return max(due_ms - min(lead_ms, self._longest_ms), self._pause_until_ms)

    def until_ms(self, now_ms: int) -> int:
        """Return the latest due time of the messages to plan now, ms since the epoch."""
        return now_ms + self._longest_ms

    def most(self, planned: int) -> int:
        """Return the number of messages to plan now; below 1 for none.

        Args:
            planned: number of messages that are planned, and not sent.
        """
        limit = min(_PLANNED, _PLANNED_BYTES // self._message_bytes)
        return min(_PLAN, max(limit, 1) - planned)

    def planned(self, now_ms: int, until_ms: int, taken: DueBatch | None, count: int) -> None:
        """Take note of a plan.

        Args:
            until_ms: due time up to which everything pending was taken.
            taken: the messages that were taken.
            count: number of those that were not put back.
        """
        self._horizon_ms = max(self._horizon_ms, until_ms)
        if taken is not None:
            size = sum(len(message.value or b"") for message in taken.messages)
            self._message_bytes = size // len(taken) + 500
            if count * 2 < len(taken):
                self._pause_until_ms = now_ms + _PAUSE_MS
        self._longest_ms = min(LONGEST_MS, self._longest_ms + self._longest_ms // 8 + 1)

    def cut(self) -> None:
        """Take note of a cut: look less far ahead, and plan again at once."""
        self._longest_ms = max(_SHORTEST_MS, self._longest_ms // 2)
        self._horizon_ms = self._pause_until_ms = -1


class ExpiryCheck:
    """The decision which due messages have expired.

    Args:
        description: function that returns the latest description of the level topic.
        numbered: True if the messages have sequence IDs. Then a message that an earlier owner may
            still send does not expire: it would be released all the same.
    """

    def __init__(
        self,
        delay_queue: DelayQueue,
        description: Callable[[], LevelTopicDescription],
        clock: Clock,
        *,
        numbered: bool,
    ) -> None:
        self._queue = delay_queue
        self._description = description
        self._clock = clock
        self._numbered = numbered

    def expired(self, batch: DueBatch, start: int = 0, stop: int | None = None) -> dict[int, int]:
        """Return the expired messages: index -> time of the expiry, ms since the epoch.

        Args:
            start, stop: the messages to look at; all by default.
        """
        description, messages = self._description(), batch.messages[start:stop]
        if not description.expire_after_ms and not any(map(_EXPIRES, messages)):
            return {}
        now_ms = self._clock.now_ms()
        times = (
            expires_at_ms(description, message.due_ms, message.expires_ms) for message in messages
        )
        expired = {index: at_ms for index, at_ms in enumerate(times, start) if 0 < at_ms <= now_ms}
        if expired and self._numbered:
            # Its release has a higher sequence ID, so the broker drops what the other one sends.
            for index in np.flatnonzero(self._queue.reopened(batch)).tolist():
                expired.pop(index, None)
        return expired


class FlightSender:
    """Writer of the intents of flights, and sender of their messages.

    Args:
        expiry: the decision which messages have expired.
        numbered: True if the messages have sequence IDs.
        has_room: function that returns True if a target takes further messages.
        has_room_aside: function that returns True if further messages may be set aside.

    Attributes:
        planned: number of messages with an intent that are not sent.
        prepared: number of these that were due when their intents were written.
        next_due_ms: earliest due time of these, ms since the epoch, or None; 0 if they were due.
    """

    def __init__(
        self,
        delay_queue: DelayQueue,
        pool: TargetPool[PoolItem],
        journal: Journal,
        expiry: ExpiryCheck,
        *,
        numbered: bool,
        clock: Clock,
        has_room: Callable[[TargetKey], bool],
        has_room_aside: Callable[[], bool],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = delay_queue
        self._pool = pool
        self._journal = journal
        self._expiry = expiry
        self._numbered = numbered
        self._clock = clock
        self._has_room = has_room
        self._has_room_aside = has_room_aside
        self._now_s = now_s
        # By target, in the order of their intents, which is that of their sequence IDs.
        self._unsent: dict[TargetKey, list[Flight]] = {}
        self._refused: list[tuple[Flight, int]] = []
        self.planned = self.prepared = 0
        self.next_due_ms: int | None = None
        self._count = 0
        self._counted_s = now_s()
        self._rate = 0.0
        self._sent_s = 0.0

    def launch(self, flights: list[Flight]) -> None:
        """Write the intents of flights, and send what is due once all intents are confirmed.

        If there are many messages, a later call of `send_due` sends them, without a wait.

        Raises:
            BrokerError: an intent was not confirmed.
        """
        records: list[Record] = []
        aside: list[int] = []
        for flight in flights:
            records.append(self._intent(flight))
            if flight.key is None:
                aside += flight.batch.positions.tolist()
        if aside and self._numbered:
            records.append(self._queue.refuse(np.array(aside, dtype=np.int64)))
        *before, last = records
        for record in before:
            self._journal.append_soon(record)
        if aside or sum(len(flight.batch) for flight in flights) < _MANY:
            self._journal.append(last)
        else:
            record_number = self._journal.append_soon(last)
            for flight in flights:
                flight.record = record_number
        for flight in flights:
            self._add(flight)
        self.send_due()

    def plan(self, flights: list[Flight]) -> None:
        """Write the intents of flights ahead; `send_due` sends the messages later.

        Raises:
            BrokerError: an earlier record was not confirmed.
        """
        for flight in flights:
            flight.ahead = True
            flight.record = self._journal.append_soon(self._intent(flight))
            self._add(flight)

    def send_due(self) -> None:
        """Send what is due and has a confirmed intent, in the order of the due times.

        Raises:
            BrokerError: the journal does not confirm that this process may still publish.
        """
        now_ms = self._clock.now_ms()
        if self.next_due_ms is None or now_ms < self.next_due_ms:
            return
        self._journal.check()
        used: list[TargetProducer[PoolItem]] = []
        for key, flights in list(self._unsent.items()):
            if self._send_target(key, flights, now_ms):
                used.append(self._pool.producer(key))
        for producer in used:
            producer.flush()
        if used:
            self._sent_s = self._now_s()
        dues = [flight.next_due_ms for flights in self._unsent.values() for flight in flights]
        self.next_due_ms = min(dues, default=None)

    @property
    def pause_s(self) -> float:
        """Time between two sends after which a few messages are sent together, in s."""
        now_s = self._now_s()
        if now_s - self._counted_s >= _RATE_S:
            self._rate = self._count / (now_s - self._counted_s)
            self._count, self._counted_s = 0, now_s
        if now_s - self._sent_s > _SHORTEST_PAUSE_S:
            return _SHORTEST_PAUSE_S  # nothing was sent just now
        return min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, _TOGETHER / (self._rate or 1)))

    def take_refused(self) -> list[tuple[Flight, int]]:
        """Return flight and index of the messages that were refused instead of sent."""
        refused, self._refused = self._refused, []
        return refused

    def last_due_ms(self, key: TargetKey) -> int | None:
        """Return the latest due time of a target's messages that are not sent, or None."""
        flights = self._unsent.get(key)
        return None if not flights else max(flight.last_due_ms for flight in flights)

    def cut(self, key: TargetKey) -> list[Flight]:
        """Return the flights of a target that are not completely sent; the rest never is."""
        flights = self._unsent.pop(key, [])
        for flight in flights:
            unsent = len(flight.batch) - flight.sent
            flight.cut = True
            flight.left -= unsent
            self._count_unsent(flight, -unsent)
        return flights

    def cut_all(self) -> list[Flight]:
        """Cut the flights of all targets."""
        return [flight for key in list(self._unsent) for flight in self.cut(key)]

    def _add(self, flight: Flight) -> None:
        if flight.key is None:
            return
        self._unsent.setdefault(flight.key, []).append(flight)
        self._count_unsent(flight, len(flight.batch))
        due_ms = flight.next_due_ms
        self.next_due_ms = due_ms if self.next_due_ms is None else min(due_ms, self.next_due_ms)

    def _count_unsent(self, flight: Flight, change: int) -> None:
        self.planned += change
        if not flight.ahead:
            self.prepared += change

    def _send_target(self, key: TargetKey, flights: list[Flight], now_ms: int) -> bool:
        """Send the due messages of a target; return True if there were any."""
        parts: list[tuple[Flight, int]] = []
        for flight in flights:
            if flight.record > self._journal.stored:
                break
            stop = flight.due_until(now_ms)
            if stop > flight.sent:
                parts.append((flight, stop))
            if self._numbered and stop < len(flight.batch):
                break
        if not parts:
            return False
        reason = self._pool.refusal(key.topic, key.schema)
        if reason is not None:
            if not self._has_room_aside():
                return False
            self._refuse(
                [
                    (flight, dict.fromkeys(range(flight.sent, stop), reason))
                    for flight, stop in parts
                ]
            )
        elif parts[0][0].ahead and not self._has_room(key):
            return False
        else:
            self._prove()
            kept = self._without_expired(parts)
            if kept is None:
                return False
            producer = self._pool.producer(key)
            if len(kept) == 1 or self._numbered or _are_in_order(kept):
                for flight, run in kept:
                    messages = flight.batch.messages[run.start : run.stop]
                    number = flight.first_number and flight.first_number + run.start
                    producer.send_all(zip(repeat(flight), run, strict=False), messages, number)
            else:
                _send_merged(producer, kept)
        for flight, stop in parts:
            self._count_unsent(flight, flight.sent - stop)
            self._count += stop - flight.sent
            flight.sent = stop
        left = [flight for flight in flights if flight.sent < len(flight.batch)]
        if left:
            self._unsent[key] = left
        else:
            del self._unsent[key]
        return reason is None

    def _without_expired(self, parts: list[tuple[Flight, int]]) -> list[_Run] | None:
        """Refuse the expired messages of flights, each up to an index; return the others.

        Returns:
            None if there are expired ones, and no more messages may be set aside now.
        """
        kept: list[_Run] = []
        refused: list[tuple[Flight, dict[int, str]]] = []
        for flight, stop in parts:
            begin = flight.sent
            expired = self._expiry.expired(flight.batch, begin, stop)
            if expired:
                reasons = {index: expired_reason(at_ms) for index, at_ms in expired.items()}
                refused.append((flight, reasons))
            for index in (*expired, stop):
                if index > begin:
                    kept.append((flight, range(begin, index)))
                begin = index + 1
        if refused:
            if not self._has_room_aside():
                return None
            self._refuse(refused)
        return kept

    def _refuse(self, refused: list[tuple[Flight, dict[int, str]]]) -> None:
        """Refuse messages that are due, without sending them: reasons by index.

        Raises:
            BrokerError: this was not confirmed by the journal, with deduplication.
        """
        for flight, reasons in refused:
            flight.refused.update(reasons)
            flight.left -= len(reasons)
            self._refused += [(flight, index) for index in reasons]
        if self._numbered:
            # Before a later message is sent: its sequence ID tells that the earlier ones were.
            positions = [flight.batch.positions[list(reasons)] for flight, reasons in refused]
            self._journal.append(self._queue.refuse(np.concatenate(positions)))

    def _prove(self) -> None:
        """Make sure that no other dispatcher had opened the journal a moment ago."""
        if self._now_s() - self._journal.proven_s > _PROOF_S:
            self._journal.append(LowWatermark(self._queue.state.low_watermark))

    def _intent(self, flight: Flight) -> Intent:
        size = len(flight.batch)
        if flight.key is None or not self._numbered:
            # Without a target: one past the last.
            index = np.zeros(size if self._numbered else 0, dtype=np.uint16)
            return self._queue.intent(flight.batch, (), index)
        name = target_name(flight.key)
        last = self._pool.producer(flight.key).last_number
        flight.first_number = max(self._queue.state.sequences.get(name, 1), last + 1, 1)
        return self._queue.intent(
            flight.batch, ((name, flight.first_number),), np.zeros(size, dtype=np.uint16)
        )


def _are_in_order(runs: list[_Run]) -> bool:
    """Return True if each run ends before the next one begins, by (due time, position)."""
    batches = [(flight.batch, run.start, run.stop - 1) for flight, run in runs]
    return all(
        (before.due_ms[end], before.positions[end]) < (after.due_ms[begin], after.positions[begin])
        for (before, _, end), (after, begin, _) in pairwise(batches)
    )


def _send_merged(producer: TargetProducer[PoolItem], runs: list[_Run]) -> None:
    """Send runs of several flights without sequence IDs in the order (due time, position)."""
    items = [(flight, index) for flight, run in runs for index in run]
    due_ms = np.concatenate([flight.batch.due_ms[run.start : run.stop] for flight, run in runs])
    positions = np.concatenate(
        [flight.batch.positions[run.start : run.stop] for flight, run in runs]
    )
    ordered = [items[each] for each in np.lexsort((positions, due_ms)).tolist()]
    producer.send_all(ordered, [flight.batch.messages[index] for flight, index in ordered], 0)
