"""The messages of several consumers, in the order of their arrival."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import pulsar

from delaylevel.cluster.background import after_fork
from delaylevel.cluster.client_parts.receiving import consumer_cores
from delaylevel.cluster.failures import is_ok
from delaylevel.producer.calls import interruptible
from delaylevel.producer.results import error_of

# An answer of the client while Python shuts down aborts the process.
_EXIT_S = 1.0
_POLL_S = 0.001
# Wait for each consumer in turn.
_TURN_MS = 20
# Leaving a callback takes microseconds, but the thread must get a processor.
_LEAVE_S = 0.02
# A batch takes at most this number of messages from each of the other consumers.
_MOST_IN_BATCH = 100


class _Arrived(NamedTuple):
    """The end of a request to a consumer.

    Attributes:
        number: index of the consumer.
        result: result of the client.
        message: message of the client's core.
    """

    number: int
    result: Any
    message: Any


class MergedReceive:
    """Receiving from several consumers; several threads may do it.

    Each consumer has one request at a time, so messages of a consumer keep their order, and at most
    one of them waits here. In memory, where no call waits, each consumer is tried. Only a client
    without the private parts for it is polled.

    Args:
        consumers: the consumers; :meth:`batch_receive` waits for the first one only.
    """

    def __init__(self, consumers: Sequence[Any]) -> None:
        cores = consumer_cores(consumers)
        self._cores = list(consumers) if cores is None else cores
        # Without the client's private parts, the public consumers are asked in turns.
        self._polls = cores is None
        self._waits = cores is not None and all(hasattr(core, "receive_async") for core in cores)
        self._arrived: SimpleQueue[_Arrived] = SimpleQueue()
        self._lock = threading.Lock()
        self._asked = [False] * len(self._cores)
        self._waiting = 0  # threads
        self._turn = 0
        if self._waits:
            _open.add(self)

    def receive(self, timeout_millis: int | None = None) -> tuple[int, Any]:
        """Return the index of a consumer, and its next message, of the client's core.

        Args:
            timeout_millis: longest time to wait, ms; None for any time.

        Raises:
            pulsar.Timeout: there is no message.
            pulsar.PulsarException: a consumer failed.
        """
        if self._polls:
            return self._receive_in_turns(timeout_millis)
        if not self._waits:
            return self._receive_now(0)
        found = self._take()
        if found is None:
            with interruptible():
                found = self._wait(timeout_millis)
        if not is_ok(found.result):
            raise error_of(found.result)
        return found.number, found.message

    def batch_receive(self) -> list[tuple[int, Any]]:
        """Return the next batch of the first consumer, with waiting messages of the others."""
        found = self._waiting_now()
        others = range(1, len(self._cores))
        if not found:
            self._ask(others)
            found = [(0, message) for message in self._cores[0].batch_receive()]
            found += self._waiting_now()
        for index in others:
            for _ in range(_MOST_IN_BATCH if self._waits else 0):
                self._ask([index])
                more = self._waiting_now()
                if not more:
                    break
                found += more
        if not (self._waits or self._polls):
            for index in others:
                found += [(index, message) for message in self._cores[index].batch_receive()]
        if self._polls:
            for index in others:
                found += self._waiting_of(index)
        return found

    def drop(self) -> None:
        """Drop the messages that wait here; they are not acknowledged."""
        while self._take() is not None:
            pass

    @property
    def has_requests(self) -> bool:
        """True while a consumer has a request that the client will answer."""
        return any(self._asked)

    def end(self) -> None:
        """Start to close the consumers that have a request, so that the client answers it."""
        for index, asked in enumerate(self._asked):
            if asked:
                self._cores[index].close_async(_ignore)

    def _wait(self, timeout_millis: int | None) -> _Arrived:
        until_s = None if timeout_millis is None else time.monotonic() + timeout_millis / 1000
        with self._lock:
            self._waiting += 1
        try:
            self._ask(range(len(self._cores)))
            left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            return self._arrived.get(timeout=left_s)
        except Empty:
            raise pulsar.Timeout("Pulsar error: TimeOut") from None
        finally:
            with self._lock:
                self._waiting -= 1
                others = self._waiting
            if others:
                # The request whose message this thread took was theirs, too.
                self._ask(range(len(self._cores)))

    def _take(self) -> _Arrived | None:
        try:
            return self._arrived.get_nowait()
        except Empty:
            return None

    def _waiting_now(self) -> list[tuple[int, Any]]:
        found = []
        while (arrived := self._take()) is not None:
            if not is_ok(arrived.result):
                raise error_of(arrived.result)
            found.append((arrived.number, arrived.message))
        return found

    def _waiting_of(self, index: int) -> list[tuple[int, Any]]:
        """Return the messages that a public consumer has; it is asked until it has none."""
        found: list[tuple[int, Any]] = []
        with contextlib.suppress(pulsar.Timeout):
            while len(found) < _MOST_IN_BATCH:
                found.append((index, self._cores[index].receive(_TURN_MS)))
        return found

    def _ask(self, indices: Sequence[int]) -> None:
        """Request a message of each of these consumers that has no request."""
        if not self._waits:
            return
        for index in indices:
            with self._lock:
                if self._asked[index]:
                    continue
                self._asked[index] = True
            try:
                self._cores[index].receive_async(partial(self._answer, index))
            except BaseException:
                self._asked[index] = False
                raise

    def _answer(self, index: int, result: Any, message: Any) -> None:
        """Take the answer to a request, in a thread of the client or in that of the request."""
        self._asked[index] = False
        self._arrived.put(_Arrived(index, result, message))

    def _receive_in_turns(self, timeout_millis: int | None) -> tuple[int, Any]:
        """Return the next message, by waiting for a short time for each of the consumers."""
        until_s = None if timeout_millis is None else time.monotonic() + timeout_millis / 1000
        while True:
            try:
                return self._receive_now(_TURN_MS)
            except pulsar.Timeout:
                if until_s is not None and time.monotonic() >= until_s:
                    raise

    def _receive_now(self, timeout_ms: int) -> tuple[int, Any]:
        """Return the next message after one turn; each consumer may wait for the timeout."""
        count = len(self._cores)
        for _ in range(count):
            index = self._turn = (self._turn + 1) % count
            try:
                return index, self._cores[index].receive(timeout_ms)
            except pulsar.Timeout as error:
                timeout = error
        raise timeout


_open: weakref.WeakSet[MergedReceive] = weakref.WeakSet()


def _ignore(_: Any) -> None:
    """Drop the result of closing a consumer."""


def _finish() -> None:
    """Let the client answer all requests before Python shuts down."""
    merged = [each for each in _open if each.has_requests]
    for each in merged:
        each.end()
    until_s = time.monotonic() + _EXIT_S
    while any(each.has_requests for each in merged) and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    if merged:
        time.sleep(_LEAVE_S)


atexit.register(_finish)
after_fork(_open.clear)  # the requests are the parent's
