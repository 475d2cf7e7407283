"""Producers that never block their caller: they open in the background and report outcomes.

A topic is looked at whenever a confirmation names a new ledger (see `Receivers`), and from time to
time, because applications may remove its last subscription.

If a broker dies, another one serves its topics after the end of its session (30 s by default) and
some seconds more. The client looks for the topic again and again, but doubles the pause between two
attempts, up to a minute. So a producer that has lost its connection is replaced as soon as a broker
serves the topic.

`TargetProducer` does the input and output for a `SendState`, which holds the rules. A
`ProducerPool` has the producers of a host.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import pulsar

from delaylevel.cluster.client_parts.cores import producer_core
from delaylevel.cluster.failures import (
    MESSAGE_REFUSALS,
    OK,
    TOO_LARGE,
    close_quietly,
    error_name,
    is_ok,
    result_name,
)
from delaylevel.cluster.publisher import build_message, send_checked
from delaylevel.cluster.threads import GrowingPause, HostLoop, is_crowded
from delaylevel.model.message import Payload

from .receivers import NO_RECEIVER, OpeningError, Receivers, Refusal
from .send_state import (
    NO_PAYLOAD,
    UNPROVEN,
    EntryLimits,
    EntryOutcomes,
    SendState,
    Sent,
    Settled,
)

log = logging.getLogger(__name__)

#: A target gets no more messages after this time without an opening that succeeds, or without a
#: connection and any confirmation, unless its host is more patient.
STALL_S = 5.0
# An opening that does not end is slow, not refused: before it hands over a producer's name, the
# broker waits for some seconds for the connection of a process that hangs. It refuses the name,
# for as long, if it has noticed nothing yet.
_SLOW_PATIENCE_S = 30.0
_SLOW = "it does not answer"
_SLOW_FAILURES = (_SLOW, "ProducerBusy")
# Pauses after openings that have failed: the first one, and the longest, also if the topic refuses
# producers.
_OPEN_AGAIN_S, _LONGEST_S, _LONGEST_REFUSED_S = 0.1, 1.0, 30.0
_LOOK_AGAIN_S = 1.0
# Number of messages that are passed to the client at a time, if they may wait for that.
_PORTION = 32
# Time between two looks at a topic whose confirmations come from known ledgers.
_LOOK_EVERY_S = 60.0
# Time between two looks for answers behind a message without one.
_APART_EVERY_S = 0.25
# A throttled target has its connection, and may confirm nothing for long.
CONNECTED_STALL_S = 300.0
#: After this time without any confirmation and without a connection, the producer is given up.
GIVE_UP_S = 30.0
#: A client that has lost its connection normally has another one within this time.
RECONNECT_S = 1.0
# This process was suspended or busy for longer than this, so the target is not to blame.
_SUSPENDED_S = 1.0


@dataclass
class Opened:
    """A producer that was opened."""

    producer: Any
    last_number: int = -1  # the last sequence ID that the broker had stored then
    max_size: int | None = None  # limit of the topic itself for an entry, in bytes
    # Of its batches; None if it has none, or their messages are not known.
    entry_limits: EntryLimits | None = None
    shared: bool = False  # it writes to several partitions, which may be at different brokers
    # Nobody could look at the topic, so a sequence ID that it has stored is perhaps of a new topic.
    remembered: bool = False


Item = TypeVar("Item")


class TargetProducer(Generic[Item]):
    """The messages of one topic, from `put` to their outcomes in `poll`, for one thread.

    It opens one producer at a time, and closes it, in threads of their own. Without a connection it
    keeps messages, as many as its caller gives.
    """

    def __init__(
        self,
        open_producer: Callable[[], Opened],
        loop: HostLoop,
        *,
        receivers: Receivers | None = None,
        numbered: bool = False,
        patience_s: float = STALL_S,
    ) -> None:
        self._patience_s = patience_s
        self._start, self._now_s, self._wake = loop.start, loop.now_s, loop.wake
        self.receivers = receivers  # None to trust every confirmation
        self.state: SendState[Item] = SendState(numbered)
        self._open_producer = open_producer
        self._opened: Opened | None = None
        self._is_working = False  # a thread opens or closes
        self._closed = False
        self._lock = threading.Lock()  # of _closed, which the opening thread reads
        self._failure: str | None = None  # while openings fail, or one does not end
        self._failing_since_s = 0.0
        # The reason if the last opening was refused, and whether the pool has still to hear of it.
        self._refusal: str | None = None
        self._is_news = False
        self._open_at_s = 0.0
        self._pause = GrowingPause(_OPEN_AGAIN_S, _LONGEST_S)
        self._core: Any = None
        self._entries = EntryOutcomes()
        self._reports: deque[Callable[[], None]] = deque()  # from other threads
        self._is_looking = False  # at the topic, in the background
        self._looked_s = self._look_again_s = 0.0
        self.messages = self.size = 0  # without an outcome
        # Numbers of messages: passed to producers, with an answer, and those up to which flushes
        # have begun and ended.
        self._given = self._answered = self._begun = self._ended = 0
        self._flushing: Opened | None = None
        self.awaits_flush = False  # messages wait for the end of a flush, to be sent by another one
        # Monotonic times of the last message, poll, sign of life, and look for answers apart.
        self.used_s = self._polled_s = self._confirmed_s = self._connected_s = loop.now_s()
        self._apart_s = self.used_s

    @property
    def last_number(self) -> int:
        """The last sequence ID that the broker had stored at the opening."""
        return self._opened.last_number if self._opened is not None else -1

    @property
    def stalled_s(self) -> float:
        """Time since the last sign of life while messages are unconfirmed, in s; otherwise 0."""
        in_flight = self.state.in_flight
        if not in_flight:
            return 0.0
        return max(0.0, self._now_s() - max(in_flight[0].sent_s, self._confirmed_s))

    @property
    def is_stalled(self) -> bool:
        """True if none of the unconfirmed messages was confirmed for the stall time."""
        # The first condition is for speed: this is asked at every poll.
        return bool(self.state.in_flight) and (
            self._lost_s > self._patience_s or self.stalled_s > CONNECTED_STALL_S
        )

    @property
    def is_lost(self) -> bool:
        """True if its messages wait for another connection, and further ones would have to."""
        # Also for partitions that share a producer: the client begins no flush, and so ends no
        # batch, while one of them has not confirmed the last flush.
        return self.state.is_unclear or self._lost_s > RECONNECT_S

    @property
    def _lost_s(self) -> float:
        """Time without a confirmation and without a connection, in s."""
        stalled_s = self.stalled_s
        # Nearly always there is nothing without an answer: this runs at every poll.
        return min(stalled_s, self._now_s() - self._connected_s) if stalled_s else 0.0

    @property
    def age_s(self) -> float:
        """Age of the oldest message without an outcome, in s; 0 without any."""
        oldest = self.state.oldest
        return 0.0 if oldest is None else self._now_s() - oldest.sent_s

    @property
    def owes_answers(self) -> bool:
        """True if a flush has ended, and callbacks of its messages are about to come."""
        return self._answered < self._ended and bool(self.state.in_flight)

    def open(self) -> None:
        """Open the producer before the first message."""
        self.used_s = self._now_s()
        self._open()

    def put(self, sent: Sent[Item]) -> None:
        """Send a message once the producer is open, at the next `poll` or flush at the latest."""
        unsent = self.state.unsent
        unsent.append(sent)
        self.messages += 1
        self.size += sent.size
        self.used_s = sent.sent_s
        if self._opened is None:
            self._open()
        elif len(unsent) >= _PORTION:
            self._pass_on()

    def send_all(
        self, items: Iterable[Item], payloads: Sequence[Payload], first_number: int
    ) -> None:
        """Send messages with their own properties, and successive sequence IDs (0: without)."""
        self.used_s = now_s = self._now_s()
        self.messages += len(payloads)
        add, total, number = self.state.unsent.append, 0, first_number
        for payload, item in zip(payloads, items, strict=True):
            size = len(payload.value or b"")
            total += size
            add(Sent(item, payload, payload.properties, None, number, size, now_s))
            if number:
                number += 1
        self.size += total
        self._pass_on()

    def recall(self, item: Item, number: int) -> None:
        """Ask what became of a message that an earlier process may have sent."""
        self.messages += 1
        self.state.recalled.append(Sent(item, NO_PAYLOAD, {}, None, number, 0, self._now_s()))

    def flush(self) -> None:
        """End the client's present batch, and have ``wake`` called when all are answered."""
        self._pass_on()
        opened, given = self._opened, self._given
        if opened is None or not self.state.is_open or self._begun == given:
            return  # it is closed, or no message has come since the last flush
        # Until all partitions of a topic have confirmed a flush, the client takes another one for
        # the same: it ends no batch then.
        self.awaits_flush = opened.shared and self._flushing is opened
        if self.awaits_flush:
            return
        self._begun = given
        self._entries.end()
        try:
            if self._core is None:
                opened.producer.flush()  # a producer in memory has called back then
                self._wake()
                return
            self._flushing = opened
            self._core.flush_async(lambda _: self._report(partial(self._end_flush, opened, given)))
        except pulsar.PulsarException as error:
            self._flushing = None
            log.debug("flush: %s", error_name(error))

    def _end_flush(self, opened: Opened, given: int) -> None:
        self._ended = max(self._ended, given)
        if self._flushing is opened:
            self._flushing = None
            if self.awaits_flush:
                self.flush()

    def resume(self) -> None:
        """Go on after a refusal with sequence IDs, once it is recorded."""
        self.state.suspended = False
        self._pass_on()
        self.flush()

    def poll(self) -> list[Settled]:
        """Process all that has happened; return the messages whose outcome is known since then."""
        now_s = self._now_s()
        pause_s = now_s - self._polled_s
        if pause_s > _SUSPENDED_S:
            self._confirmed_s = self._connected_s = now_s
            self._failing_since_s = min(self._failing_since_s + pause_s, now_s)
        self._polled_s = now_s
        while self._reports:
            self._reports.popleft()()
        self._take_answers()
        state = self.state
        is_lost = bool(state.in_flight) and self._watch()
        if state.unverified or (
            state.is_open and (is_lost or self.used_s - self._looked_s > _LOOK_EVERY_S)
        ):
            self._look()
        if not state.is_open:
            self._replace_producer()
        elif state.unsent:
            self._pass_on()
        settled = state.settled()
        if settled:
            self.messages -= sum([sent.count for sent, _, _ in settled])
            self.size -= sum([sent.size for sent, _, _ in settled])
        return settled

    def _watch(self) -> bool:
        """Give up a producer that confirms nothing for long; return True if it may be replaced."""
        stalled_s = self.stalled_s
        if stalled_s > 0 and self._opened is not None and self._opened.producer.is_connected():
            self._connected_s = self._now_s()
        lost_s = self._lost_s
        if lost_s > max(GIVE_UP_S, self._patience_s) or stalled_s > CONNECTED_STALL_S:
            self.give_up()
        # The client may wait for up to a minute before it looks for the topic again.
        return lost_s > STALL_S

    def give_up(self) -> None:
        """Give up the producer, which confirms nothing; the next one is opened by `poll`."""
        self.state.broken(f"nothing confirmed for {self.stalled_s:.0f} s")

    def close(self) -> None:
        """Close the producer in the background; messages without an outcome get none."""
        with self._lock:
            self._closed = True
        while self._reports:  # one of them may be a producer that was just opened
            self._reports.popleft()()
        self._close_producer()
        self.state.broken("closed")

    def _report(self, work: Callable[[], None]) -> None:
        """Keep work for the next poll; called in any thread."""
        self._reports.append(work)
        self._wake()

    # -- opening

    @property
    def _hopeless(self) -> str | None:
        """The reason why openings have failed for too long; None while success is likely."""
        # An old failure says nothing about the first message after it.
        if self._failure is None or self._is_outdated:
            return None
        patience_s = self._patience_s
        if self._failure in _SLOW_FAILURES:
            patience_s = max(patience_s, _SLOW_PATIENCE_S)
        waited_s = self._now_s() - self._failing_since_s
        return self._failure if waited_s > patience_s else None

    @property
    def opening_s(self) -> float:
        """Time since the first attempt while none has succeeded, in s; infinite after a refusal."""
        return float("inf") if self._failure is None else self._now_s() - self._failing_since_s

    @property
    def _is_outdated(self) -> bool:
        """True if nobody has wanted a producer for a while since the last failure."""
        return not self._is_working and self._now_s() > self._open_at_s + STALL_S

    def take_refusal(self) -> str | None:
        """Return the reason of a refusal since the last call, or why no opening succeeds."""
        is_news, self._is_news = self._is_news, False
        return (self._refusal if is_news else None) or self._hopeless

    @property
    def pause_reason(self) -> str | None:
        """The reason why the topic takes nothing until it is time for the next opening, or None."""
        if self._is_working or self._now_s() >= self._open_at_s:
            return None
        return self._refusal or self._hopeless

    def _replace_producer(self) -> None:
        """Close a producer that is given up, and open another one if there is a need."""
        state = self.state
        # While messages are in flight, answers may still come, and say more than "unknown".
        if self._opened is not None and not state.in_flight:
            self._close_producer()
        if (reason := self._hopeless) is not None:
            state.refuse_unsent(reason)
        if state.unsent or state.is_unclear:  # to send messages, or to ask what is stored
            self._open()

    def _open(self) -> None:
        """Open a producer, unless there is one, or it is too early: `poll` does it then."""
        # The last producer is closed when all its messages have answers. Its confirmations have to
        # be verified against the topic that it had.
        if self._opened is not None or self.state.unverified:
            return
        # Each opening takes a thread and a connection, and all targets may have messages at once.
        if self._is_working or self._closed or self._now_s() < self._open_at_s or is_crowded():
            return
        if self._failure is None or self._is_outdated:
            self._failure, self._failing_since_s = _SLOW, self._now_s()
        self._is_working = True
        self._start(self._open_now)

    def _open_now(self) -> None:
        opened: Opened | OpeningError
        try:
            opened = self._open_producer()
        except Exception as error:
            opened = OpeningError.of(error)
        # A `close` that comes after this report finds the new producer in it, and closes that.
        with self._lock:
            if not self._closed:
                self._report(partial(self._take_opened, opened))
                return
        if isinstance(opened, Opened):
            close_quietly(opened.producer, "producer")

    def _take_opened(self, opened: Opened | OpeningError) -> None:
        self._is_working = False
        if isinstance(opened, OpeningError):
            self._take_failed_opening(opened)
            return
        self._failure = self._refusal = None
        self._pause.reset()
        state = self.state
        if self._closed or (opened.remembered and state.recalled):
            self._close(opened)  # what is recalled needs a look at the topic
            return
        self._opened = opened
        self._looked_s = self._now_s()  # before the opening
        # Below the client's checks in Python: this runs for every message.
        self._core = producer_core(opened.producer)
        self._entries = EntryOutcomes(opened.entry_limits if self._core is not None else None)
        self._confirmed_s = self._connected_s = self._now_s()
        state.opened(opened.last_number)
        self._pass_on()
        self.flush()

    def _take_failed_opening(self, error: OpeningError) -> None:
        kind, reason = error.kind, error.reason
        is_refused = kind is not Refusal.UNAVAILABLE
        self._is_news = is_refused
        self._failure, self._refusal = (None, reason) if is_refused else (reason, None)
        longest_s = _LONGEST_REFUSED_S if kind is Refusal.REFUSED else None
        self._open_at_s = self._now_s() + self._pause.next_s(longest_s)
        if kind is Refusal.GONE:
            self.state.gone(reason)
        elif kind is Refusal.REFUSED:
            self.state.refuse_unsent(reason)

    def _close_producer(self) -> None:
        opened, self._opened, self._core = self._opened, None, None
        self.state.is_open = False
        if opened is not None:
            self._close(opened)

    def _close(self, opened: Opened) -> None:
        """Close a producer; another one is opened only afterwards, as it may have the same name."""
        self._is_working = True

        def close() -> None:
            close_quietly(opened.producer, "producer")
            self._report(self._end_closing)

        self._start(close)

    def _end_closing(self) -> None:
        self._is_working = False

    # -- sending, and the answers

    def _pass_on(self) -> None:
        """Pass all messages to the client that may be sent now."""
        opened, core, state, entries = self._opened, self._core, self.state, self._entries
        if opened is None:
            return
        unsent, in_flight = state.unsent, state.in_flight
        if not unsent or not state.is_open or state.suspended:
            return
        # The client does not know a topic's own limit: it would send the message for ever.
        limit = opened.max_size
        send = None if core is None else core.send_async
        while unsent and not state.suspended:
            # The queues are used without a call of `SendState` for each message.
            sent = unsent.popleft()
            if limit is not None and sent.exceeds(limit):
                state.rejected(sent, TOO_LARGE)
                continue
            payload, until_ms = sent.payload, sent.deliver_at_ms
            outcome, callback = entries.alone() if until_ms else entries.next(payload)
            try:
                if send is not None:
                    send(build_message(payload, sent.properties, until_ms, sent.number), callback)
                else:
                    send_checked(
                        opened.producer, payload, sent.properties, until_ms, sent.number, callback
                    )
            except pulsar.PulsarException as error:
                entries.end()
                outcome, callback = entries.alone()
                outcome[error_name(error)] = None
            if callback is not None:
                outcome.first = sent
            elif sent.join(outcome.first):
                continue
            sent.outcome = outcome
            if outcome and OK not in outcome:
                reason = result_name(next(iter(outcome)))
                if reason in MESSAGE_REFUSALS:
                    state.rejected(sent, reason)
                    continue
            in_flight.append(sent)
            self._given += 1

    def _take_answers(self) -> None:
        """Process the answers that have come, in the order of the messages."""
        state, in_flight = self.state, self.state.in_flight
        while in_flight and in_flight[0].outcome:
            confirmed, verified = self._count_confirmed(in_flight)
            if confirmed:
                self._confirmed_s = self._now_s()
                self._answered += confirmed
                state.confirmed(confirmed, verified)
            else:
                self._answered += 1
                result = next(iter(in_flight[0].outcome))
                reason = UNPROVEN if is_ok(result) else result_name(result)
                if reason in MESSAGE_REFUSALS and not state.numbered:
                    state.rejected(in_flight.popleft(), reason)
                else:
                    state.failed(reason)
        if not in_flight:
            self._answered = self._given
        elif (
            # With several partitions, a message without an answer must not delay the confirmations
            # of others for long.
            self._opened is not None
            and self._opened.shared
            and self._now_s() - self._apart_s > _APART_EVERY_S
        ):
            self._take_apart()

    def _count_confirmed(self, in_flight: Iterable[Sent[Item]]) -> tuple[int, bool]:
        """Return how many of the oldest messages are confirmed, and if their ledgers are known."""
        count, verified, proven, receivers = 0, True, None, self.receivers
        for sent in in_flight:
            outcome = sent.outcome
            if outcome is not proven:
                if not outcome:
                    break
                ((result, message_id),) = outcome.items()
                if not is_ok(result) or not outcome.is_proven(message_id):
                    break
                if receivers is not None and message_id is not None:
                    verified = verified and receivers.knows(message_id)
                proven = outcome
            count += 1
        return count, verified

    def _take_apart(self) -> None:
        """Process confirmations behind a message without an answer."""
        self._apart_s = self._now_s()
        # Only confirmations of ledgers that are not known have to wait for a look at the topic.
        for verified in (True, False):
            found = [
                sent
                for sent in self.state.in_flight
                if sent.outcome and self._count_confirmed((sent,)) == (1, verified)
            ]
            if found:
                self._answered += len(found)
                self.state.confirmed_apart(found, verified)

    def _look(self) -> None:
        """Look at the topic in the background: for confirmations, if there are any, or without."""
        receivers = self.receivers
        if receivers is None or self._is_looking or self._now_s() < self._look_again_s:
            return
        self._is_looking = True
        unverified = list(self.state.unverified)

        def look() -> None:
            received: bool | None = None
            try:
                received = receivers.exist()
            except Exception as error:
                log.debug("cannot look at a topic: %s", error_name(error))
            self._report(partial(self._take_look, receivers, unverified, received))

        self._start(look)

    def _take_look(
        self, receivers: Receivers, unverified: Sequence[Sent[Item]], received: bool | None
    ) -> None:
        """Process a look at the topic: if it has receivers, or None if that is unknown."""
        state = self.state
        self._is_looking = False
        if received is None:
            self._look_again_s = self._now_s() + _LOOK_AGAIN_S
            return
        self._looked_s = self._now_s()
        ids = [each for sent in unverified for each in sent.outcome.values()]
        receivers.looked(received, (each for each in ids if each is not None))
        if received:
            # What was confirmed after the look may be in a topic that was created again since.
            state.received(len(unverified))
            if state.is_open and self._lost_s > STALL_S:
                state.lost()  # a broker serves the topic, and the client does not find it
        # A producer that was given up during the look has another one when it opens again.
        elif state.is_open or unverified:
            state.unreceived(NO_RECEIVER)


