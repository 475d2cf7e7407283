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
import inspect
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pulsar

from delaylevel.cluster.failures import TRANSIENT_FAILURES, close_quietly, error_name
from delaylevel.cluster.logs import RepeatedWarning
from delaylevel.cluster.threads import BackgroundWork, in_background

from .listener import ListenerCounts
from .message import ReceivedMessage
from .retry import Verdict, decide
from .retry_publisher import Unfinished, left_s

if TYPE_CHECKING:
    from .handled_ids import HandledIds

log = logging.getLogger(__name__)

# A thread that waits for messages notices a stop after this time.
_RECEIVE_MS = 500
# A thread that waits for something else looks this often whether the listener stops, in seconds.
_WAIT_S = 0.05
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
# Time to store IDs when nothing is left of the time for a stop.
_LEAST_S = 1.0

# With any other failure, a listener does not start.
_PASSING = TRANSIENT_FAILURES - {"AlreadyClosed"} | {"ConsumerBusy"}
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
        except pulsar.PulsarException as error:
            if error_name(error) not in _PASSING:
                raise
            # A broker that restarts must not keep an application from its start.
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
        # First without the lock, which `get` holds while the broker is away: all calls that fail
        # with a lost consumer come here, each in a thread.
        if self._consumer is not consumer:
            return
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
        self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)


class Receiver(threading.Thread):
    """A thread that receives messages for a listener."""

    def __init__(self, listener: RunningListener, index: int, subscribed: Subscribed) -> None:
        super().__init__(name=f"delaylevel-{listener.listener.name}-{index}", daemon=True)
        self._running = listener
        self._stopping = listener.stopping
        self.subscribed = subscribed
        self.tally = listener.listener.stats.tally()

    def run(self) -> None:
        """Receive messages until the listener stops."""
        while not self._stopping.is_set():
            consumer = self.subscribed.get()
            if consumer is None:
                return
            try:
                self._receive(consumer)
            except Exception as error:
                if not isinstance(error, pulsar.PulsarException):
                    log.exception("%s: unexpected failure", self._running.listener)
                self.subscribed.fail(consumer, error)

    def _receive(self, consumer: Any) -> None:
        """Receive the messages of a consumer, until it is replaced."""
        # This loop costs each message time, so everything that it calls is looked up once.
        stopped, receive = self._stopping.is_set, consumer.receive
        running, listener = self._running, self._running.listener
        now_ms, handle, unfinished = running.clock.now_ms, running.handle, running.unfinished
        topic, subscription = listener.business_topic, listener.subscription
        tally, timeout, most = self.tally, pulsar.Timeout, unfinished.most
        while not stopped():
            try:
                raw = receive(_RECEIVE_MS)
            except timeout:
                self.subscribed.check(consumer)
                if self.subscribed.get() is not consumer:
                    return
                continue
            tally.received += 1
            handle(ReceivedMessage(raw, topic, subscription, now_ms()), consumer, self)
            # They are in memory, and the broker redelivers all of them if this process ends.
            while unfinished.count >= most and not self._stopping.wait(_WAIT_S):
                pass


