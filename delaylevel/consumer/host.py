"""Consumers, the steps around a call of a handler, and what waits to be acknowledged.

A failed message is acknowledged when the broker has confirmed its copy or dead letter. If it does
not, the message is published again, after pauses of 1 to 30 s, until it is stored or the listener
stops; then it stays unacknowledged. All this happens in one thread, which starts with the first
failure, and waits for the broker.
"""

from __future__ import annotations

import heapq
import inspect
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import pulsar

from delaylevel.cluster.failures import close_quietly, error_name
from delaylevel.cluster.logs import RepeatedWarning
from delaylevel.cluster.threads import BackgroundWork
from delaylevel.errors import DelayTooLongError, InvalidDelayError, UnsupportedOptionError
from delaylevel.model.clock import Clock, duration_ms
from delaylevel.model.formatting import exact_duration

from .listener import Listener, ListenerCounts
from .message import ReceivedMessage
from .retry import Decision, Verdict, decide, one_line, trace_of
from .retry_publisher import CannotParkError, RetryPublisher

if TYPE_CHECKING:
    from .handled_ids import HandledIds

log = logging.getLogger(__name__)

# A listener receives no more messages while it has this number of unfinished ones.
_MOST = 1_000
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0


@dataclass
class _Failed:
    """A message whose attempt failed."""

    message: ReceivedMessage
    consumer: Any
    decision: Decision
    due_ms: int  # 0 for a dead letter
    pauses: int = 0


