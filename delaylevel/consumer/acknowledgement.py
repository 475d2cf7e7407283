"""Messages whose attempt has ended, until they are acknowledged.

A failed message is acknowledged when the broker has confirmed its copy or dead letter. If it does
not, the message is published again, after pauses of 1 to 30 s, until it is stored or the listener
stops; then it stays unacknowledged. All this happens in one thread, which starts with the first
failure. Confirmations come in threads of the client, which must not wait.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

from delaylevel.cluster.failures import error_name
from delaylevel.cluster.logs import RepeatedWarning
from delaylevel.errors import DelayTooLongError, UnsupportedOptionError
from delaylevel.model.clock import Clock, duration_ms
from delaylevel.model.formatting import exact_duration

from .listener import Listener
from .message import ReceivedMessage
from .retry import Bury, Failure, Park, trace_of

log = logging.getLogger(__name__)

# A listener receives no more messages while it has this number of unfinished ones.
_MOST = 1_000
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0


class CopyPublisher(Protocol):
    """The publisher of a listener's retried copies and dead letters."""

    def park(
        self,
        message: ReceivedMessage,
        delay: timedelta,
        failure: Failure,
        done: Callable[[Exception | None], None],
    ) -> None:
        """Publish a copy for another attempt, and call ``done`` with None or the error."""

    def bury(
        self,
        message: ReceivedMessage,
        failure: Failure,
        done: Callable[[Exception | None], None],
    ) -> None:
        """Publish a dead letter, and call ``done`` with None or the error."""

    def close(self) -> None:
        """Wait for the confirmations, and close the producers."""


class _Failed:
    """A message whose attempt failed.

    Attributes:
        message: the message.
        consumer: the consumer that received it.
        decision: the decision about it.
        due_ms: time of the next attempt, ms since the epoch; 0 for a dead letter.
        pauses: number of unsuccessful calls of the publisher.
        asked: True while the publisher has not answered.
    """

    __slots__ = ("asked", "consumer", "decision", "due_ms", "message", "pauses")

    def __init__(
        self, message: ReceivedMessage, consumer: Any, decision: Park | Bury, due_ms: int
    ) -> None:
        self.message = message
        self.consumer = consumer
        self.decision = decision
        self.due_ms = due_ms
        self.pauses = 0
        self.asked = False


class _ToPublish(NamedTuple):
    failed: _Failed


class _PublishAnswer(NamedTuple):
    failed: _Failed
    error: Exception | None


class _ToAcknowledge(NamedTuple):
    message: ReceivedMessage
    consumer: Any


