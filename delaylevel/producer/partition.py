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
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pulsar

from delaylevel.cluster.client_parts.cores import closing_core, in_kept_state, not_stored
from delaylevel.cluster.threads import Starter

from .checks import check_encodable
from .client_calls import (
    Awaited,
    Confirmation,
    Done,
    GroupCommit,
    Opened,
    at_exit,
    close_async,
    error_of,
    ignore,
    in_client,
    interruptible,
    is_transient,
    result_of,
)

log = logging.getLogger(__name__)


@dataclass(eq=False)
class WaitingMessage:
    """A message that was not given to the client yet; its callback is called once.

    Attributes:
        body: the encoded payload; None for a null value.
        callback: as for ``pulsar.Producer.send_async``.
        deadline_s: time at which it fails, in seconds of the queue's clock.
    """

    body: bytes | None
    callback: Callable[[Any, Any], Any]
    arguments: Mapping[str, Any]
    deadline_s: float = 0.0

    def give(self, producer: Any) -> bool:
        """Give the message to the client; return True.

        The client's thread keeps Python's state from then on, unless an event loop waits.
        """
        callback = self.callback
        awaited = callback if isinstance(callback, Awaited) else None
        in_event_loop = awaited is not None and awaited.in_event_loop
        if closing_core(producer) is not None and not in_event_loop:
            callback = in_kept_state(producer, callback)
        producer.send_async(self.body, callback, **self.arguments)
        if awaited is not None:
            awaited.given()
        return True

    def end(self, error: Exception) -> None:
        """Call the callback for a message that is not sent."""
        if isinstance(self.callback, Awaited):
            self.callback.error = error
        self.callback(result_of(error), not_stored())


@dataclass(eq=False)
class WaitingFlush:
    """A flush that waits until the messages before it were given to the client, or ended."""

    done: Done

    def give(self, _: Any) -> bool:
        """End the wait: the client can flush the messages."""
        self.done(None)
        return False

    def end(self, error: Exception) -> None:
        """End the wait with the failure of the messages before it."""
        self.done(error)


class SendQueue:
    """Messages and flushes in the order of their calls; the owner locks it.

    Attributes:
        messages: number of messages, without flushes.
    """

    def __init__(self) -> None:
        self.messages = 0
        self._items: deque[WaitingMessage | WaitingFlush] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def add(self, message: WaitingMessage) -> None:
        """Append a message; its deadline is not before those of earlier messages."""
        self._items.append(message)
        self.messages += 1

    def add_flush(self, done: Done) -> None:
        """Append a flush."""
        self._items.append(WaitingFlush(done))

    def take_all(self) -> list[WaitingMessage | WaitingFlush]:
        """Remove and return everything."""
        taken = list(self._items)
        self._items.clear()
        self.messages = 0
        return taken

    def take_expired(self, now_s: float) -> list[WaitingMessage | WaitingFlush]:
        """Remove and return messages whose deadlines have passed, and the flushes behind them."""
        taken: list[WaitingMessage | WaitingFlush] = []
        while self._items:
            first = self._items[0]
            if isinstance(first, WaitingMessage):
                if first.deadline_s > now_s:
                    break
                self.messages -= 1
            taken.append(self._items.popleft())
        return taken

    def next_deadline_s(self) -> float | None:
        """Return the earliest deadline; None if no message waits."""
        messages = (item for item in self._items if isinstance(item, WaitingMessage))
        return next((message.deadline_s for message in messages), None)


def end_all(items: Iterable[WaitingMessage | WaitingFlush], error: Exception) -> None:
    """End messages that are not sent; a callback that raises an error does not stop the others."""
    for item in items:
        try:
            item.end(error)
        except Exception:
            log.exception("the callback of a message that was not sent raised an error")


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
# An admin interface that takes longer is treated as one that fails.
_CHECK_S = 5.0
# Senders wait while the queue is drained, or they would keep the interpreter from doing it. The
# limit is for a callback of the client that sends: the client may need its thread meanwhile.
_DRAIN_S = 0.1
# The defaults of ``pulsar.Client.create_producer``.
_PENDING, _TIMEOUT_MS = 1000, 30_000


class _Phase(enum.Enum):
    IDLE = enum.auto()
    OPENING = enum.auto()
    DRAINING = enum.auto()
    OPEN = enum.auto()
    CLOSED = enum.auto()


@dataclass(frozen=True)
class Opening:
    """The steps that open the producer of a partition.

    Attributes:
        check: function that raises LevelTopicError if the level topic was deleted; it may be slow.
            None without admin access.
        open: function that opens a producer for a topic without waiting.
        start: runner of slow work.
        opened: function that is called with the producer once messages may go directly to it.
        given: function that counts messages that were given to the client.
    """

    topic: Callable[[], str]
    check: Callable[[], None] | None
    open: Callable[[str, Opened], None]
    start: Starter
    opened: Callable[[Any], None]
    given: Callable[[int], None]


