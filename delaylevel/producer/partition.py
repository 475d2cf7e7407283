"""Producer of one level or window partition: opened in the background, closed with its owner.

States, and the events that change them:

    idle      no producer; nothing waits
    opening   messages wait in a bounded queue while a background thread opens the producer
    draining  the producer is open, and the thread gives it the waiting messages
    open      messages go directly to the producer
    closed    messages are refused

    idle -> opening      the first message
    opening -> draining  the producer is open
    opening -> idle      the opening was refused, or failed and no message waits any more
    draining -> open     the queue is empty
    any -> closed        close
"""

from __future__ import annotations

import enum
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pulsar

from delaylevel.cluster.client_parts.cores import (
    check_message,
    closing_core,
    in_kept_state,
    not_stored,
    producer_core,
)
from delaylevel.cluster.threads import GrowingPause

from .client_calls import (
    Awaited,
    Confirmation,
    Done,
    Opened,
    PartitionOpener,
    at_exit,
    close_async,
    error_of,
    first_error,
    ignore,
    in_client,
    is_transient,
    report_outcome,
    result_of,
)

log = logging.getLogger(__name__)

_BYTES = pulsar.schema.BytesSchema()
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
# An admin interface that takes longer is treated as one that fails.
_CHECK_S = 5.0
# Senders wait while the queue is drained, or they would keep the interpreter from doing it. The
# limit is for a callback of the client that sends: the client may need its thread meanwhile.
_DRAIN_S = 0.1
# The defaults of ``pulsar.Client.create_producer``.
_PENDING, _TIMEOUT_MS = 1000, 30_000


@dataclass(eq=False)
class WaitingMessage:
    """A message that was not given to the client yet; its callback is called once."""

    body: bytes | None
    callback: Callable[[Any, Any], Any]
    arguments: Mapping[str, Any]
    deadline_s: float = 0.0  # by time.monotonic()

    def end(self, error: Exception) -> None:
        """Call the callback for a message that is not sent; an error that it raises is logged."""
        result = error if isinstance(self.callback, Awaited) else result_of(error)
        try:
            self.callback(result, not_stored())
        except Exception:
            log.exception("the callback of a message that was not sent raised an error")


class _Phase(enum.Enum):
    IDLE = enum.auto()
    OPENING = enum.auto()
    DRAINING = enum.auto()
    OPEN = enum.auto()
    CLOSED = enum.auto()


