"""The workers of listeners: threads for functions, tasks of an event loop for coroutines.

If the handler is a function, each thread receives messages and calls it. Nothing of ours is between
the consumer and the handler. So the queue of the client is the only one, and a handler that hangs
stops its own thread only. Each thread for new messages has a companion for retried copies, because
a thread cannot wait for two consumers. A call of the handler holds a token, so that at most
``concurrency`` calls run at the same time.

If the handler is a coroutine function, a thread for each consumer receives messages and passes them
to the loop, at most ``concurrency`` at once. So a slow handler stops the thread, and the queue of
the client is the only one that fills.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from time import perf_counter
from typing import Any, NamedTuple

import pulsar

from .host import (
    RECEIVE_MS,
    WAIT_S,
    Handling,
    ReceivingThreads,
    Subscribe,
    Subscribed,
    left_s,
    refuse_awaitable,
)
from .message import ReceivedMessage
from .retry import Verdict

#: Each call of a function takes one, and puts it back. (Written in C: it costs each message time.)
Tokens = queue.SimpleQueue[None]


class _Receiver(threading.Thread):
    """A thread that receives messages, from a consumer that is opened again when it fails."""

    def __init__(
        self, name: str, handling: Handling, subscribed: Subscribed, stopping: threading.Event
    ) -> None:
        super().__init__(name=f"delaylevel-{name}", daemon=True)
        self._handling = handling
        self._subscribed = subscribed
        self._stopping = stopping
        self._tally = handling.listener.stats.tally()

    def run(self) -> None:
        """Receive messages until the listener stops."""
        while not self._stopping.is_set():
            consumer = self._subscribed.get()
            if consumer is None:
                return
            try:
                self._receive(consumer)
            except pulsar.PulsarException as error:
                self._subscribed.fail(consumer, error)
            except Exception as error:
                log.exception("%s: unexpected failure", self._handling.listener)
                self._subscribed.fail(consumer, error)

    def _receive(self, consumer: Any) -> None:
        """Receive the messages of a consumer, until it is replaced."""
        raise NotImplementedError

    def _idle(self, consumer: Any) -> bool:
        """Check the connection; return False if the consumer is not the current one any more."""
        self._subscribed.check(consumer)
        return self._subscribed.get() is consumer

    def _wait_for_room(self) -> None:
        """Wait until there are fewer unfinished messages, or the listener stops."""
        while self._handling.unfinished.full and not self._stopping.wait(WAIT_S):
            pass


class Worker(_Receiver):
    """A thread that receives messages and calls the handler."""

    def __init__(
        self,
        handling: Handling,
        subscribed: Subscribed,
        tokens: Tokens,
        name: str,
        stopping: threading.Event,
    ) -> None:
        super().__init__(name, handling, subscribed, stopping)
        self._listener, self._unfinished = handling.listener, handling.unfinished
        self._handler = handling.listener.handler
        self._tokens = tokens
        self._handles_all = handling.handles_all

    @property
    def running(self) -> bool:
        """True during a call of the handler."""
        return bool(self._tally.in_progress)

    def _receive(self, consumer: Any) -> None:
        # This loop costs each message time, so everything that it calls is looked up once.
        stopped, receive, now_ms = (
            self._stopping.is_set,
            consumer.receive,
            self._handling.clock.now_ms,
        )
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

    def _handle_one(self, message: ReceivedMessage, consumer: Any) -> None:
        """Handle one message, and acknowledge it or leave it to the unfinished ones."""
        while True:
            try:
                self._tokens.get(timeout=WAIT_S)
                break
            except queue.Empty:
                if self._stopping.is_set():
                    return  # the message stays unacknowledged
        handles_all = self._handles_all
        verdict: Verdict | None = Verdict.HANDLE
        failure: BaseException | None = None
        try:
            if not handles_all:
                verdict = self._begin(message)
            if verdict is Verdict.HANDLE:
                failure = self._call(message)
        except BaseException as error:  # of the filter, or of the function for IDs
            failure = error
        finally:
            self._tokens.put(None)
        if handles_all and failure is None:
            self._tally.handled += 1
            consumer.acknowledge(message.raw)
        elif verdict is not None:
            self._handling.settle(verdict, failure, message, consumer, self._tally)

    def _begin(self, message: ReceivedMessage) -> Verdict | None:
        """Return the next step for a message; None if the listener stops before it is known."""
        verdict = self._handling.begin(message)
        while verdict is Verdict.WAIT:
            # Another thread is handling a message with the same ID.
            if self._stopping.wait(WAIT_S):
                return None
            verdict = self._handling.begin(message)
        return verdict

    def _call(self, message: ReceivedMessage) -> BaseException | None:
        """Call the handler, and return its error; None if it succeeded."""
        tally = self._tally
        tally.in_progress = 1
        start_s = perf_counter()
        try:
            returned = self._handler(message)
            if returned is not None:
                refuse_awaitable(returned)
        except BaseException as error:
            return error
        finally:
            tally.took(perf_counter() - start_s)
            tally.in_progress = 0
        return None


class ThreadedListener(ReceivingThreads):
    """The threads of one listener, which call its handler."""

    def __init__(self, handling: Handling, subscribe: Subscribe) -> None:
        super().__init__(handling)
        listener = handling.listener
        tokens: Tokens = queue.SimpleQueue()
        for _ in range(listener.concurrency):
            tokens.put(None)
        self._workers = [
            Worker(
                handling,
                sources[index % len(sources)],
                tokens,
                f"{listener.name}-{index}",
                self.stopping,
            )
            for sources in self.consumers(subscribe, listener.consumers)
            for index in range(listener.concurrency)
        ]
        self.threads += self._workers

    @property
    def running(self) -> int:
        """Number of running calls of the handler."""
        return sum(worker.running for worker in self._workers)


log = logging.getLogger(__name__)


class LoopThread:
    """An event loop in a thread, for coroutines of an application that has no loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="delaylevel-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._closing:
            try:
                self.loop.run_forever()
            except BaseException:
                # A SystemExit of a task that an application started leaves the loop.
                log.exception("a task ended with an exception that is meant for the process")
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def close(self, until_s: float) -> None:
        """Stop the loop and wait for its thread, until a time of ``time.monotonic()``."""
        self._closing = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        if self._thread is not threading.current_thread():
            self._thread.join(left_s(until_s))


