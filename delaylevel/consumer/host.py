"""Consumers, and the steps around a call of a handler, for threads and the event loop."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import pulsar

from delaylevel.cluster.failures import error_name
from delaylevel.cluster.threads import in_thread
from delaylevel.model.clock import Clock

from .acknowledgement import Unfinished
from .listener import Listener, Tally
from .message import ReceivedMessage
from .retry import Handling, Verdict

#: A thread that waits for messages notices a stop after this time.
RECEIVE_MS = 500
#: Pause after which a waiting host looks whether the listener stops, in seconds.
WAIT_S = 0.05
#: Time to wait for further messages of a batch, in seconds.
BATCH_S = 0.1


class Parts(NamedTuple):
    """The parts of a listener that its threads share.

    Attributes:
        listener: the listener.
        handling: the rules for its messages.
        unfinished: takes over what is not acknowledged at once.
        clock: source of the time of receipt.
    """

    listener: Listener
    handling: Handling
    unfinished: Unfinished
    clock: Clock

    def received(self, raw: Any) -> ReceivedMessage:
        """Return a message of the client as its handler sees it."""
        listener = self.listener
        now_ms = self.clock.now_ms()
        return ReceivedMessage(raw, listener.business_topic, listener.subscription, now_ms)

    def failed(
        self, messages: Iterable[ReceivedMessage], consumer: Any, error: BaseException, tally: Tally
    ) -> None:
        """Decide about messages whose attempt failed, and hand them over to the unfinished ones."""
        # All claims end, whatever happens then.
        decided = [(message, self.handling.failed(message, error)) for message in messages]
        for message, decision in decided:
            tally.failed += 1
            self.unfinished.add(message, consumer, decision)

    def finish(
        self, verdict: Verdict, message: ReceivedMessage, consumer: Any, tally: Tally
    ) -> None:
        """Acknowledge a message that the handler does not get."""
        if verdict is Verdict.FILTERED:
            tally.filtered += 1
        else:
            tally.duplicates += 1
        consumer.acknowledge(message.raw)

    def succeeded(self, messages: Iterable[ReceivedMessage], consumer: Any, tally: Tally) -> None:
        """Save the IDs of handled messages, then acknowledge them.

        Raises:
            Exception: an acknowledgement failed, of a consumer that was closed. All IDs are saved.
        """
        thread = threading.get_ident()
        failures: list[Exception] = []

        def acknowledge(message: ReceivedMessage) -> None:
            if threading.get_ident() != thread:
                self.unfinished.acknowledge(message, consumer)
                return
            try:
                consumer.acknowledge(message.raw)
            except Exception as error:
                # The others were handled, too, and nothing else would end their claims.
                failures.append(error)

        for message in messages:
            tally.handled += 1
            self.handling.succeeded(message, partial(acknowledge, message))
        if failures:
            raise failures[0]

    def sort(
        self, received: Iterable[ReceivedMessage], consumer: Any, tally: Tally
    ) -> tuple[list[ReceivedMessage], list[ReceivedMessage]]:
        """Return the messages for the handler, and those that wait for one with the same ID.

        The others are finished, or their attempt failed in the filter.
        """
        batch: list[ReceivedMessage] = []
        waiting: list[ReceivedMessage] = []
        for message in received:
            try:
                verdict = self.handling.begin(message)
            except BaseException as error:
                self.failed((message,), consumer, error, tally)
                continue
            if verdict is Verdict.HANDLE:
                batch.append(message)
            elif verdict is Verdict.WAIT:
                waiting.append(message)
            else:
                try:
                    self.finish(verdict, message, consumer, tally)
                except BaseException:
                    # All of them are delivered again, and would wait for these claims for ever.
                    for begun in batch:
                        self.handling.release(begun)
                    raise
        return batch, waiting


class RunningListener(Protocol):
    """A listener that receives messages."""

    listener: Listener

    def start(self) -> None:
        """Subscribe, and receive messages.

        Raises:
            pulsar.PulsarException: a subscription cannot be opened.
        """

    @property
    def alive(self) -> bool:
        """True while all threads run."""

    @property
    def ready(self) -> bool:
        """True while all consumers are subscribed and connected."""

    def stop(self) -> None:
        """Receive no more messages."""

    def join(self, until_s: float) -> bool:
        """Wait for running handlers; return True if all of them have ended.

        Args:
            until_s: time to stop waiting, by ``time.monotonic()``.
        """

    @property
    def running(self) -> int:
        """Number of running calls of the handler."""

    def close(self) -> None:
        """Cancel what still runs, if it can be cancelled, and close the consumers."""


def left_s(until_s: float) -> float:
    """Return the time that is left until a time of ``time.monotonic()``, in seconds; 0 if none."""
    return max(0.0, until_s - time.monotonic())


def refuse_awaitable(returned: Any) -> None:
    """Refuse the result of a function that should have been a coroutine function.

    Raises:
        TypeError: nothing would await the result.
    """
    if inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            returned.close()
        raise TypeError(
            "the handler returned an awaitable, which nothing awaits: make it an async def"
        )


log = logging.getLogger(__name__)

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
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
# The client connects again by itself, unless something is wrong for good.
_DISCONNECTED_S = 60.0
# Longest wait for the end of a close. The client gives up after 30 s.
_CLOSE_S = 5.0


class Subscribed:
    """A consumer, shared by threads, that is opened again when it fails.

    Args:
        subscribe: function that returns a new consumer.
        what: text for the log.
        stopping: event that ends all waiting.
    """

    def __init__(self, subscribe: Callable[[], Any], what: str, stopping: threading.Event) -> None:
        self._subscribe = subscribe
        self._what = what
        self._stopping = stopping
        self._lock = threading.Lock()
        self._consumer: Any = None
        self._pause_s = 0.0
        self._told = ""  # the kind of the last failure
        self._disconnected_s: float | None = None

    @property
    def ready(self) -> bool:
        """True while the consumer is open and connected."""
        consumer = self._consumer
        return consumer is not None and bool(consumer.is_connected())

    def start(self) -> None:
        """Open the consumer for the first time; leave it to :meth:`get` if the failure may pass.

        Raises:
            pulsar.PulsarException: the subscription cannot be opened.
        """
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
                    log.warning("%s: subscribed again", self._what)
            return self._consumer

    def fail(self, consumer: Any, error: BaseException | str) -> None:
        """Close a consumer that failed, so that :meth:`get` opens another one."""
        with self._lock:
            if self._consumer is not consumer or self._stopping.is_set():
                return
            self._consumer = None
            self._failed(error)
        _close(consumer)

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
            _close(consumer)

    def _failed(self, error: BaseException | str) -> None:
        kind = error_name(error) if isinstance(error, BaseException) else error
        if isinstance(error, BaseException):
            error = f"{kind}: {error}"
        if not self._pause_s or kind != self._told:
            log.warning("%s: %s; trying again until it works", self._what, error)
        else:
            log.debug("%s: %s", self._what, error)
        self._told = kind
        self._pause_s = min(max(_SHORTEST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)


def _close(consumer: Any) -> None:
    """Close a consumer, in a thread of its own.

    A second close at the same moment, such as one by the client, may never return.
    """
    closed = threading.Event()

    def close() -> None:
        try:
            consumer.close()
        except Exception as error:
            # The client raises ValueError for a consumer that the application has closed.
            log.debug("closing a consumer: %s", error_name(error))
        finally:
            closed.set()

    in_thread(close)
    closed.wait(_CLOSE_S)


#: Functions that return a new consumer, given its number: of new messages, and of retried copies.
Subscribe = Sequence[Callable[[int], Any]]


class ReceivingThreads:
    """The threads that receive the messages of one listener.

    A subclass fills ``sources`` and ``threads``.

    Attributes:
        listener: the listener.
        sources: the consumers.
        threads: the threads that receive from them.
        stopping: event that ends the threads.
    """

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.stopping = threading.Event()
        self.sources: list[Subscribed] = []
        self.threads: list[threading.Thread] = []

    def consumers(self, subscribe: Subscribe, count: int) -> list[list[Subscribed]]:
        """Return the consumers of new messages, and those of retried copies; add them to all."""
        found = [
            [
                Subscribed(partial(opened, number), f"{what} of {self.listener}", self.stopping)
                for number in range(count)
            ]
            for opened, what in zip(subscribe, ("messages", "retries"), strict=False)
        ]
        self.sources += [source for sources in found for source in sources]
        return found

    def start(self) -> None:
        """Subscribe, and start the threads.

        Raises:
            pulsar.PulsarException: a subscription cannot be opened.
        """
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
        """Wait for the threads; return True if all of them have ended.

        Args:
            until_s: time to stop waiting, by ``time.monotonic()``.
        """
        started = [thread for thread in self.threads if thread.ident is not None]
        for thread in started:
            thread.join(left_s(until_s))
        return not any(thread.is_alive() for thread in started)

    def close(self) -> None:
        """Close the consumers."""
        for source in self.sources:
            source.close()