class Unfinished:
    """The unfinished messages of one listener.

    Args:
        listener: the listener.
        publisher: publisher of copies and dead letters.
        clock: source of the time from which a delay counts.
        threaded: False if a host calls :meth:`work` itself.
    """

    def __init__(
        self, listener: Listener, publisher: CopyPublisher, clock: Clock, threaded: bool = True
    ) -> None:
        self._listener = listener
        self._publisher = publisher
        self._clock = clock
        self._threaded = threaded
        self._tally = listener.stats.tally()
        self._inbox: queue.SimpleQueue[_ToPublish | _PublishAnswer | _ToAcknowledge | None]
        self._inbox = queue.SimpleQueue()
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

    def wait_for_room(self, timeout_s: float) -> None:
        """Wait until there is room for another message, at most for a time."""
        with self._changed:
            self._changed.wait_for(lambda: not self.full, timeout_s)

    def add(self, message: ReceivedMessage, consumer: Any, decision: Park | Bury) -> None:
        """Take over a message whose attempt failed; log it."""
        _log_failure(self._listener, message, decision)
        due_ms = 0
        if isinstance(decision, Park):
            due_ms = self._clock.now_ms() + duration_ms(decision.delay)
        self._put(_ToPublish(_Failed(message, consumer, decision, due_ms)))

    def acknowledge(self, message: ReceivedMessage, consumer: Any) -> None:
        """Acknowledge a handled message in the thread of this object. It may be called anywhere."""
        self._put(_ToAcknowledge(message, consumer))

    def _put(self, item: _ToPublish | _ToAcknowledge) -> None:
        with self._changed:
            if self._threaded and self._thread is None:
                name = f"delaylevel-failed-{self._listener.name}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                thread.start()  # if there can be no thread, the next message tries again
                self._thread = thread
            self.count += 1
            self._inbox.put(item)

    def work(self, timeout_s: float = 0.0) -> bool:
        """Take the next step; return False if there was nothing to do within the time."""
        now_s = time.monotonic()
        if self._waiting and self._waiting[0][0] <= now_s:
            self._publish(heapq.heappop(self._waiting)[2])
            return True
        if self._waiting:
            timeout_s = min(timeout_s, self._waiting[0][0] - now_s)
        try:
            item = self._inbox.get(timeout=timeout_s) if timeout_s else self._inbox.get_nowait()
        except queue.Empty:
            return False
        if isinstance(item, _ToPublish):
            self._publish(item.failed)
        elif isinstance(item, _PublishAnswer):
            self._answered(item.failed, item.error)
        elif isinstance(item, _ToAcknowledge):
            self._acknowledge(item.message, item.consumer)
        return True

    def close(self, until_s: float) -> None:
        """Finish what can be finished, and end the thread.

        Args:
            until_s: time to stop waiting, by ``time.monotonic()``.
        """
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
                if self._stopping:
                    self._give_up_waiting()
            except Exception:
                # One message must not end the thread of all others.
                log.exception("%s: a failed message stays unacknowledged", self._listener)
                self._finished()

    def _give_up_waiting(self) -> None:
        """Forget messages that the broker refused, once the listener stops."""
        while self._waiting:
            heapq.heappop(self._waiting)
            self._finished()

    def _publish(self, failed: _Failed) -> None:
        def done(error: Exception | None) -> None:
            self._inbox.put(_PublishAnswer(failed, error))

        decision = failed.decision
        failed.asked = True
        try:
            if isinstance(decision, Park):
                left_ms = max(0, failed.due_ms - self._clock.now_ms())
                delay = timedelta(milliseconds=left_ms) if failed.pauses else decision.delay
                self._publisher.park(failed.message, delay, decision.failure, done)
            else:
                self._publisher.bury(failed.message, decision.failure, done)
        except Exception as error:
            done(error)

    def _answered(self, failed: _Failed, error: Exception | None) -> None:
        if not failed.asked:
            return  # the second answer of one call
        failed.asked = False
        if isinstance(error, DelayTooLongError) and isinstance(failed.decision, Park):
            # The levels never take it, and a message that waits here takes room.
            failed.decision = _last(failed.decision, error)
            _log_failure(self._listener, failed.message, failed.decision)
            self._publish(failed)
            return
        if isinstance(error, UnsupportedOptionError):
            self._give_back(failed, error)
            return
        if error is not None:
            self._warning.failed(f"{error_name(error)}: {error}")
            pause_s = min(_SHORTEST_PAUSE_S * 2**failed.pauses, _LONGEST_PAUSE_S)
            failed.pauses = min(failed.pauses + 1, 10)
            at_s = time.monotonic() + pause_s
            heapq.heappush(self._waiting, (at_s, next(self._order), failed))
            return
        self._warning.over()
        if isinstance(failed.decision, Park):
            self._tally.retried += 1
        else:
            self._tally.dead += 1
        self._acknowledge(failed.message, failed.consumer)

    def _give_back(self, failed: _Failed, error: Exception) -> None:
        """Let the broker deliver a message again that cannot be stored anywhere else."""
        log.error("%s: the broker delivers a failed message again: %s", self._listener, error)
        try:
            failed.consumer.negative_acknowledge(failed.message.raw)
        except Exception as lost:  # then it is delivered again, too
            log.debug("%s: %s: %s", self._listener, failed.message.id, error_name(lost))
        self._finished()

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


def _last(park: Park, error: Exception) -> Bury:
    """Return the decision for a message that cannot be handled again as decided."""
    failure = park.failure
    trace = "" if failure.error is None else trace_of(failure.error)
    return Bury(failure._replace(reason=f"{failure.reason} (no retry: {error})", trace=trace))


def _log_failure(listener: Listener, message: ReceivedMessage, decision: Park | Bury) -> None:
    attempt = str(message.attempt)
    if listener.backoff is not None:
        attempt += f" of {listener.backoff.attempts}"
    reason = decision.failure.reason
    if isinstance(decision, Park):
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
            decision.failure.trace,
        )