class RunningListener:
    """A listener that receives messages in threads, and the steps around a call of its handler.

    A subclass calls :meth:`begin` before the handler and :meth:`settle` after it, and acknowledges
    nothing else. So a crash at any time leaves a message unacknowledged until it was handled, or
    until a copy with its ID is stored.
    """

    #: What a filter or function for IDs may raise as a failed attempt.
    failures: tuple[type[BaseException], ...] = (BaseException,)

    def __init__(
        self,
        unfinished: Unfinished,
        handled: HandledIds | None,
        subscribe: Sequence[Callable[[int], Any]],
    ) -> None:
        self.listener = listener = unfinished.listener
        self.clock = unfinished.clock
        self.unfinished = unfinished
        self._handled = handled
        # Then :meth:`begin` may be left out.
        self.handles_all = listener.condition is None and handled is None
        self.stopping = threading.Event()  # set from outside: then no more messages are received
        self.threads: list[Receiver] = []
        self._sources: list[Subscribed] = []
        # A call of the handler takes one, and puts it back. (In C: it costs each message time.)
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(listener.concurrency):
            self._tokens.put(None)
        # Coroutines wait in the loop.
        threads = 1 if listener.is_coroutine else listener.concurrency
        # Each function returns a new consumer, given its number.
        for opened, what in zip(subscribe, ("messages", "retries"), strict=False):
            sources = [
                Subscribed(partial(opened, number), f"{what} of {listener}", self.stopping)
                for number in range(listener.consumers)
            ]
            self._sources += sources
            self.threads += [
                Receiver(self, index, sources[index % len(sources)]) for index in range(threads)
            ]

    def handle(self, message: ReceivedMessage, consumer: Any, receiver: Receiver) -> None:
        """Handle a message, or let it be handled; if the listener stops, leave it."""
        raise NotImplementedError

    def _take_token(self) -> bool:
        """Wait for a token; return False, for a message to leave, if the listener stops before."""
        while True:
            try:
                self._tokens.get(timeout=_WAIT_S)
            except queue.Empty:
                if self.stopping.is_set():
                    return False
            else:
                return True

    def begin(self, message: ReceivedMessage) -> Verdict:
        """Decide about a received message; after ``WAIT``, ask again a moment later."""
        condition = self.listener.condition
        if condition is not None and not condition(message):
            return Verdict.FILTERED
        return Verdict.HANDLE if self._handled is None else self._handled.begin(message)

    def release(self, message: ReceivedMessage) -> None:
        """Give up a message after :meth:`begin`, without a decision."""
        if self._handled is not None:
            self._handled.release(message)

    async def perform(self, message: ReceivedMessage, consumer: Any, tally: ListenerCounts) -> None:
        """Handle a message in an event loop; acknowledge it or leave it to the unfinished ones."""
        verdict, failure = Verdict.HANDLE, None
        try:
            while (verdict := self.begin(message)) is Verdict.WAIT:
                # Another task or thread is handling a message with the same ID.
                await asyncio.sleep(_WAIT_S)
        except asyncio.CancelledError:
            raise
        except self.failures as error:  # of the filter, or of the function for IDs
            failure = error
        if failure is None and verdict is Verdict.HANDLE:
            tally.in_progress += 1
            start_s = time.perf_counter()
            try:
                failure = await self.call(message)
            except BaseException:
                self.release(message)  # or a message with the same ID waits for ever
                raise
            finally:
                tally.took(time.perf_counter() - start_s)
                tally.in_progress -= 1
        self.settle(verdict, failure, message, consumer, tally)

    async def call(self, message: ReceivedMessage) -> BaseException | None:
        """Call the handler, and return its error; None if it succeeded."""
        raise NotImplementedError

    def settle(
        self,
        verdict: Verdict,
        failure: BaseException | None,
        message: ReceivedMessage,
        consumer: Any,
        tally: ListenerCounts,
    ) -> None:
        """Acknowledge a message; after a failure, hand it over to the unfinished ones."""
        if failure is not None:
            self.release(message)
            tally.failed += 1
            decision = decide(self.listener.backoff, message.attempt, failure)
            self.unfinished.add(message, consumer, decision)
            return
        if verdict is Verdict.HANDLE:
            tally.handled += 1
            if self._handled is not None:
                # The ID first: a crash between the two would let the message be handled again.
                # With a store, it may be saved later, in another thread.
                self._handled.save(message, partial(consumer.acknowledge, message.raw))
                return
        elif verdict is Verdict.FILTERED:
            tally.filtered += 1
        else:
            tally.duplicates += 1
        consumer.acknowledge(message.raw)

    @property
    def running(self) -> int:
        """Number of calls of the handler that run, or wait for another one of their key or ID."""
        return self.listener.concurrency - self._tokens.qsize()

    def start(self) -> None:
        """Subscribe, and start the threads."""
        for source in self._sources:
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
        return all(source.ready for source in self._sources)

    def join(self, until_s: float) -> bool:
        """Wait for running handlers, but for one that makes this call; return True if all ended."""
        here = threading.get_ident()
        started = [thread for thread in self.threads if thread.ident not in (None, here)]
        for thread in started:
            thread.join(left_s(until_s))
        return not any(thread.is_alive() for thread in started)

    def close(self, until_s: float) -> None:
        """Finish failed messages, and close what stores them, and the consumers."""
        handled = self._handled
        with ExitStack() as stack:  # backwards
            stack.callback(self.close_consumers)
            if handled is not None:
                stack.callback(handled.close)
            stack.callback(self.unfinished.close, until_s)
            if handled is not None:
                # A confirmation of an ID lets its message be acknowledged.
                stack.callback(lambda: handled.flush(min(_LEAST_S, left_s(until_s))))

    def close_consumers(self) -> None:
        """Cancel what still runs, if it can be cancelled, and close the consumers."""
        # While the broker hangs, each close takes the client 30 s, and so does an opening before
        # it. A second close at the same moment, such as one by the client, may never return.
        closing = BackgroundWork()
        for source in self._sources:
            closing.start(source.close)
        closing.join()


