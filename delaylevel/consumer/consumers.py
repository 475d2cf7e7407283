"""Consumers that are opened again whenever they fail, and the threads that receive from them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pulsar

from delaylevel.cluster.background import in_thread
from delaylevel.cluster.failures import error_name

from .host import left_s
from .listener import Listener

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