class PartitionProducer:
    """Producer of one level or window partition. Several threads may use it."""

    def __init__(
        self,
        topic: str,
        settings: Mapping[str, Any],
        opener: PartitionOpener,
        check: Callable[[], None] | None,
        *,
        waits: bool,
    ) -> None:
        self._topic = topic
        self._settings = dict(settings)
        self._opener, self._check = opener, check
        self._waits = waits  # False in an event loop: senders never wait, also not for room
        #: Number of messages that may wait, 0 for any; and True if a sender waits for room.
        self.capacity: int = settings.get("max_pending_messages", _PENDING)
        self.blocks = bool(settings.get("block_if_queue_full"))
        self.batches = bool(settings.get("batching_enabled", True))
        self._timeout_s: float = settings.get("send_timeout_millis", _TIMEOUT_MS) / 1000
        self.given = 0  # to the client
        #: The way past the client's checks for messages that are built already; None unless open.
        self.send_built: Callable[[Any, Any], None] | None = None
        # Guards everything below. Neither the client nor a callback is called while it is held.
        self._changed = threading.Condition(threading.Lock())
        self._state = _Phase.IDLE
        self._queue: deque[WaitingMessage] = deque()  # in the order of their deadlines
        # Numbers of messages that came into the queue, and that the client has or that have failed;
        # the last failure, with the second number just after it.
        self._queued = self._settled = 0
        self._failure: tuple[int, Exception | None] = (0, None)
        self._failing = False  # the last attempt to open it failed
        self._worker: int | None = None  # the thread that opens and drains
        self._producer: Any = None
        at_exit.works.add(self)
        at_exit.close(self)  # the application may have dropped its owner

    def closes(self) -> list[Callable[[Done], None]]:
        """Return the function that starts to close it, for the exit."""
        return [self.close_async]

    def send(self, body: bytes | None, arguments: Mapping[str, Any]) -> Any:
        """Send a message, wait until it is stored, and return its ID."""
        message = Confirmation()
        if self.give(body, message, arguments) and self.batches and not message.ended:
            # It would wait for its batch. A failure reaches the message.
            first_error([self.flush])
        return message.message_id()

    def give(
        self, body: bytes | None, callback: Callable[[Any, Any], Any], arguments: Mapping[str, Any]
    ) -> bool:
        """Send a message; its result goes to the callback. Return False if it waits or failed."""
        # Read without the lock: an open partition is only closed, and then the client refuses.
        if self._state is not _Phase.OPEN:
            # The client would refuse a text that is not Unicode only later.
            check_message(
                _BYTES,
                body,
                arguments["properties"],
                (arguments["partition_key"], arguments["ordering_key"]),
                (None, None, False),
                arguments["event_timestamp"],
                arguments["deliver_at"],
            )
            if self._accept_unopened(WaitingMessage(body, callback, arguments)):
                return False
        self._producer.send_async(body, callback, **arguments)
        self.given += 1
        return True

    def is_outstanding(self) -> bool:
        """Return True while messages wait for the producer."""
        # The thread may still flush when the last message is given.
        return self._state is _Phase.OPENING or self._worker is not None

    def is_connected(self) -> bool:
        """Return False if the broker cannot be reached for sending, or after a close."""
        state, producer = self._state, self._producer
        if state is _Phase.CLOSED:
            return False
        return not self._failing if producer is None else bool(producer.is_connected())

    def wait_until_given(self) -> Exception | None:
        """Wait until the client has the messages sent so far; return the failure of a message."""
        with self._changed:
            # Earlier failures have reached their callbacks. Later ones may be reported twice.
            before, last = self._settled, self._queued
            self._changed.wait_for(lambda: self._settled >= last)
            number, error = self._failure
            return error if number > before else None

    def flush(self) -> None:
        """Wait until the messages that the client has are stored."""
        producer = self._producer
        if producer is not None:
            producer.flush()

    def close_async(self, done: Done) -> None:
        """Start to close the producer; no message is stored after ``done`` was called."""
        producer = self.seal()
        if producer is None:
            done(None)
        else:
            close_async(producer, done)

    def seal(self) -> Any:
        """End waiting messages, and refuse more; return the producer to close, if it is open."""
        with self._changed:
            producer, self.send_built = self._producer, None
            self._state = _Phase.CLOSED
            # The thread that drains the queue gives the rest to the closed producer.
            ended = self._take_all() if producer is None else []
            self._changed.notify_all()
        self._end(ended, error_of(pulsar.Result.AlreadyClosed))
        return producer

    def _accept_unopened(self, message: WaitingMessage) -> bool:
        """Let a message wait, or refuse it; return False if the producer is open by now."""
        refused = None
        first = False
        with self._changed:
            self._wait_for_room()
            if self._state is _Phase.OPEN:
                return False
            if self._state is _Phase.CLOSED:
                refused = pulsar.Result.AlreadyClosed
            elif self._is_full() and not (self.blocks and self._waits):
                refused = pulsar.Result.ProducerQueueIsFull
            else:
                message.deadline_s = time.monotonic() + self._timeout_s
                self._queue.append(message)
                self._queued += 1
                first = self._state is _Phase.IDLE
                if first:
                    self._state = _Phase.OPENING
                elif len(self._queue) == 1:
                    self._changed.notify_all()  # the worker must watch the deadline
        # Outside the lock: the callback of the application may send.
        if refused is not None:
            message.end(error_of(refused))
        if first:
            try:
                self._opener.start(self._run)
            except RuntimeError as error:  # no thread can be started, e.g. at exit
                self._refuse(error)
        return True

    def _wait_for_room(self) -> None:
        if not self._waits or threading.get_ident() == self._worker:
            return  # an event loop; or a callback that sends: no other thread could make room
        if self._state is _Phase.DRAINING:
            self._changed.wait_for(lambda: self._state is not _Phase.DRAINING, _DRAIN_S)
        while self.blocks and self._is_full() and self._state is not _Phase.CLOSED:
            self._changed.wait()

    def _is_full(self) -> bool:
        return 0 < self.capacity <= len(self._queue)

    def _take_all(self) -> list[WaitingMessage]:
        taken = list(self._queue)
        self._queue.clear()
        return taken

    def _end(self, messages: Sequence[WaitingMessage], error: Exception) -> None:
        """End messages that are not sent."""
        for message in messages:
            message.end(error)
        self._settle(len(messages), error)

    def _settle(self, count: int, error: Exception | None = None) -> None:
        """Let flushes go on that waited for messages, which the client has or which failed."""
        with self._changed:
            self._settled += count
            if count and error is not None:
                self._failure = self._settled, error
            self._changed.notify_all()

    # -- the background thread

    def _run(self) -> None:
        """Open the producer and drain the queue; try again while messages wait."""
        self._worker = threading.get_ident()
        pause = GrowingPause(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        try:
            while True:
                producer, error = self._attempt()
                if producer is not None:
                    self._drain(producer)
                    return
                if error is not None and not (
                    isinstance(error, pulsar.PulsarException) and is_transient(result_of(error))
                ):
                    self._refuse(error)
                    return
                if not self._pause(pause.next_s()):
                    return
        except Exception as error:  # each message must end in its callback
            log.exception("a producer for %s could not be opened", self._topic)
            self._refuse(error)
        finally:
            if self._worker == threading.get_ident():
                self._worker = None

    def _attempt(self) -> tuple[Any, Exception | None]:
        """Return a new producer, or the error; neither if the partition was closed."""
        check = self._check
        if check is not None:
            # A producer would create a deleted topic again, without the subscription that keeps
            # what is stored there. The check has a thread of its own: if the admin interface hangs,
            # the messages must still have time for the producer.
            patience_s = min(_CHECK_S, self._timeout_s / 2)
            _, error = self._perform(
                lambda done: self._opener.start(partial(report_outcome, check, done)), patience_s
            )
            if error is not None or self._state is _Phase.CLOSED:
                return None, error

        return self._perform(partial(self._opener.open, self._topic, self._settings))

    def _perform(
        self, begin: Callable[[Opened], object], patience_s: float = math.inf
    ) -> tuple[Any, Exception | None]:
        """Return what a step reports; neither if it takes too long, or at a close."""
        reports: list[tuple[Any, Exception | None]] = []
        waiting = True

        def report(producer: Any, error: Exception | None) -> None:
            with self._changed:
                reports.append((producer, error))
                self._changed.notify_all()
                late = not waiting
            if late and producer is not None:
                close_async(producer, ignore)  # nobody else knows of it

        begin(report)
        self._wait(patience_s, reports)
        with self._changed:
            waiting = False
            return reports[0] if reports else (None, None)

    def _wait(self, patience_s: float, reports: Sequence[Any] = ()) -> None:
        """Wait for a report, a time or the close; end the messages whose time is over meanwhile."""
        until_s = time.monotonic() + patience_s
        while True:
            with self._changed:
                now_s = time.monotonic()
                expired: list[WaitingMessage] = []
                while self._queue and self._queue[0].deadline_s <= now_s:
                    expired.append(self._queue.popleft())
                if expired:
                    self._changed.notify_all()  # there is room in the queue
                elif reports or self._state is _Phase.CLOSED or until_s <= now_s:
                    return
                else:
                    next_s = min(until_s, self._queue[0].deadline_s if self._queue else math.inf)
                    self._changed.wait(None if next_s == math.inf else next_s - now_s)
            self._end(expired, error_of(pulsar.Result.Timeout))

    def _pause(self, pause_s: float) -> bool:
        """Wait before the next attempt; return False if no message needs one."""
        self._failing = True
        self._wait(pause_s)
        with self._changed:
            # All have timed out. Attempts for nobody would only burden a broker in trouble.
            if self._state is _Phase.OPENING and not self._queue:
                self._state, self._failing = _Phase.IDLE, False
            return self._state is _Phase.OPENING

    def _drain(self, producer: Any) -> None:
        """Give the waiting messages to the producer, then let later ones go there directly."""
        with self._changed:
            closed = self._state is _Phase.CLOSED
            if not closed:
                self._state, self._failing = _Phase.DRAINING, False
                self._producer = producer
        if closed:
            close_async(producer, ignore)
            return
        awaited = False
        while True:
            with self._changed:
                waiting = self._take_all()
                if not waiting:
                    if self._state is _Phase.DRAINING:
                        self._state = _Phase.OPEN
                        core = producer_core(producer)
                        self.send_built = None if core is None else core.send_async
                    self._changed.notify_all()
                    break
            awaited = awaited or any(isinstance(each.callback, Awaited) for each in waiting)
            for message in waiting:
                callback = message.callback
                # The client's thread keeps Python's state from then on, but not for an event loop.
                if self._waits and closing_core(producer) is not None:
                    callback = in_kept_state(producer, callback)
                try:
                    with in_client:
                        producer.send_async(message.body, callback, **message.arguments)
                except Exception as error:
                    self._end([message], error)
                else:
                    self.given += 1
                    self._settle(1)
        if awaited and self.batches:
            # Who waits for a message does not wait for its batch to fill. A failure reaches the
            # message, and says nothing about the opening.
            with in_client, suppress(Exception):
                producer.flush()

    def _refuse(self, error: Exception) -> None:
        """End all waiting messages; the next one opens the producer again."""
        with self._changed:
            refused = self._take_all()
            if self._state is not _Phase.CLOSED:
                self._state, self._failing = _Phase.IDLE, False
            self._changed.notify_all()
        if refused:
            log.warning("messages for %s were not sent: %s", self._topic, error)
        self._end(refused, error)