Key = TypeVar("Key")


class ProducerPool(ABC, Generic[Key, Item]):
    """The producers of a host by their keys, for one thread."""

    def __init__(
        self, loop: HostLoop, *, numbered: bool = False, patience_s: float = STALL_S
    ) -> None:
        self.numbered = numbered
        self._loop = loop
        self._patience_s = patience_s
        self._producers: dict[Key, TargetProducer[Item]] = {}

    @property
    def is_idle(self) -> bool:
        """True if no producer is open, or being opened."""
        return not self._producers

    @property
    def owes_answers(self) -> bool:
        """True if callbacks are about to come; ``poll`` has to follow soon."""
        return any(producer.owes_answers for producer in self._producers.values())

    @property
    def load(self) -> tuple[int, int]:
        """Number and bytes of the messages without an outcome."""
        return load_of(self._producers.values())

    def producer(self, key: Key) -> TargetProducer[Item]:
        """Return a producer, which opens itself for its first message."""
        return self._producers.get(key) or self._add(key)

    def waiting(self) -> list[tuple[Key, TargetProducer[Item]]]:
        """Return the producers with messages without an outcome."""
        return [(key, each) for key, each in self._producers.items() if each.messages]

    def flush(self) -> None:
        """End the clients' present batches."""
        for _, producer in self.waiting():
            producer.flush()

    def give_up_stalled(self) -> None:
        """Give up the producers that confirm nothing; the outcome of their messages is unknown."""
        for producer in self._producers.values():
            if producer.stalled_s > STALL_S:
                producer.give_up()

    def close(self) -> None:
        """Close every producer; messages without an outcome get none."""
        for key in list(self._producers):
            self._remove(key)

    def _add(self, key: Key) -> TargetProducer[Item]:
        producer = self._producers[key] = TargetProducer(
            partial(self._open, key),
            self._loop,
            receivers=self._receivers_of(key),
            numbered=self.numbered,
            patience_s=self._patience_s,
        )
        return producer

    def _remove(self, key: Key) -> TargetProducer[Item]:
        producer = self._producers.pop(key)
        producer.close()
        return producer

    def _receivers_of(self, key: Key) -> Receivers | None:
        """Return what is known of a topic's receivers; None to trust every confirmation."""
        return None

    @abstractmethod
    def _open(self, key: Key) -> Opened:
        """Open a producer; it runs in a thread of its own."""


def load_of(producers: Collection[TargetProducer[Any]]) -> tuple[int, int]:
    """Return number and bytes of the messages without an outcome of some producers."""
    return sum(each.messages for each in producers), sum(each.size for each in producers)