class _Step:
    """Confirmation of one step of an opening, reported by another thread."""

    def __init__(self) -> None:
        self.ended = False
        self.abandoned = False
        self.producer: Any = None
        self.error: Exception | None = None


class PartitionProducer:
    """Producer of one level or window partition. Several threads may use it.

    Args:
        closed: True to refuse every message.
        waits: False if callers are in an event loop: they never wait, also not for room.
    """

    def __init__(
        self,
        opening: Opening,
        settings: Mapping[str, Any],
        now_s: Callable[[], float] = time.monotonic,
        *,
        closed: bool = False,
        waits: bool = True,
    ) -> None:
        self._opening = opening
        self._waits = waits
        self._now_s = now_s
        self._capacity: int = settings.get("max_pending_messages", _PENDING)
        self._block = bool(settings.get("block_if_queue_full"))
        self._timeout_s: float = settings.get("send_timeout_millis", _TIMEOUT_MS) / 1000
        self._batching = bool(settings.get("batching_enabled"))
        # Guards everything below. Neither the client nor a callback is called while it is held.
        self._changed = threading.Condition(threading.Lock())
        self._state = _Phase.CLOSED if closed else _Phase.IDLE
        self._queue = SendQueue()
        self._failing = False  # the last attempt to open it failed
        self._worker: int | None = None  # the thread that opens and drains
        self._producer: Any = None
        self._commit: GroupCommit | None = None
        at_exit.wait_for(self)

    def send(self, body: bytes | None, arguments: Mapping[str, Any]) -> Any:
        """Send a message, wait until it is stored, and return its ID."""
        message = Confirmation()
        with interruptible():
            if not self.give(body, message, arguments):
                message.wait_until_given()
            if self._commit is not None and not message.ended:
                self._commit.wait(message)
            return message.message_id()

    def send_async(
        self, body: bytes | None, callback: Callable[[Any, Any], Any], arguments: Mapping[str, Any]
    ) -> None:
        """Send a message, or let it wait for the producer; the result goes to the callback."""
        self.give(body, callback, arguments)

    def give(
        self, body: bytes | None, callback: Callable[[Any, Any], Any], arguments: Mapping[str, Any]
    ) -> bool:
        """Send a message as :meth:`send_async`; return False if it waits, or was refused."""
        if self._state is not _Phase.OPEN:
            check_encodable(body, **arguments)
            if self._accept_unopened(WaitingMessage(body, callback, arguments)):
                return False
        self._producer.send_async(body, callback, **arguments)
        self._opening.given(1)
        return True

    def is_outstanding(self) -> bool:
        """Return True while messages wait for the producer."""
        return self._state in (_Phase.OPENING, _Phase.DRAINING)

    def is_connected(self) -> bool:
        """Return False if the broker cannot be reached for sending, or after a close."""
        state, producer = self._state, self._producer
        if state is _Phase.CLOSED:
            return False
        return not self._failing if producer is None else bool(producer.is_connected())

    def await_opening(self, done: Done) -> None:
        """Call ``done`` when the client has the messages sent so far, or with their failure."""
        with self._changed:
            waiting = bool(self._queue.messages or self._state is _Phase.DRAINING)
            if waiting:
                self._queue.add_flush(done)
        if not waiting:
            done(None)

    def flush(self) -> None:
        """Wait until the messages that the client has are stored."""
        producer = self._producer
        if producer is not None:
            producer.flush()

    def close_async(self, done: Done) -> None:
        """Start to close the producer; its pending and waiting messages fail.

        No message is stored after ``done`` was called.
        """
        producer = self.seal()
        if producer is None:
            done(None)
        else:
            close_async(producer, done)

    def seal(self) -> Any:
        """End waiting messages, and refuse more; return the producer to close, if it is open."""
        with self._changed:
            producer = self._producer
            self._state = _Phase.CLOSED
            # The thread that drains the queue gives the rest to the closed producer.
            ended = self._queue.take_all() if producer is None else []
            self._changed.notify_all()
        end_all(ended, error_of(pulsar.Result.AlreadyClosed))
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
            elif self._is_full() and not (self._block and self._waits):
                refused = pulsar.Result.ProducerQueueIsFull
            else:
                message.deadline_s = self._now_s() + self._timeout_s
                self._queue.add(message)
                first = self._state is _Phase.IDLE
                if first:
                    self._state = _Phase.OPENING
                elif self._queue.messages == 1:
                    self._changed.notify_all()  # the worker must watch the deadline
        if refused is not None:
            end_all([message], error_of(refused))
        if first:
            try:
                self._opening.start(self._run)
            except RuntimeError as error:  # no thread can be started, e.g. at exit
                self._refuse(error)
        return True

    def _wait_for_room(self) -> None:
        if not self._waits or threading.get_ident() == self._worker:
            return  # an event loop; or a callback that sends: no other thread could make room
        if self._state is _Phase.DRAINING:
            self._changed.wait_for(lambda: self._state is not _Phase.DRAINING, _DRAIN_S)
        while self._block and self._is_full() and self._state is not _Phase.CLOSED:
            self._changed.wait()

    def _is_full(self) -> bool:
        return 0 < self._capacity <= self._queue.messages

    # -- the background thread

    def _run(self) -> None:
        """Open the producer and drain the queue; try again while messages wait."""
        self._worker = threading.get_ident()
        pause_s = _FIRST_PAUSE_S
        try:
            while True:
                producer, error = self._attempt()
                if producer is not None:
                    self._drain(producer)
                    return
                if error is not None and not _may_pass(error):
                    self._refuse(error)
                    return
                if not self._pause(pause_s):
                    return
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        except Exception as error:  # each message must end in its callback
            log.exception("a producer for %s could not be opened", self._opening.topic())
            self._refuse(error)
        finally:
            if self._worker == threading.get_ident():
                self._worker = None

    def _attempt(self) -> tuple[Any, Exception | None]:
        """Return a new producer, or the error; neither if the partition was closed."""
        if self._opening.check is not None:
            check = _Step()
            self._opening.start(partial(self._check, self._opening.check, check))
            self._await(check, min(_CHECK_S, self._timeout_s / 2))
            if check.error is not None or self._state is _Phase.CLOSED:
                return None, check.error
        step = _Step()
        with in_client:
            self._opening.open(self._opening.topic(), partial(self._opened, step))
        self._await(step)
        return step.producer, step.error

    def _check(self, check: Callable[[], None], step: _Step) -> None:
        try:
            check()
        except Exception as error:
            self._end(step, None, error)
        else:
            self._end(step, None, None)

    def _opened(self, step: _Step, producer: Any, error: Exception | None) -> None:
        self._end(step, producer, error)
        if step.abandoned and producer is not None:
            close_async(producer, ignore)

    def _end(self, step: _Step, producer: Any, error: Exception | None) -> None:
        with self._changed:
            step.ended, step.producer, step.error = True, producer, error
            self._changed.notify_all()

    def _await(self, step: _Step, patience_s: float | None = None) -> None:
        """Wait until a step, the patience or the partition ends; end messages that are late."""
        until_s = None if patience_s is None else self._now_s() + patience_s
        while True:
            with self._changed:
                now_s = self._now_s()
                expired = self._queue.take_expired(now_s)
                if expired:
                    self._changed.notify_all()  # there is room in the queue
                elif (
                    step.ended
                    or self._state is _Phase.CLOSED
                    or (until_s is not None and until_s <= now_s)
                ):
                    step.abandoned = not step.ended
                    return
                else:
                    times = (until_s, self._queue.next_deadline_s())
                    next_s = min((time for time in times if time is not None), default=None)
                    self._changed.wait(None if next_s is None else next_s - now_s)
            end_all(expired, error_of(pulsar.Result.Timeout))

    def _pause(self, pause_s: float) -> bool:
        """Wait before the next attempt; return False if no message needs one."""
        self._failing = True
        self._await(_Step(), pause_s)
        with self._changed:
            if self._state is _Phase.OPENING and not self._queue.messages:
                self._state, self._failing = _Phase.IDLE, False
            return self._state is _Phase.OPENING

    def _drain(self, producer: Any) -> None:
        """Give the waiting messages to the producer, then let later ones go there directly."""
        with self._changed:
            closed = self._state is _Phase.CLOSED
            if not closed:
                self._state, self._failing = _Phase.DRAINING, False
                self._producer = producer
                self._commit = GroupCommit(producer) if self._batching else None
        if closed:
            close_async(producer, ignore)
            return
        while True:
            with self._changed:
                waiting = self._queue.take_all()
                if not waiting:
                    if self._state is _Phase.DRAINING:
                        self._opening.opened(producer)
                        self._state = _Phase.OPEN
                    self._changed.notify_all()
                    return
            for item in waiting:
                try:
                    with in_client:
                        if item.give(producer):
                            self._opening.given(1)
                except Exception as error:
                    end_all([item], error)

    def _refuse(self, error: Exception) -> None:
        """End all waiting messages; the next one opens the producer again."""
        with self._changed:
            refused = self._queue.take_all()
            if self._state is not _Phase.CLOSED:
                self._state, self._failing = _Phase.IDLE, False
            self._changed.notify_all()
        if refused:
            log.warning("messages for %s were not sent: %s", self._opening.topic(), error)
        end_all(refused, error)


def _may_pass(error: Exception) -> bool:
    return isinstance(error, pulsar.PulsarException) and is_transient(result_of(error))
