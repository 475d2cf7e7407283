"""The failed messages of a listener that wait to be acknowledged.

A failed message is acknowledged when the broker has confirmed its copy or dead letter. If it does
not, the message is published again, after pauses of 1 to 30 s, until it is stored or the listener
stops; then it stays unacknowledged. All this happens in one thread, which starts with the first
failure, and waits for the broker.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from delaylevel.cluster.failures import error_name
from delaylevel.cluster.logs import RepeatedWarning
from delaylevel.errors import DelayTooLongError, InvalidDelayError, UnsupportedOptionError
from delaylevel.model.clock import Clock, duration_ms
from delaylevel.model.formatting import exact_duration

from .listener import Listener
from .message import ReceivedMessage
from .retry import Decision, one_line, trace_of
from .retry_publisher import CannotParkError, Failed, RetryPublisher

log = logging.getLogger(__name__)

# A listener receives no more messages while it has this number of unfinished ones.
_MOST = 1_000
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0


def left_s(until_s: float) -> float:
    """Return the time that is left until a time of ``time.monotonic()``, in seconds; 0 if none."""
    return max(0.0, until_s - time.monotonic())


class Unfinished:
    """The failed messages of one listener that are not stored elsewhere yet.

    Args:
        threaded: False if a host calls :meth:`work` itself.
    """

    def __init__(
        self, listener: Listener, publisher: RetryPublisher, clock: Clock, threaded: bool
    ) -> None:
        self._listener = listener
        self._publisher = publisher
        self._clock = clock
        self._threaded = threaded
        self._tally = listener.stats.tally()
        # By the time of the next try; 0 before the first.
        self._waiting: list[tuple[float, int, Failed]] = []
        self._letters: deque[Failed] = deque()
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._warning = RepeatedWarning(log, f"storing failed messages of {listener}")
        #: Number of these messages, and the number from which no more should be received.
        self.count = 0
        self.most = _MOST

    def add(self, message: ReceivedMessage, consumer: Any, decision: Decision) -> None:
        """Take over a message whose attempt failed; log it."""
        _log_failure(self._listener, message, decision)
        due_ms = 0
        if decision.delay is not None:
            due_ms = self._clock.now_ms() + duration_ms(decision.delay)
        with self._changed:
            # Most listeners never need it.
            if self._threaded and self._thread is None:
                name = f"delaylevel-failed-{self._listener.name}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                thread.start()  # if there can be no thread, the next message tries again
                self._thread = thread
            self.count += 1
            self._wait(Failed(message, consumer, decision, due_ms), 0.0)

    def _wait(self, failed: Failed, try_s: float) -> None:
        with self._changed:
            heapq.heappush(self._waiting, (try_s, next(self._order), failed))
            self._changed.notify_all()

    def work(self, timeout_s: float = 0.0) -> bool:
        """Store and acknowledge what is there; return False if there was nothing within the time.

        Copies are stored together, dead letters one at a time: none of them waits for another one
        that its topic refuses.
        """
        failed = []
        with self._changed:
            now_s = time.monotonic()
            if self._waiting:
                timeout_s = min(timeout_s, self._waiting[0][0] - now_s)
            if timeout_s > 0 and not self._letters and not self._stopping:
                self._changed.wait(timeout_s)
                now_s = time.monotonic()
            while self._waiting and self._waiting[0][0] <= now_s:
                failed.append(heapq.heappop(self._waiting)[2])
        self._letters += [each for each in failed if each.decision.delay is None]
        worked = bool(failed or self._letters)
        self._park([each for each in failed if each.decision.delay is not None])
        if self._letters:
            letter, error = self._letters.popleft(), None
            try:
                self._publisher.bury(letter.message, letter.decision)
            except Exception as refused:
                error = refused
            self._settle(letter, error)
        return worked

    def close(self, until_s: float) -> None:
        """Finish what can be finished, end the thread, and close the publisher."""
        try:
            self._finish(until_s)
        finally:
            self._publisher.close()

    def _finish(self, until_s: float) -> None:
        if not self._threaded:
            until_s = 0.0
            while self.work():
                pass
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self.count, left_s(until_s))
            thread = self._thread
        if self.count:
            log.warning(
                "%s: %d failed messages are not stored for another attempt; they stay "
                "unacknowledged, and are delivered again",
                self._listener,
                self.count,
            )
        elif thread is not None:
            thread.join(left_s(until_s))

    def _run(self) -> None:
        while self._waiting or self._letters or not self._stopping:
            try:
                self.work(3600.0)
                with self._changed:
                    while self._stopping and self._waiting and self._waiting[0][0]:
                        heapq.heappop(self._waiting)  # the broker refused it
                        self._finished()
            except Exception:
                # One message must not end the thread of all others.
                log.exception("%s: a failed message stays unacknowledged", self._listener)

    def _park(self, failed: Sequence[Failed]) -> None:
        errors = self._publisher.park(failed) if failed else []
        for each, error in zip(failed, errors, strict=True):
            if isinstance(error, (CannotParkError, DelayTooLongError, InvalidDelayError)):
                reason = one_line(f"cannot be retried: {error}; {each.decision.reason}")
                each.decision = each.decision._replace(delay=None, reason=reason)
                _log_failure(self._listener, each.message, each.decision)
                self._letters.append(each)
            else:
                self._settle(each, error)

    def _settle(self, failed: Failed, error: Exception | None) -> None:
        """Acknowledge a message that is stored elsewhere; let another wait for its next try."""
        if error is None:
            self._warning.over()
            dead = failed.decision.delay is None
            self._tally.dead += dead
            self._tally.retried += not dead
            end = failed.consumer.acknowledge
        elif isinstance(error, UnsupportedOptionError):
            # It cannot be stored anywhere else.
            log.error("%s: the broker delivers a failed message again: %s", self._listener, error)
            end = failed.consumer.negative_acknowledge
        else:
            self._warning.failed(f"{error_name(error)}: {error}")
            pause_s = min(_SHORTEST_PAUSE_S * 2**failed.pauses, _LONGEST_PAUSE_S)
            failed.pauses = min(failed.pauses + 1, 10)  # the pause has been the longest for long
            self._wait(failed, time.monotonic() + pause_s)
            return
        try:
            end(failed.message.raw)
        except Exception as lost:
            # Its consumer was lost. The broker delivers the message again.
            log.debug("%s: %s: %s", self._listener, failed.message.id, error_name(lost))
        self._finished()

    def _finished(self) -> None:
        with self._changed:
            self.count -= 1
            self._changed.notify_all()


def _log_failure(listener: Listener, message: ReceivedMessage, decision: Decision) -> None:
    attempt = str(message.attempt)
    if listener.backoff is not None:
        attempt += f" of {listener.backoff.attempts}"
    failure = listener, attempt, message.id, decision.reason
    if decision.delay is None:
        text = "%s: attempt %s of %s: %s; to the dead-letter topic\n%s"
        log.error(text, *failure, trace_of(decision.error))
    else:
        pause = exact_duration(duration_ms(decision.delay))
        log.warning("%s: attempt %s of %s: %s; again in %s", *failure, pause)