class _Call(NamedTuple):
    """The message of one call of the handler, and its consumer."""

    message: ReceivedMessage
    feeder: Feeder
    consumer: Any


class Feeder(_Receiver):
    """A thread that receives messages for the loop."""

    def __init__(
        self,
        handling: Handling,
        subscribed: Subscribed,
        calls: LoopListener,
        stopping: threading.Event,
    ) -> None:
        super().__init__(handling.listener.name, handling, subscribed, stopping)
        self._calls = calls
        #: Consumer that failed in the loop, and the error.
        self.failure: tuple[Any, BaseException] | None = None

    def _receive(self, consumer: Any) -> None:
        """Pass the messages of a consumer to the loop, until it is replaced."""
        while not self._stopping.is_set():
            failure, self.failure = self.failure, None
            if failure is not None:
                self._subscribed.fail(*failure)
            try:
                raw = consumer.receive(RECEIVE_MS)
            except pulsar.Timeout:
                if not self._idle(consumer):
                    return
                continue
            self._tally.received += 1
            if not self._calls.put(_Call(self._handling.received(raw), self, consumer)):
                return  # stopping: the message stays unacknowledged
            self._wait_for_room()


class LoopListener(ReceivingThreads):
    """The calls of one listener as tasks of an event loop, and the threads that receive for them.

    Attributes:
        running: number of calls of the handler that run, or wait for those of their key.
    """

    def __init__(
        self, handling: Handling, subscribe: Subscribe, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(handling)
        self._loop = loop
        self._tally = handling.listener.stats.tally()
        self._slots = threading.Semaphore(handling.listener.concurrency)
        self._inbox: deque[_Call] = deque()
        self._woken = False
        self._tasks: set[asyncio.Task[None]] = set()
        # By key: the calls that wait for the running one of this key.
        self._keys: dict[str, deque[_Call]] = {}
        self._changed = threading.Condition()
        self.running = 0
        self.threads += [
            Feeder(handling, source, self, self.stopping)
            for (source,) in self.consumers(subscribe, 1)
        ]

    def join(self, until_s: float) -> bool:
        """Wait for running handlers; return True if all of them have ended."""
        ended = super().join(until_s)
        with self._changed:
            self._changed.wait_for(lambda: not self.running, left_s(until_s))
        return ended and not self.running

    def close(self) -> None:
        """Cancel what still runs, and close the consumers; its messages stay unacknowledged."""

        def cancel_all() -> None:
            for task in self._tasks:
                task.cancel()

        if self.running and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(cancel_all)
        super().close()

    def put(self, call: _Call) -> bool:
        """Start a call as soon as there is room; return False if the listener stops before."""
        while not self._slots.acquire(timeout=WAIT_S):
            if self.stopping.is_set():
                return False
        with self._changed:
            self.running += 1
        self._inbox.append(call)
        # One wake-up of the loop serves all messages that arrive until it has taken them.
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._take)
        return True

    def _take(self) -> None:
        self._woken = False
        while self._inbox:
            call = self._inbox.popleft()
            key = ""
            if self.handling.listener.key_ordered:
                key = call.message.ordering_key or call.message.key
            if key in self._keys:
                self._keys[key].append(call)
                continue
            if key:
                self._keys[key] = deque()
            task = self._loop.create_task(self._run(call, key))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, call: _Call, key: str) -> None:
        """Perform a call, then those that waited for it because of their key."""
        while True:
            try:
                await self._handle(call)
            except asyncio.CancelledError:
                self._drop(key)
                raise
            except Exception as error:
                if not isinstance(error, pulsar.PulsarException):
                    log.exception("%s: unexpected failure", self.handling.listener)
                # The message is neither acknowledged nor among the unfinished ones. The broker
                # delivers it again only to another consumer.
                call.feeder.failure = call.consumer, error
            finally:
                self._ended()
            waiting = self._keys.get(key)
            if not waiting:
                self._keys.pop(key, None)
                return
            call = waiting.popleft()

    def _drop(self, key: str) -> None:
        """Forget the calls that waited for a cancelled one."""
        for _ in self._keys.pop(key, ()):
            self._ended()

    def _ended(self) -> None:
        self._slots.release()
        with self._changed:
            self.running -= 1
            if not self.running:
                self._changed.notify_all()

    async def _handle(self, call: _Call) -> None:
        """Handle a message, and acknowledge it or leave it to the unfinished ones."""
        handling, tally, (message, _, consumer) = self.handling, self._tally, call
        verdict, failure = Verdict.HANDLE, None
        try:
            while (verdict := handling.begin(message)) is Verdict.WAIT:
                # Another task or thread is handling a message with the same ID.
                await asyncio.sleep(WAIT_S)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # of the filter, or of the function for IDs
            failure = error
        if failure is None and verdict is Verdict.HANDLE:
            failure = await self._call(message)
        handling.settle(verdict, failure, message, consumer, tally)

    async def _call(self, message: ReceivedMessage) -> BaseException | None:
        """Call the handler, and return its error; None if it succeeded."""
        tally = self._tally
        tally.in_progress += 1
        start_s = time.perf_counter()
        try:
            await self.handling.listener.handler(message)
        except asyncio.CancelledError as error:
            if self.stopping.is_set():
                self.handling.release(message)
                raise
            return error  # of the handler's own making
        except BaseException as error:
            return error
        finally:
            tally.took(time.perf_counter() - start_s)
            tally.in_progress -= 1
        return None
