"""Sending of due messages.

Without sequence IDs a batch is sent at once. With them, its intent has to be confirmed first. In
both cases the journal has confirmed a record that was written just before. That protects against
two owners: a process that was suspended while another one took over writes a record first, and it
is not confirmed.

What has expired since its batch was launched, because the journal was slow or the process was
suspended, is refused instead of sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from operator import attrgetter

import numpy as np

from delaylevel.cluster.targets.pool import TargetKey, TargetPool
from delaylevel.cluster.targets.producer import TargetProducer
from delaylevel.dispatcher.delay_queue import DelayQueue
from delaylevel.dispatcher.journal.records import Intent, LowWatermark, Record
from delaylevel.dispatcher.journal.topic import Journal
from delaylevel.dispatcher.record import DueBatch
from delaylevel.model.clock import Clock
from delaylevel.model.due_time import expired_reason, expires_at_ms
from delaylevel.model.level_topic import LevelTopicDescription

from .targets import target_name

#: A message given to the pool: its flight or recall, and its index there.
PoolItem = tuple["Flight | Recall", int]
# Successive messages of a flight, by index.
_Run = tuple["Flight", range]
# Without a call in Python for each message.
_EXPIRES = attrgetter("expires_ms")
# Age of the last confirmed record from which another one has to be confirmed before messages are
# sent. The next owner counts on it: see `UNCLEAR_MS`.
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
    """A launched batch of one target that is not released.

    Attributes:
        key: the target; None if all messages are set aside.
        left: number of messages without an outcome, sent or not.
        refused: reasons for messages that are set aside, by index.
        aside: number of messages whose copy in the held or dead-letter topic is not confirmed.
        may_return: indices of dead letters. A replay brings them back with the same ID and attempt,
            while a held message comes back with the next attempt.
        counted: counter and key there of each message that is set aside.
        size: bytes of all payloads, once some of the messages are being set aside.
        first_number: sequence ID of the first message; 0 without deduplication.
        record: number of records that the journal has to have confirmed before it is sent.
        sent: True once its messages were sent, or refused instead.
        confirmed_ms: time of the last outcome so far, ms since the epoch; 0 before the first one.
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
    record: int = 0
    sent: bool = False
    confirmed_ms: int = 0

    @cached_property
    def dues(self) -> list[int]:
        """Due time of each message, ms since the epoch."""
        dues: list[int] = self.batch.due_ms.tolist()
        return dues


@dataclass(eq=False)
class Recall:
    """An intent from before the takeover, and what is known of its messages."""

    intent: Intent
    left: int = 0
    stored: set[int] = field(default_factory=set)  # indices


