"""Listeners whose handler is a function: each thread receives messages and calls it.

Nothing of ours is between the consumer and the handler. So the queue of the client is the only one,
and a handler that hangs stops its own thread only. Each thread for new messages has a companion for
retried copies, because a thread cannot wait for two consumers. A call of the handler holds a lock,
so that at most ``concurrency`` calls run at the same time.
"""

from __future__ import annotations

import logging
import threading
import time
from time import perf_counter
from typing import Any

import pulsar

from .consumers import ReceivingThreads, Subscribe, Subscribed
from .handling import Verdict
from .host import BATCH_S, RECEIVE_MS, WAIT_S, Parts, left_s, refuse_awaitable
from .message import ReceivedMessage

log = logging.getLogger(__name__)


class Worker(threading.Thread):
    """A thread that receives messages and calls the handler.

    Args:
        parts: the listener and what its threads share.
        subscribed: the consumer, maybe shared with other threads.
        locks: locks of all calls of the handler; a caller holds one.
        index: index of this thread's own lock.
        stopping: event that ends the thread.
    """

    def __init__(
        self,
        parts: Parts,
        subscribed: Subscribed,
        locks: list[threading.Lock],
        index: int,
        stopping: threading.Event,
    ) -> None:
        super().__init__(name=f"delaylevel-{parts.listener.name}-{index}", daemon=True)
        self._parts = parts
        self._listener, self._handling, self._unfinished, _ = parts
        self._handler = parts.listener.handler
        self._subscribed = subscribed
        self._locks = locks
        self._stopping = stopping
        self._tally = parts.listener.stats.tally()
        self._lock = locks[index]
        self._handles_all = parts.handling.handles_all

    @property
    def running(self) -> bool:
        """True during a call of the handler."""
        return bool(self._tally.in_progress)

    def run(self) -> None:
        """Receive messages until the listener stops."""
        receive_all = self._receive if self._listener.batch == 1 else self._receive_batches
        while not self._stopping.is_set():
            consumer = self._subscribed.get()
            if consumer is None:
                return
            try:
                receive_all(consumer)
            except pulsar.PulsarException as error:
                self._subscribed.fail(consumer, error)
            except Exception as error:
                log.exception("%s: unexpected failure", self._listener)
                self._subscribed.fail(consumer, error)

    # -- single messages

    def _receive(self, consumer: Any) -> None:
        """Handle the messages of a consumer one by one, until it is replaced."""
        # This loop costs each message time, so everything that it calls is looked up once.
        stopped, receive, now_ms = self._stopping.is_set, consumer.receive, self._parts.clock.now_ms
        topic, subscription = self._listener.business_topic, self._listener.subscription
        tally, handle, timeout = self._tally, self._handle_one, pulsar.Timeout
        unfinished, most = self._unfinished, self._unfinished.most
        while not stopped():
            try:
                raw = receive(RECEIVE_MS)
            except timeout:
                if not self._idle(consumer):
                    return
                continue
            tally.received += 1
            handle(ReceivedMessage(raw, topic, subscription, now_ms()), consumer)
            if unfinished.count >= most:
                self._wait_for_room()

    def _idle(self, consumer: Any) -> bool:
        """Check the connection; return False if the consumer is not the current one any more."""
        self._subscribed.check(consumer)
        return self._subscribed.get() is consumer

    def _wait_for_room(self) -> None:
        """Wait until there are fewer unfinished messages, or the listener stops."""
        while self._unfinished.full and not self._stopping.is_set():
            self._unfinished.wait_for_room(WAIT_S)

    def _handle_one(self, message: ReceivedMessage, consumer: Any) -> None:
        """Handle one message, and acknowledge it or leave it to the unfinished ones."""
        lock = self._lock
        if not lock.acquire(False):
            other = self._free_lock()
            if other is None:
                return  # stopping: the message stays unacknowledged
            lock = other
        handles_all = self._handles_all
        verdict: Verdict | None = Verdict.HANDLE
        failure: BaseException | None = None
        try:
            if not handles_all:
                verdict = self._begin(message)
            if verdict is Verdict.HANDLE:
                failure = self._call(message, 1)
        except BaseException as error:  # of the filter, or of the function for IDs
            failure = error
        finally:
            lock.release()
        if failure is not None:
            self._parts.failed((message,), consumer, failure, self._tally)
        elif handles_all:
            self._tally.handled += 1
            consumer.acknowledge(message.raw)
        elif verdict is Verdict.HANDLE:
            self._parts.succeeded((message,), consumer, self._tally)
        elif verdict is not None:
            self._parts.finish(verdict, message, consumer, self._tally)

    def _begin(self, message: ReceivedMessage) -> Verdict | None:
        """Return the next step for a message; None if the listener stops before it is known."""
        verdict = self._handling.begin(message)
        while verdict is Verdict.WAIT:
            ended = threading.Event()
            verdict = self._handling.begin(message, ended.set)
            while verdict is Verdict.WAIT and not ended.wait(WAIT_S):
                if self._stopping.is_set():
                    return None
        return verdict

    def _call(self, argument: Any, count: int) -> BaseException | None:
        """Call the handler, and return its error; None if it succeeded.

        Args:
            argument: the message, or the list of messages.
            count: number of the messages.
        """
        tally = self._tally
        tally.in_progress = count
        start_s = perf_counter()
        try:
            returned = self._handler(argument)
            if returned is not None:
                refuse_awaitable(returned)
        except BaseException as error:
            return error
        finally:
            tally.took(perf_counter() - start_s)
            tally.in_progress = 0
        return None

    def _free_lock(self) -> threading.Lock | None:
        """Acquire any lock and return it; None if the listener stops."""
        while not self._stopping.is_set():
            for lock in self._locks:
                if lock.acquire(False):
                    return lock
            if self._lock.acquire(timeout=WAIT_S):
                return self._lock
        return None

    # -- batches

    def _receive_batches(self, consumer: Any) -> None:
        """Handle the messages of a consumer in batches, until it is replaced."""
        waiting: list[ReceivedMessage] = []
        while not self._stopping.is_set():
            batch = waiting or self._next(consumer, RECEIVE_MS)
            if not batch:
                if not self._idle(consumer):
                    return
                continue
            self._fill(batch, consumer)
            waiting = self._handle_batch(batch, consumer)
            self._wait_for_room()

    def _fill(self, batch: list[ReceivedMessage], consumer: Any) -> None:
        """Add the messages that are there, or come soon."""
        until_s = time.monotonic() + BATCH_S
        while len(batch) < self._listener.batch:
            left_ms = int(1000 * left_s(until_s))
            more = self._next(consumer, left_ms) if left_ms else []
            if not more:
                return
            batch += more

    def _next(self, consumer: Any, timeout_ms: int) -> list[ReceivedMessage]:
        """Return the next message in a list; an empty list if there is none within the time."""
        try:
            raw = consumer.receive(timeout_ms)
        except pulsar.Timeout:
            return []
        self._tally.received += 1
        return [self._parts.received(raw)]

    def _handle_batch(
        self, received: list[ReceivedMessage], consumer: Any
    ) -> list[ReceivedMessage]:
        """Handle messages together; return those that wait for another one with the same ID."""
        lock = self._free_lock()
        if lock is None:
            return []
        try:
            batch, waiting = self._parts.sort(received, consumer, self._tally)
            failure = self._call(list(batch), len(batch)) if batch else None
        finally:
            lock.release()
        if failure is not None:
            self._parts.failed(batch, consumer, failure, self._tally)
        else:
            self._parts.succeeded(batch, consumer, self._tally)
        if waiting and not batch:
            self._stopping.wait(WAIT_S)
        return waiting


class ThreadedListener(ReceivingThreads):
    """The threads of one listener, which call its handler.

    Args:
        parts: the listener and what its threads share.
        subscribe: functions that return a new consumer.
    """

    def __init__(self, parts: Parts, subscribe: Subscribe) -> None:
        super().__init__(parts.listener)
        listener = parts.listener
        locks = [threading.Lock() for _ in range(listener.concurrency)]
        self._workers = [
            Worker(parts, sources[index % len(sources)], locks, index, self.stopping)
            for sources in self.consumers(subscribe, listener.consumers)
            for index in range(listener.concurrency)
        ]
        self.threads += self._workers

    @property
    def running(self) -> int:
        """Number of running calls of the handler."""
        return sum(worker.running for worker in self._workers)