class ThreadedListener(RunningListener):
    """A listener whose threads call its handler."""

    def handle(self, message: ReceivedMessage, consumer: Any, receiver: Receiver) -> None:
        """Handle a message, and acknowledge it or leave it to the unfinished ones."""
        if not self._take_token():
            return
        tally = receiver.tally
        verdict, failure = Verdict.HANDLE, None
        try:
            if not self.handles_all:
                while (verdict := self.begin(message)) is Verdict.WAIT:
                    # Another thread is handling a message with the same ID.
                    if self.stopping.wait(_WAIT_S):
                        return
            if verdict is Verdict.HANDLE:
                failure = self._call(message, tally)
        except BaseException as error:  # of the filter, or of the function for IDs
            failure = error
        finally:
            # The rest needs none: another call may begin while this thread acknowledges.
            self._tokens.put(None)
        if self.handles_all and failure is None:  # the usual case, without two calls
            tally.handled += 1
            consumer.acknowledge(message.raw)
        else:
            self.settle(verdict, failure, message, consumer, tally)

    def _call(self, message: ReceivedMessage, tally: ListenerCounts) -> BaseException | None:
        """Call the handler, and return its error; None if it succeeded."""
        tally.in_progress = 1
        start_s = time.perf_counter()
        try:
            returned = self.listener.handler(message)
            if returned is not None:
                refuse_awaitable(returned)
        except BaseException as error:
            return error
        finally:
            tally.took(time.perf_counter() - start_s)
            tally.in_progress = 0
        return None


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
    """The message of one call of the handler, and where it comes from."""

    message: ReceivedMessage
    consumer: Any
    receiver: Receiver


class LoopListener(RunningListener):
    """A listener whose handler is called in tasks of an event loop."""

    def __init__(
        self,
        unfinished: Unfinished,
        handled: HandledIds | None,
        subscribe: Sequence[Callable[[int], Any]],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(unfinished, handled, subscribe)
        self._loop = loop
        self._key_ordered = self.listener.subscription_type == pulsar.ConsumerType.KeyShared
        self._inbox: deque[_Call] = deque()
        self._woken = False
        self._tasks: set[asyncio.Task[None]] = set()
        # By key: the calls that wait for the running one of this key.
        self._keys: dict[str, deque[_Call]] = {}

    def join(self, until_s: float) -> bool:
        ended = super().join(until_s)
        while self.running and left_s(until_s):
            time.sleep(_WAIT_S)
        return ended and not self.running

    def close_consumers(self) -> None:
        def cancel_all() -> None:
            for task in self._tasks:
                task.cancel()

        # In the thread of the loop, as only that one may touch its tasks.
        if self.running and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(cancel_all)
        super().close_consumers()

    def handle(self, message: ReceivedMessage, consumer: Any, receiver: Receiver) -> None:
        """Start a call as soon as there is room."""
        if not self._take_token():
            return
        self._inbox.append(_Call(message, consumer, receiver))
        # One wake-up of the loop serves all messages that arrive until it has taken them.
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._woken = False
        while self._inbox:
            call = self._inbox.popleft()
            key = ""
            # The broker keeps the order of a key up to here. Tasks would not.
            if self._key_ordered:
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
                await self.perform(call.message, call.consumer, call.receiver.tally)
            except asyncio.CancelledError:
                for _ in self._keys.pop(key, ()):  # those that waited for it
                    self._tokens.put(None)
                raise
            except Exception as error:
                if not isinstance(error, pulsar.PulsarException):
                    log.exception("%s: unexpected failure", self.listener)
                # The message is neither acknowledged nor among the unfinished ones. The broker
                # delivers it again only to another consumer.
                in_background(partial(call.receiver.subscribed.fail, call.consumer, error))
            finally:
                self._tokens.put(None)
            waiting = self._keys.get(key)
            if not waiting:
                self._keys.pop(key, None)
                return
            call = waiting.popleft()

    async def call(self, message: ReceivedMessage) -> BaseException | None:
        try:
            await self.listener.handler(message)
        except asyncio.CancelledError as error:
            if self.stopping.is_set():
                raise
            return error  # of the handler's own making
        except BaseException as error:
            return error
        return None


def refuse_awaitable(returned: Any) -> None:
    """Refuse the result of a function that should have been a coroutine function."""
    if inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            returned.close()
        raise TypeError(
            "the handler returned an awaitable, which nothing awaits: make it an async def"
        )