class Unfinished:
    """The unfinished messages of one listener.

    Args:
        threaded: False if a host calls :meth:`work` itself.
    """

    def __init__(
        self, listener: Listener, publisher: RetryPublisher, clock: Clock, threaded: bool = True
    ) -> None:
        self._listener = listener
        self._publisher = publisher
        self._clock = clock
        self._threaded = threaded
        self._tally = listener.stats.tally()
        self._inbox: queue.SimpleQueue[_Failed | None] = queue.SimpleQueue()
        self._letters: deque[_Failed] = deque()
        self._waiting: list[tuple[float, int, _Failed]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._warning = RepeatedWarning(log, f"storing failed messages of {listener}")
        #: Number of these messages, and the number from which no more should be received.
        self.count = 0
        self.most = _MOST

    @property
    def full(self) -> bool:
        """True if no more messages should be received."""
        return self.count >= self.most

    def add(self, message: ReceivedMessage, consumer: Any, decision: Decision) -> None:
        """Take over a message whose attempt failed; log it."""
        _log_failure(self._listener, message, decision)
        due_ms = 0
        if decision.delay is not None:
            due_ms = self._clock.now_ms() + duration_ms(decision.delay)
        with self._changed:
            if self._threaded and self._thread is None:
                name = f"delaylevel-failed-{self._listener.name}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                thread.start()  # if there can be no thread, the next message tries again
                self._thread = thread
            self.count += 1
            self._inbox.put(_Failed(message, consumer, decision, due_ms))

    def work(self, timeout_s: float = 0.0) -> bool:
        """Store and acknowledge what is there; return False if there was nothing within the time.

        Copies are stored together, dead letters one at a time: none of them waits for another one
        that its topic refuses.
        """
        now_s = time.monotonic()
        failed = []
        while self._waiting and self._waiting[0][0] <= now_s:
            failed.append(heapq.heappop(self._waiting)[2])
        if failed or self._letters:
            timeout_s = 0.0
        elif self._waiting:
            timeout_s = min(timeout_s, self._waiting[0][0] - now_s)
        items = self._take(timeout_s)
        failed += [item for item in items if item is not None]
        self._letters += [each for each in failed if each.decision.delay is None]
        worked = bool(items or self._letters or failed)
        self._park([each for each in failed if each.decision.delay is not None])
        if self._letters:
            self._bury(self._letters.popleft())
        return worked

    def _take(self, timeout_s: float) -> list[_Failed | None]:
        """Return what is in the inbox; wait for the first one."""
        taken = []
        try:
            taken.append(self._inbox.get(timeout=timeout_s or None, block=timeout_s > 0))
            while True:
                taken.append(self._inbox.get_nowait())
        except queue.Empty:
            return taken

    def close(self, until_s: float) -> None:
        """Finish what can be finished, end the thread, and close the publisher."""
        try:
            self._finish(until_s)
        finally:
            self._publisher.close()

    def _finish(self, until_s: float) -> None:
        self._stopping = True
        if not self._threaded:
            until_s = 0.0
            while self.work():
                pass
        self._inbox.put(None)
        with self._changed:
            self._changed.wait_for(lambda: not self.count, max(0.0, until_s - time.monotonic()))
            thread = self._thread
        if self.count:
            log.warning(
                "%s: %d failed messages are not stored for another attempt; they stay "
                "unacknowledged, and are delivered again",
                self._listener,
                self.count,
            )
        elif thread is not None:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _run(self) -> None:
        while not (self._stopping and not self.count):
            try:
                self.work(3600.0)
                while self._stopping and self._waiting:
                    heapq.heappop(self._waiting)  # the broker refused it
                    self._finished()
            except Exception:
                # One message must not end the thread of all others.
                log.exception("%s: a failed message stays unacknowledged", self._listener)

    def _park(self, failed: Sequence[_Failed]) -> None:
        copies: list[tuple[ReceivedMessage, Decision]] = []
        for each in failed:
            decision = each.decision
            if each.pauses:
                left_ms = max(0, each.due_ms - self._clock.now_ms())
                decision = decision._replace(delay=timedelta(milliseconds=left_ms))
            copies.append((each.message, decision))
        errors = self._publisher.park(copies) if copies else []
        for each, error in zip(failed, errors, strict=True):
            if isinstance(error, (CannotParkError, DelayTooLongError, InvalidDelayError)):
                reason, failure = each.decision.reason, each.decision.error
                each.decision = Decision(
                    None,
                    one_line(f"cannot be retried: {error}; {reason}"),
                    failure,
                    "" if failure is None else trace_of(failure),
                )
                _log_failure(self._listener, each.message, each.decision)
                self._letters.append(each)
            elif self._settle(each, error):
                self._tally.retried += 1
                self._acknowledge(each.message, each.consumer)

    def _bury(self, failed: _Failed) -> None:
        error = None
        try:
            self._publisher.bury(failed.message, failed.decision)
        except Exception as refused:
            error = refused
        if self._settle(failed, error):
            self._tally.dead += 1
            self._acknowledge(failed.message, failed.consumer)

    def _settle(self, failed: _Failed, error: Exception | None) -> bool:
        """Let a message that was not stored wait for its next try; return True for others."""
        if error is None:
            self._warning.over()
            return True
        if isinstance(error, UnsupportedOptionError):
            # It cannot be stored anywhere else.
            log.error("%s: the broker delivers a failed message again: %s", self._listener, error)
            try:
                failed.consumer.negative_acknowledge(failed.message.raw)
            except Exception as lost:  # then it is delivered again, too
                log.debug("%s: %s: %s", self._listener, failed.message.id, error_name(lost))
            self._finished()
            return False
        self._warning.failed(f"{error_name(error)}: {error}")
        pause_s = min(_SHORTEST_PAUSE_S * 2**failed.pauses, _LONGEST_PAUSE_S)
        failed.pauses = min(failed.pauses + 1, 10)
        heapq.heappush(self._waiting, (time.monotonic() + pause_s, next(self._order), failed))
        return False

    def _acknowledge(self, message: ReceivedMessage, consumer: Any) -> None:
        try:
            consumer.acknowledge(message.raw)
        except Exception as error:
            # Its consumer was lost. The broker delivers the message again.
            log.debug("%s: acknowledging %s: %s", self._listener, message.id, error_name(error))
        self._finished()

    def _finished(self) -> None:
        with self._changed:
            self.count -= 1
            self._changed.notify_all()


def _log_failure(listener: Listener, message: ReceivedMessage, decision: Decision) -> None:
    attempt = str(message.attempt)
    if listener.backoff is not None:
        attempt += f" of {listener.backoff.attempts}"
    reason = decision.reason
    if decision.delay is not None:
        next_step = f"again in {exact_duration(duration_ms(decision.delay))}"
        log.warning(
            "%s: attempt %s of %s: %s; %s", listener, attempt, message.id, reason, next_step
        )
    else:
        log.error(
            "%s: attempt %s of %s: %s; to the dead-letter topic\n%s",
            listener,
            attempt,
            message.id,
            reason,
            decision.trace,
        )


#: A thread that waits for messages notices a stop after this time.
RECEIVE_MS = 500
# Time to store IDs when nothing is left of the time for a stop.
_LEAST_S = 1.0
#: Pause after which a waiting host looks whether the listener stops, in seconds.
WAIT_S = 0.05


class Handling:
    """The steps around a call of one listener's handler, shared by its threads.

    Three hosts follow them: threads, an event loop, and the in-memory Pulsar of tests. A host calls
    :meth:`begin` before the handler, and :meth:`settle` after it. It acknowledges nothing else.
    So a crash at any time leaves a message unacknowledged until it was handled, or until a copy
    with its ID is stored.

    Attributes:
        handles_all: True if every message is handled, so that a host may leave out :meth:`begin`.
    """

    def __init__(
        self, listener: Listener, handled: HandledIds | None, unfinished: Unfinished, clock: Clock
    ) -> None:
        self.listener = listener
        self.unfinished = unfinished
        self.clock = clock
        self._handled = handled
        self.handles_all = listener.condition is None and handled is None

    def received(self, raw: Any) -> ReceivedMessage:
        """Return a message of the client as its handler sees it."""
        listener = self.listener
        now_ms = self.clock.now_ms()
        return ReceivedMessage(raw, listener.business_topic, listener.subscription, now_ms)

    def begin(self, message: ReceivedMessage) -> Verdict:
        """Decide about a received message; after ``WAIT``, ask again a moment later.

        Raises:
            BaseException: the error of the application's filter or function for IDs; it is a
                failed attempt.
        """
        condition, handled = self.listener.condition, self._handled
        if condition is not None and not condition(message):
            return Verdict.FILTERED
        if handled is None:
            return Verdict.HANDLE
        return handled.begin(message)

    def close(self, until_s: float) -> None:
        """Finish failed messages, and close what stores them."""
        handled = self._handled
        with ExitStack() as stack:  # backwards
            if handled is not None:
                stack.callback(handled.close)
            stack.callback(self.unfinished.close, until_s)
            if handled is not None:
                # A confirmation of an ID lets its message be acknowledged.
                stack.callback(lambda: handled.flush(min(_LEAST_S, left_s(until_s))))

    def release(self, message: ReceivedMessage) -> None:
        """Give up a message after :meth:`begin`, without a decision."""
        if self._handled is not None:
            self._handled.release(message)

    def settle(
        self,
        verdict: Verdict,
        failure: BaseException | None,
        message: ReceivedMessage,
        consumer: Any,
        tally: ListenerCounts,
    ) -> None:
        """Acknowledge a message, or hand it over to the unfinished ones.

        Args:
            verdict: the answer of :meth:`begin`, if that returned one.
            failure: the error of :meth:`begin` or of the handler.
        """
        acknowledge = partial(consumer.acknowledge, message.raw)
        if failure is not None:
            self.release(message)
            tally.failed += 1
            decision = decide(self.listener.backoff, message.attempt, failure)
            self.unfinished.add(message, consumer, decision)
        elif verdict is Verdict.FILTERED:
            tally.filtered += 1
            acknowledge()
        elif verdict is Verdict.DUPLICATE:
            tally.duplicates += 1
            acknowledge()
        else:
            tally.handled += 1
            if self._handled is None:
                acknowledge()
            else:
                # The ID first: a crash between the two would let the message be handled again.
                # With a store, it may be saved later, in another thread.
                self._handled.save(message, acknowledge)


class RunningListener(Protocol):
    """A listener that receives messages."""

    handling: Handling

    def start(self) -> None:
        """Subscribe, and receive messages."""

    @property
    def alive(self) -> bool:
        """True while all threads run."""

    @property
    def ready(self) -> bool:
        """True while all consumers are subscribed and connected."""

    def stop(self) -> None:
        """Receive no more messages."""

    def join(self, until_s: float) -> bool:
        """Wait for running handlers; return True if all of them have ended."""

    @property
    def running(self) -> int:
        """Number of running calls of the handler."""

    def close(self) -> None:
        """Cancel what still runs, if it can be cancelled, and close the consumers."""


def left_s(until_s: float) -> float:
    """Return the time that is left until a time of ``time.monotonic()``, in seconds; 0 if none."""
    return max(0.0, until_s - time.monotonic())


def refuse_awaitable(returned: Any) -> None:
    """Refuse the result of a function that should have been a coroutine function."""
    if inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            returned.close()
        raise TypeError(
            "the handler returned an awaitable, which nothing awaits: make it an async def"
        )


# Failures that may pass. With any other one, a listener does not start.
_PASSING = (
    pulsar.ConnectError,
    pulsar.NotConnected,
    pulsar.ServiceUnitNotReady,
    pulsar.TooManyLookupRequestException,
    pulsar.Timeout,
    pulsar.Interrupted,
    pulsar.ConsumerBusy,
    pulsar.BrokerPersistenceError,
    pulsar.UnknownError,
)
# The client connects again by itself, unless something is wrong for good.
_DISCONNECTED_S = 60.0


class Subscribed:
    """A consumer, shared by threads, that is opened again when it fails."""

    def __init__(self, subscribe: Callable[[], Any], what: str, stopping: threading.Event) -> None:
        self._subscribe = subscribe
        self._stopping = stopping
        self._warning = RepeatedWarning(log, what)
        self._lock = threading.Lock()
        self._consumer: Any = None
        self._pause_s = 0.0
        self._disconnected_s: float | None = None

    @property
    def ready(self) -> bool:
        """True while the consumer is open and connected."""
        consumer = self._consumer
        return consumer is not None and bool(consumer.is_connected())

    def start(self) -> None:
        """Open the consumer for the first time; leave it to :meth:`get` if the failure may pass."""
        try:
            self._consumer = self._subscribe()
        except _PASSING as error:
            self._failed(error)

    def get(self) -> Any:
        """Return the consumer; open it if necessary, with pauses. None if the listener stops."""
        consumer = self._consumer
        if consumer is not None:
            return consumer
        with self._lock:
            while self._consumer is None:
                if self._stopping.wait(self._pause_s):
                    return None
                try:
                    self._consumer = self._subscribe()
                except Exception as error:  # also one of a function for tokens
                    self._failed(error)
                else:
                    self._pause_s = 0.0
                    self._disconnected_s = None
                    self._warning.over()
            return self._consumer

    def fail(self, consumer: Any, error: BaseException | str) -> None:
        """Close a consumer that failed, so that :meth:`get` opens another one."""
        with self._lock:
            if self._consumer is not consumer or self._stopping.is_set():
                return
            self._consumer = None
            self._failed(error)
        closing = BackgroundWork()
        closing.start(partial(close_quietly, consumer, "consumer"))
        closing.join()

    def check(self, consumer: Any) -> None:
        """Give up a consumer that has been disconnected for a minute. Call it now and then."""
        if consumer.is_connected():
            self._disconnected_s = None
            return
        now_s = time.monotonic()
        since_s = self._disconnected_s
        if since_s is None:
            self._disconnected_s = now_s
        elif now_s - since_s > _DISCONNECTED_S:
            self._disconnected_s = None
            self.fail(consumer, f"disconnected for {_DISCONNECTED_S:.0f} s")

    def close(self) -> None:
        """Close the consumer; the broker gives unacknowledged messages to other ones."""
        with self._lock:
            consumer, self._consumer = self._consumer, None
        if consumer is not None:
            close_quietly(consumer, "consumer")

    def _failed(self, error: BaseException | str) -> None:
        reason = error if isinstance(error, str) else f"{error_name(error)}: {error}"
        self._warning.failed(f"{reason}; trying again until it works")
        self._pause_s = min(max(_SHORTEST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)


#: Functions that return a new consumer, given its number: of new messages, and of retried copies.
Subscribe = Sequence[Callable[[int], Any]]


class ReceivingThreads:
    """The threads that receive the messages of one listener.

    A subclass fills ``sources`` and ``threads``.
    """

    def __init__(self, handling: Handling) -> None:
        self.handling = handling
        self.stopping = threading.Event()
        self.sources: list[Subscribed] = []
        self.threads: list[threading.Thread] = []

    def consumers(self, subscribe: Subscribe, count: int) -> list[list[Subscribed]]:
        """Return the consumers of new messages, and those of retried copies; add them to all."""
        found = [
            [
                Subscribed(
                    partial(opened, number), f"{what} of {self.handling.listener}", self.stopping
                )
                for number in range(count)
            ]
            for opened, what in zip(subscribe, ("messages", "retries"), strict=False)
        ]
        self.sources += [source for sources in found for source in sources]
        return found

    def start(self) -> None:
        """Subscribe, and start the threads."""
        for source in self.sources:
            source.start()
        for thread in self.threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """True while all threads run."""
        return all(thread.is_alive() for thread in self.threads)

    @property
    def ready(self) -> bool:
        """True while all consumers are subscribed and connected."""
        return all(source.ready for source in self.sources)

    def stop(self) -> None:
        """Receive no more messages."""
        self.stopping.set()

    def join(self, until_s: float) -> bool:
        """Wait for the threads, but for the present one; return True if they have ended."""
        here = threading.get_ident()
        started = [thread for thread in self.threads if thread.ident not in (None, here)]
        for thread in started:
            thread.join(left_s(until_s))
        return not any(thread.is_alive() for thread in started)

    def close(self) -> None:
        """Close the consumers, and wait for that once, for some seconds."""
        # While the broker hangs, each close takes the client 30 s, and so does an opening before
        # it. A second close at the same moment, such as one by the client, may never return.
        closing = BackgroundWork()
        for source in self.sources:
            closing.start(source.close)
        closing.join()
