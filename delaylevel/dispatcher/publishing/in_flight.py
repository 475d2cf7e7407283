"""Batches in flight: on their way to the broker, from the launch to the record of their outcome.

Without sequence IDs a batch is sent at once. With them, its intent has to be confirmed first. In
both cases the journal has confirmed a record that was written just before. That protects against
two owners: a process that was suspended while another one took over writes a record first, and it
is not confirmed.

What has expired since its batch was launched, because the journal was slow or the process was
suspended, is refused instead of sent.

The records of outcomes, called commits here, are gathered for a fraction of a second: each costs as
much as a message. With sequence IDs they are written before the next intents at the latest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from operator import attrgetter

import numpy as np

from delaylevel.cluster.targets.pool import TargetKey, TargetPool
from delaylevel.cluster.targets.producer import TargetProducer
from delaylevel.cluster.targets.send_state import SendOutcome, Sent
from delaylevel.dispatcher.delay_queue import DelayQueue
from delaylevel.dispatcher.host import Host
from delaylevel.dispatcher.journal.records import (
    NOT_PUBLISHED,
    UNCERTAIN,
    Intent,
    Record,
)
from delaylevel.dispatcher.journal.topic import Journal
from delaylevel.dispatcher.record import Batch, WindowMessage
from delaylevel.model.due_time import expired_reason, expires_at_ms
from delaylevel.model.envelope import REASON
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.mover import hop
from delaylevel.mover.carrier import Carried
from delaylevel.mover.hop import Place, Placed

from .own_topics import OwnTopics
from .targets import parse_target, target_name

#: Limits of one target's messages in flight, and of those that are being set aside. Beyond them
#: messages wait.
IN_FLIGHT_MESSAGES = 2_000
IN_FLIGHT_BYTES = 16 << 20
#: A message given to the pool: its flight or earlier intent, and its index there.
PoolItem = tuple["InFlightBatch | Intent", int]
_NONE = np.zeros(0, dtype=np.int64)
# Successive messages of a flight, by index.
_Run = tuple["InFlightBatch", range]
# Without a call in Python for each message.
_EXPIRES = attrgetter("expires_ms")
# Age of the last confirmed record from which another one has to be confirmed before messages are
# sent. The next owner counts on it: see `UNCLEAR_MS`.
_PROOF_S = 1.0
# Each send costs as much as many messages, so in quiet hours those of a short time go together: the
# time between two sends, by the rate in messages/s below which it holds. It ends at the same moment
# in all window partitions, so that threads, client and broker wake up once for all of them. A
# message that comes alone goes at once. At higher rates, only a few messages go together.
_QUIET_PAUSES_S = ((100, 0.2), (400, 1 / 15))
_SHORTEST_PAUSE_S = 0.004
_TOGETHER = 4
# From this number on, messages are sent by a later call instead of a wait for the journal. The next
# ones are prepared meanwhile.
_MANY = 200
# Time over which the rate of the messages is measured.
_RATE_S = 0.1
# The longest time, and the largest number of messages, without a commit after the confirmation.
_COMMIT_S = 0.5
_UNCOMMITTED = 2_000
# The longest time until a message is counted whose flight is not completely confirmed.
_COUNT_S = 1.0


@dataclass(eq=False)
class InFlightBatch:
    """A launched batch of one target that is not released; messages are named by their indices."""

    batch: Batch
    key: TargetKey | None  # None if all messages are set aside
    left: int = 0  # messages without an outcome, sent or not
    refused: dict[int, str] = field(default_factory=dict)  # reasons for what is set aside
    aside: int = 0  # messages whose copy in the held or dead-letter topic is not confirmed
    # Dead letters. A replay brings them back with the same ID and attempt, while a held message
    # comes back with the next attempt.
    may_return: list[int] = field(default_factory=list)
    counted: list[tuple[str, str]] = field(default_factory=list)  # counter and key of the refused
    first_number: int = 0  # sequence ID of the first message; 0 without deduplication
    record: int = 0  # number of records that the journal has to confirm before it is sent
    confirmed_ms: int = 0  # time of the last outcome so far, ms since the epoch

    @cached_property
    def dues(self) -> list[int]:
        """Due time of each message, ms since the epoch."""
        dues: list[int] = self.batch.due_ms.tolist()
        return dues


def expired(
    description: LevelTopicDescription, messages: Sequence[WindowMessage], now_ms: int
) -> dict[int, int]:
    """Return the expired ones of due messages: index -> time of the expiry, ms since the epoch."""
    if not description.expire_after_ms and not any(map(_EXPIRES, messages)):
        return {}
    found: dict[int, int] = {}
    for index, message in enumerate(messages):
        at_ms = expires_at_ms(description, message.due_ms, message.expires_ms)
        if 0 < at_ms <= max(now_ms, message.due_ms):
            found[index] = at_ms
    return found


def is_below_limits(messages: int, size: int) -> bool:
    """Return True if there is room for further messages."""
    return messages < IN_FLIGHT_MESSAGES and size < IN_FLIGHT_BYTES


class InFlightBatches:
    """The batches that are launched, until they are released.

    Messages that a target refuses are set aside. Of the intents from before the takeover, the
    broker is asked, through the pool of targets, which messages it has stored. An intent of what it
    has not stored stays open until that is released, as long as the owners use sequence IDs.
    """

    def __init__(
        self,
        host: Host,
        delay_queue: DelayQueue,
        pool: TargetPool[PoolItem],
        journal: Journal,
        set_aside: OwnTopics[tuple[InFlightBatch, int]],
        *,
        numbered: bool,
    ) -> None:
        self._host = host
        self._queue = delay_queue
        self._pool = pool
        self._journal = journal
        self._set_aside = set_aside  # the held and the dead-letter topic
        self._dead_letters = host.descriptions.latest().dead_letter_topic.partition(0).full
        self._numbered = numbered
        self._clock = host.clock
        self._now_s = host.now_s
        self._open: set[InFlightBatch] = set()  # with messages that have no outcome
        # Launched flights by target, in the order of their intents, which is that of their sequence
        # IDs.
        self._unsent: dict[TargetKey, list[InFlightBatch]] = {}
        self.sent_ms = 0  # time of the last send, ms since the epoch
        self._count = 0
        self._counted_s = host.now_s()
        self._rate = 0.0
        self._sent_s = 0.0
        # Which messages of unresolved intents are stored, as far as it is known: by the number of
        # the intent, and their index.
        self._answers: dict[int, dict[int, bool]] = {}
        # By topic, the flights of which messages are being set aside.
        self._refused: dict[str, set[InFlightBatch]] = {}
        self._confirmed: list[InFlightBatch] = []
        self._late_ms: list[int] = []  # lateness of the messages that are not counted
        self._commit_s = 0.0

    def __len__(self) -> int:
        """Return the number of batches that are not completely confirmed."""
        return len(self._open)

    def has_room_aside(self) -> bool:
        """Return True if further messages may be set aside."""
        return is_below_limits(*self._set_aside.load)

    @property
    def prepared(self) -> int:
        """Number of due messages that are launched and not sent."""
        return sum(len(each.batch) for flights in self._unsent.values() for each in flights)

    @property
    def unconfirmed(self) -> int:
        """Number of prepared messages that wait until the journal has confirmed their intents."""
        # The others wait for room to be set aside, perhaps for long.
        stored = self._journal.stored
        waiting = (each for flights in self._unsent.values() for each in flights)
        return sum(len(each.batch) for each in waiting if each.record > stored)

    @property
    def uncommitted(self) -> int:
        """Number of messages that are confirmed, and have no commit yet."""
        return sum(len(flight.batch) for flight in self._confirmed)

    @property
    def owes_answers(self) -> bool:
        """True if callbacks are about to come; :meth:`process` has to follow soon."""
        return self._pool.owes_answers or self._set_aside.owes_answers

    def launch(self, flights: list[InFlightBatch]) -> None:
        """Send flights, with sequence IDs after their intents; leave many to `send_prepared`."""
        if self._queue.state.paused:
            # Before anything is sent or set aside: until this record is stored, the next owner may
            # cancel what waited for the end of the pause. What is held comes back with its next
            # attempt, which no cancellation names.
            record = self._queue.resume({flight.batch.messages[0].target for flight in flights})
            if record is not None:
                self._journal.append(record)
        if self._numbered:
            self._write_intents(flights)
        else:
            self._prove()  # what is set aside is not sent, and may come back
            for flight in flights:
                self._queue.launch(flight.batch)
        for flight in flights:
            if flight.key is not None:
                self._unsent.setdefault(flight.key, []).append(flight)
        self._open.update(flights)
        for flight in flights:
            if flight.key is None:
                self._finish(flight)
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
            self._journal.append_soon(self._queue.state.proof)

    @property
    def pause_s(self) -> float:
        """Time between two sends after which a few messages are sent together, in s."""
        now_s = self._now_s()
        elapsed_s = now_s - self._counted_s
        if elapsed_s >= _RATE_S:
            # A burst after idle times must not be averaged away.
            self._rate = self._count / min(elapsed_s, 2 * _RATE_S)
            self._count, self._counted_s = 0, now_s
        if now_s - self._sent_s > _SHORTEST_PAUSE_S:
            return _SHORTEST_PAUSE_S  # nothing was sent just now
        for below, pause_s in _QUIET_PAUSES_S:
            if self._rate < below:
                return pause_s - now_s % pause_s
        return max(_SHORTEST_PAUSE_S, _TOGETHER / self._rate)

    def begin_pause(self, topic: str) -> None:
        """Record that messages of a paused target wait, unless that is recorded."""
        # Not waited for: without this record, the next owner takes more messages for sent than
        # were, and only decides later about their cancellations.
        if topic not in self._queue.state.paused:
            self._journal.append_soon(self._queue.pause(topic))

    def _write_intents(self, flights: list[InFlightBatch]) -> None:
        records: list[Record] = [self._intent(flight) for flight in flights]
        aside = [flight.batch.positions for flight in flights if flight.key is None]
        if aside:
            records.append(self._queue.refuse(np.concatenate(aside)))
        # To wait for the last one is enough: the journal confirms in order.
        *before, last = records
        for record in before:
            self._journal.append_soon(record)
        # `launch` sets messages aside as soon as this returns, without another look at the journal.
        if aside or sum(len(flight.batch) for flight in flights) < _MANY:
            self._journal.append(last)
        else:
            record_number = self._journal.append_soon(last)
            for flight in flights:
                flight.record = record_number

    def _send_target(self, key: TargetKey, flights: list[InFlightBatch]) -> bool:
        """Send the messages of a target; return True if there were any."""
        ready = [flight for flight in flights if flight.record <= self._journal.stored]
        if not ready:
            return False
        self._prove()
        reason = self._pool.refusal(key.topic, key.schema)
        if reason is not None:
            if not self.has_room_aside():
                return False
            refused = []
            for flight in ready:
                reasons = dict.fromkeys(range(len(flight.batch)), reason)
                refused.append((flight, reasons | self.expired(flight.batch)))
            self._refuse(refused)
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
            self._count += len(flight.batch)
        if len(ready) < len(flights):
            self._unsent[key] = flights[len(ready) :]
        else:
            del self._unsent[key]
        return reason is None

    def expired(self, batch: Batch) -> dict[int, str]:
        """Return the reasons of the messages of a batch that have expired, by index."""
        found = expired(self._host.descriptions.latest(), batch.messages, self._clock.now_ms())
        if found and self._numbered:
            # An earlier owner may still send them. Their release has a higher sequence ID, so the
            # broker drops what that one sends.
            for index in np.flatnonzero(self._queue.may_be_sent(batch.positions)).tolist():
                found.pop(index, None)
        return {index: expired_reason(at_ms) for index, at_ms in found.items()}

    def _without_expired(self, flights: list[InFlightBatch]) -> list[_Run] | None:
        """Refuse expired messages; return the others, or None without room to set more aside."""
        kept: list[_Run] = []
        refused: list[tuple[InFlightBatch, dict[int, str]]] = []
        for flight in flights:
            reasons, begin = self.expired(flight.batch), 0
            if reasons:
                refused.append((flight, reasons))
            for index in (*reasons, len(flight.batch)):
                if index > begin:
                    kept.append((flight, range(begin, index)))
                begin = index + 1
        if refused:
            if not self.has_room_aside():
                return None
            self._refuse(refused)
        return kept

    def _refuse(self, refused: list[tuple[InFlightBatch, dict[int, str]]]) -> None:
        """Refuse messages without sending them: reasons by index."""
        for flight, reasons in refused:
            flight.refused.update(reasons)
            flight.left -= len(reasons)
        if self._numbered:
            # Before a later message is sent: its sequence ID tells that the earlier ones were.
            positions = [flight.batch.positions[list(reasons)] for flight, reasons in refused]
            self._journal.append(self._queue.refuse(np.concatenate(positions)))
        for flight, _ in refused:
            if not flight.left:
                self._finish(flight)

    def _prove(self) -> None:
        """Make sure that no other dispatcher had opened the journal a moment ago."""
        if self._journal.proof_age_s > _PROOF_S:
            self._journal.append(self._queue.state.proof)

    def _intent(self, flight: InFlightBatch) -> Intent:
        if flight.key is None:
            return self._queue.intent(flight.batch)
        name = target_name(flight.key)
        last = self._pool.producer(flight.key).last_number
        flight.first_number = max(self._queue.state.next_sequence(name), last + 1)
        return self._queue.intent(flight.batch, name, flight.first_number)

    @property
    def busy(self) -> bool:
        """True while flights or earlier intents are open."""
        return bool(self._open or self._queue.unresolved) or self.next_commit_s is not None

    @property
    def next_commit_s(self) -> float | None:
        """Monotonic time by which commits are written, in s; None if there are none."""
        return self._commit_s if self._confirmed or self._late_ms else None

    def refused_load(self, topic: str) -> tuple[int, int]:
        """Return messages and bytes of a target's flights of which some are being set aside."""
        # For each target that has messages: a look at all flights would cost too much.
        batches = [flight.batch for flight in self._refused.get(topic, ())]
        size = sum(len(message.value or b"") for batch in batches for message in batch.messages)
        return sum(map(len, batches)), size

    def resolve_earlier(self) -> None:
        """Begin to resolve the intents that the last owner left open; `process` goes on."""
        refused = self._queue.state.refused
        for intent in list(self._queue.unresolved.values()):
            if intent.first == UNCERTAIN and self._numbered:
                # An earlier owner may still send its messages, so they do not expire.
                self._queue.reopen(intent.number)
                continue
            producer = self._pool.producer(parse_target(intent.target)) if intent.target else None
            answers = self._answers.setdefault(intent.number, {})
            for index, position in enumerate(intent.positions.tolist()):
                if producer is None or position in refused:
                    answers[index] = False
                else:
                    producer.recall((intent, index), intent.first + index)
            self._resolve_if_known(intent)

    def _resolve_if_known(self, intent: Intent) -> None:
        """Resolve an intent once it is known of each of its messages whether it is stored."""
        answers, size = self._answers[intent.number], intent.positions.size
        if len(answers) == size:
            del self._answers[intent.number]
            stored = [answers[index] for index in range(size)]
            for record in self._queue.resolve(intent.number, stored):
                self._journal.append_soon(record)

    def process(self) -> None:
        """Process the outcomes of messages that were sent; errors as for `Journal.append`."""
        # After the claim of another owner, nothing that follows may be sent or set aside.
        self._journal.check()
        refused: list[tuple[InFlightBatch, int]] = []
        done: list[InFlightBatch] = []
        stored: list[Sent[PoolItem]] = []
        for sent, outcome, reason in self._pool.poll():
            owner, index = sent.item
            if isinstance(owner, Intent):
                self._answers[owner.number][index] = outcome is SendOutcome.STORED
                self._resolve_if_known(owner)
                continue
            if outcome is SendOutcome.STORED:
                stored.append(sent)
            else:
                owner.refused[index] = reason
                refused.append((owner, index))
            owner.left -= 1
            if not owner.left:
                done.append(owner)
        # None is too large: a held message becomes a dead letter then, and that one gets smaller.
        for carried in self._set_aside.confirmed():
            flight, index = carried.item
            if carried.place.topic == self._dead_letters:
                flight.may_return.append(index)
            flight.aside -= 1
            if not flight.aside:
                self._commit(flight)
        if self._numbered:
            # Before producers go on, whose next sequence ID hides the gap that a refusal leaves,
            # and before refused messages are set aside.
            if refused:
                positions = [int(flight.batch.positions[index]) for flight, index in refused]
                self._journal.append(self._queue.refuse(np.array(positions)))
            self._resume()
        if stored:
            self._note_stored(stored)
        for flight in done:
            self._finish(flight)
        due_s = self.next_commit_s
        if due_s is not None and (self._now_s() >= due_s or len(self._late_ms) >= _UNCOMMITTED):
            self.write_commits()

    def write_commits(self) -> None:
        """Write the commits of flights that are completely confirmed, and count the messages."""
        plain: list[list[InFlightBatch]] = [[]]
        room = _UNCOMMITTED
        if self._late_ms:
            self._host.stats.released(np.array(self._late_ms))
            self._late_ms = []
        for flight in self._confirmed:
            if flight.counted:
                # Before the commit: an owner that has read only that takes the messages for
                # published, and answers cancellations of held ones with "too late".
                self._dispose(flight)
            if not (self._numbered or flight.may_return):
                # The broker has a limit for a record, and a burst to many targets has none.
                room -= len(flight.batch)
                if room < 0:
                    plain.append([])
                    room = _UNCOMMITTED - len(flight.batch)
                plain[-1].append(flight)
                continue
            held, number = flight.batch.positions[flight.may_return], flight.batch.number
            self._journal.append_soon(self._queue.commit([number], held, flight.confirmed_ms))
        for flights in filter(None, plain):
            at_ms = np.repeat(
                [flight.confirmed_ms for flight in flights],
                [len(flight.batch) for flight in flights],
            )
            numbers = [flight.batch.number for flight in flights]
            self._journal.append_soon(self._queue.commit(numbers, _NONE, at_ms))
        self._confirmed = []

    def _dispose(self, flight: InFlightBatch) -> None:
        """Record which messages of a flight are not published; dead letters may come back."""
        counted = list(zip(sorted(flight.refused), flight.counted, strict=True))
        for kind in NOT_PUBLISHED:
            index = [
                each
                for each, (counter, _) in counted
                if counter == kind and each not in flight.may_return
            ]
            if index:
                number = flight.batch.number
                self._journal.append_soon(self._queue.dispose(number, kind, index))

    def _note_stored(self, stored: list[Sent[PoolItem]]) -> None:
        """Note when messages were stored, and how late."""
        self._gather(_COUNT_S)
        now_ms = self._clock.now_ms()
        for sent in stored:
            flight, index = sent.item
            assert isinstance(flight, InFlightBatch)
            flight.confirmed_ms = now_ms
            late_ms = now_ms - flight.dues[index]
            self._late_ms.append(late_ms if late_ms > 0 else 0)

    def _gather(self, most_s: float) -> None:
        """Gather what `write_commits` writes, for at most this time in s."""
        before_s, commit_s = self.next_commit_s, self._now_s() + most_s
        self._commit_s = commit_s if before_s is None else min(before_s, commit_s)

    def _resume(self) -> None:
        """Let producers go on whose refusals are in the journal."""
        suspended = self._pool.suspended()
        unresolved = {each.target for each in self._queue.unresolved.values()}
        ready = [key for key in suspended if target_name(key) not in unresolved]
        if ready:
            self._journal.append(self._queue.state.proof)
            for key in ready:
                self._pool.producer(key).resume()

    def _finish(self, flight: InFlightBatch) -> None:
        """Set the refused messages of a flight aside, and release it."""
        if not flight.refused:
            self._commit(flight)
            return
        self._send_aside(flight)
        if not flight.aside:
            self._commit(flight)
        elif flight.key is not None:
            self._refused.setdefault(flight.key.topic, set()).add(flight)

    def _send_aside(self, flight: InFlightBatch) -> None:
        """Send the refused messages of a flight to their topics without waiting."""
        for index, reason in sorted(flight.refused.items()):
            message = flight.batch.messages[index]
            placed = self._placed(message, reason)
            place = placed.place
            flight.counted.append((place.counter, place.counted_by))
            if place.topic:
                flight.aside += 1
                envelope = message.envelope if message.target else None
                self._set_aside.put(Carried((flight, index), message, envelope, placed))
        self._set_aside.flush()

    def _placed(self, message: WindowMessage, reason: str) -> Placed:
        if message.target:
            description, now_ms = self._host.descriptions.latest(), self._clock.now_ms()
            return hop.set_aside(description, message, message.envelope, reason, now_ms)
        why = message.properties.get(REASON, "")
        return Placed(Place("dead", why, self._dead_letters), message.properties)

    def _commit(self, flight: InFlightBatch) -> None:
        """Keep a flight for the next commits, which are written together."""
        self._open.discard(flight)
        if flight.key is not None:
            flights = self._refused.get(flight.key.topic, set())
            flights.discard(flight)
            if not flights:
                self._refused.pop(flight.key.topic, None)
        if flight.counted:
            self._host.stats.set_aside(flight.counted)
        # What is set aside is released now: its copy was confirmed after the other messages.
        if flight.refused or not flight.confirmed_ms:
            flight.confirmed_ms = self._clock.now_ms()
        self._gather(_COMMIT_S)
        self._confirmed.append(flight)