class ExpiryCheck:
    """The decision which due messages have expired.

    Args:
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

    def expired(self, batch: DueBatch) -> dict[int, int]:
        """Return the expired messages: index -> time of the expiry, ms since the epoch."""
        description, messages = self._description(), batch.messages
        if not description.expire_after_ms and not any(map(_EXPIRES, messages)):
            return {}
        now_ms = self._clock.now_ms()
        expired: dict[int, int] = {}
        for index, message in enumerate(messages):
            at_ms = expires_at_ms(description, message.due_ms, message.expires_ms)
            if 0 < at_ms <= max(now_ms, message.due_ms):
                expired[index] = at_ms
        if expired and self._numbered:
            # Its release has a higher sequence ID, so the broker drops what the other one sends.
            for index in np.flatnonzero(self._queue.reopened(batch)).tolist():
                expired.pop(index, None)
        return expired


class FlightSender:
    """Sender of the messages of flights, after their intents if they have sequence IDs.

    Args:
        has_room_aside: function that returns True if further messages may be set aside.

    Attributes:
        prepared: number of due messages that are launched and not sent.
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
        has_room_aside: Callable[[], bool],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = delay_queue
        self._pool = pool
        self._journal = journal
        self._expiry = expiry
        self._numbered = numbered
        self._clock = clock
        self._has_room_aside = has_room_aside
        self._now_s = now_s
        # By target, in the order of their intents, which is that of their sequence IDs.
        self._unsent: dict[TargetKey, list[Flight]] = {}
        self._refused: list[tuple[Flight, int]] = []
        self.prepared = self.sent_ms = 0
        self._count = 0
        self._counted_s = now_s()
        self._rate = 0.0
        self._sent_s = 0.0

    def launch(self, flights: list[Flight]) -> None:
        """Send flights, with sequence IDs after their intents; leave many to `send_prepared`."""
        if self._queue.state.paused:
            self._end_pauses(flights)
        if self._numbered:
            self._write_intents(flights)
        else:
            self._prove()  # what is set aside is not sent, and may come back
            for flight in flights:
                self._queue.launch(flight.batch)
        for flight in flights:
            if flight.key is not None:
                self._unsent.setdefault(flight.key, []).append(flight)
                self.prepared += len(flight.batch)
        self.send_prepared()

    def send_prepared(self) -> None:
        """Send what is launched, as far as the journal has confirmed the intents."""
        if not self._unsent:
            return
        self._journal.check()
        used: list[TargetProducer[PoolItem]] = []
        for key, flights in list(self._unsent.items()):
            if self._send_target(key, flights):
                used.append(self._pool.producer(key))
        for producer in used:
            producer.flush()
        if used:
            self._sent_s, self.sent_ms = self._now_s(), self._clock.now_ms()

    def prove_soon(self, until_ms: int) -> None:
        """Let the journal confirm a record before a message is due, so that it need not wait."""
        left_s = max(until_ms - self._clock.now_ms(), 0) / 1000
        if self._journal.proof_age_s + left_s > _PROOF_S:
            self._journal.append_soon(LowWatermark(self._queue.state.low_watermark))

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

    def _end_pauses(self, flights: list[Flight]) -> None:
        """Record that messages are sent to targets that were paused."""
        record = self._queue.resume({flight.key.topic for flight in flights if flight.key})
        if record is not None:
            self._journal.append(record)

    def _write_intents(self, flights: list[Flight]) -> None:
        records: list[Record] = [self._intent(flight) for flight in flights]
        aside = [flight.batch.positions for flight in flights if flight.key is None]
        if aside:
            records.append(self._queue.refuse(np.concatenate(aside)))
        *before, last = records
        for record in before:
            self._journal.append_soon(record)
        if aside or sum(len(flight.batch) for flight in flights) < _MANY:
            self._journal.append(last)
        else:
            record_number = self._journal.append_soon(last)
            for flight in flights:
                flight.record = record_number

    def _send_target(self, key: TargetKey, flights: list[Flight]) -> bool:
        """Send the messages of a target; return True if there were any."""
        ready = [flight for flight in flights if flight.record <= self._journal.stored]
        if not ready:
            return False
        self._prove()
        reason = self._pool.refusal(key.topic, key.schema)
        if reason is not None:
            if not self._has_room_aside():
                return False
            self._refuse([(each, dict.fromkeys(range(len(each.batch)), reason)) for each in ready])
        else:
            runs = self._without_expired(ready)
            if runs is None:
                return False
            producer = self._pool.producer(key)
            for flight, run in runs:
                messages = flight.batch.messages[run.start : run.stop]
                number = flight.first_number and flight.first_number + run.start
                producer.send_all(zip(repeat(flight), run, strict=False), messages, number)
        for flight in ready:
            flight.sent = True
            self.prepared -= len(flight.batch)
            self._count += len(flight.batch)
        if len(ready) < len(flights):
            self._unsent[key] = flights[len(ready) :]
        else:
            del self._unsent[key]
        return reason is None

    def _without_expired(self, flights: list[Flight]) -> list[_Run] | None:
        """Refuse expired messages; return the others, or None without room to set more aside."""
        kept: list[_Run] = []
        refused: list[tuple[Flight, dict[int, str]]] = []
        for flight in flights:
            expired, begin = self._expiry.expired(flight.batch), 0
            if expired:
                reasons = {index: expired_reason(at_ms) for index, at_ms in expired.items()}
                refused.append((flight, reasons))
            for index in (*expired, len(flight.batch)):
                if index > begin:
                    kept.append((flight, range(begin, index)))
                begin = index + 1
        if refused:
            if not self._has_room_aside():
                return None
            self._refuse(refused)
        return kept

    def _refuse(self, refused: list[tuple[Flight, dict[int, str]]]) -> None:
        """Refuse messages without sending them: reasons by index."""
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
        if self._journal.proof_age_s > _PROOF_S:
            self._journal.append(LowWatermark(self._queue.state.low_watermark))

    def _intent(self, flight: Flight) -> Intent:
        if flight.key is None:
            return self._queue.intent(flight.batch)
        name = target_name(flight.key)
        last = self._pool.producer(flight.key).last_number
        flight.first_number = max(self._queue.state.next_sequence(name), last + 1)
        return self._queue.intent(flight.batch, name, flight.first_number)
