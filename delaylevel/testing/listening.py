"""Listeners on the in-memory Pulsar: they are called in the thread that advances the clock.

A step is a generator. It yields the coroutines of handlers, and whoever drives it awaits them: a
loop of its own for :meth:`.MemoryPulsar.advance`, the running loop for
:meth:`.MemoryPulsar.advance_async`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any

import pulsar

from delaylevel.cluster.failures import close_quietly
from delaylevel.consumer.host import Parts, refuse_awaitable
from delaylevel.consumer.listener import Listener
from delaylevel.consumer.message import ReceivedMessage
from delaylevel.errors import InvalidInputError

#: A generator of the coroutines of handlers, with the result of the step.
Step = Generator[Coroutine[Any, Any, Any], Any, Any]
Handled = Callable[[Listener, ReceivedMessage], object]


class MemoryListener:
    """A listener whose handler is called when the clock is advanced.

    Args:
        parts: the listener and what it needs.
        subscribe: functions that return a new consumer, of new messages and of retried copies.
        running: the running listeners; this one is added while it runs.
        handled: function that is called for each message that was handled.
    """

    def __init__(
        self,
        parts: Parts,
        subscribe: list[Callable[[int], Any]],
        running: list[MemoryListener],
        handled: Handled,
    ) -> None:
        self.listener = parts.listener
        self._parts = parts
        self._subscribe = subscribe
        self._all = running
        self._handled = handled
        self._consumers: list[Any] = []
        self._tally = parts.listener.stats.tally()
        self.running = 0

    def start(self) -> None:
        """Subscribe."""
        self._consumers = [subscribe(0) for subscribe in self._subscribe]
        self._all.append(self)

    @property
    def alive(self) -> bool:
        """True until the listener is stopped."""
        return self in self._all

    @property
    def ready(self) -> bool:
        """True while the listener is subscribed."""
        return self.alive and all(consumer.is_connected() for consumer in self._consumers)

    def stop(self) -> None:
        """Receive no more messages."""
        if self in self._all:
            self._all.remove(self)

    def join(self, until_s: float) -> bool:
        """Return True: no handler runs outside a step."""
        return True

    def close(self) -> None:
        """Close the consumers."""
        consumers, self._consumers = self._consumers, []
        for consumer in consumers:
            close_quietly(consumer, "consumer")

    def next_event_ms(self) -> int | None:
        """Return the next time, ms, at which a message can be received; None for never."""
        times = [consumer._consumer.next_event_ms() for consumer in self._consumers]
        return min((at_ms for at_ms in times if at_ms is not None), default=None)

    def handle_all(self) -> Step:
        """Handle every message that is available now; return True if there was one."""
        worked = self._finish()
        for consumer in self._consumers:
            while self.alive and (received := self._receive(consumer)):
                worked = True
                while received:
                    batch, received = self._parts.sort(received, consumer, self._tally)
                    if batch:
                        yield from self._handle(batch, consumer)
                    self._finish()
        return worked

    def _receive(self, consumer: Any) -> list[ReceivedMessage]:
        """Return the messages of the next call of the handler; an empty list if there is none."""
        found: list[ReceivedMessage] = []
        while len(found) < self.listener.batch:
            try:
                found.append(self._parts.received(consumer.receive(0)))
            except pulsar.Timeout:
                break
            self._tally.received += 1
        return found

    def _handle(self, batch: list[ReceivedMessage], consumer: Any) -> Step:
        argument: Any = batch[0] if self.listener.batch == 1 else list(batch)
        self.running, self._tally.in_progress = 1, len(batch)
        start_s = time.perf_counter()
        try:
            returned = self.listener.handler(argument)
            if self.listener.is_coroutine:
                yield returned
            elif returned is not None:
                refuse_awaitable(returned)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            # Others are for the test: the end by Ctrl-C, or an outcome such as pytest.fail().
            self._parts.failed(batch, consumer, error, self._tally)
            return
        finally:
            self._tally.took(time.perf_counter() - start_s)
            self.running = self._tally.in_progress = 0
        for message in batch:
            self._tally.handled += 1
            self._handled(self.listener, message)
            acknowledge = partial(consumer.acknowledge, message.raw)
            self._parts.handling.succeeded(message, acknowledge)

    def _finish(self) -> bool:
        """Store and acknowledge failed messages; return True if there was one."""
        worked = False
        while self._parts.unfinished.work():
            worked = True
        return worked


class Listening:
    """The listeners of an in-memory Pulsar, and the event loop of their coroutines."""

    def __init__(self, handled: Handled) -> None:
        self._handled = handled
        self._running: list[MemoryListener] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._busy = False

    def host(self, parts: Parts, subscribe: list[Callable[[int], Any]]) -> MemoryListener:
        """Return the host of a listener; it does not run yet."""
        return MemoryListener(parts, subscribe, self._running, self._handled)

    def next_event_ms(self) -> int | None:
        """Return the next time, ms, at which a listener has work; None for never."""
        times = [listener.next_event_ms() for listener in self._running]
        return min((at_ms for at_ms in times if at_ms is not None), default=None)

    def handle_all(self) -> Step:
        """Call the handlers for every message that is available now; return True for any."""
        worked = False
        for listener in tuple(self._running):
            worked = (yield from listener.handle_all()) or worked
        return worked

    def drive(self, steps: Step) -> Any:
        """Run steps in this thread, and return their result.

        Raises:
            InvalidInputError: a handler advances the clock, or there are coroutines and this thread
                has a running event loop.
        """
        self._enter()
        try:
            if any(each.listener.is_coroutine for each in self._running) and _has_loop():
                raise InvalidInputError(
                    "this thread has a running event loop, so coroutines cannot be called here: "
                    "write `await memory.advance_async(...)`"
                )
            resume = _first(steps)
            while True:
                try:
                    called = resume()
                except StopIteration as end:
                    return end.value
                if self._loop is None:
                    self._loop = asyncio.new_event_loop()
                task = self._loop.create_task(called)
                self._loop.run_until_complete(asyncio.wait({task}))
                resume = _resume(steps, task)
        finally:
            steps.close()
            self._busy = False

    async def drive_async(self, steps: Step) -> Any:
        """Run steps in the running event loop, and return their result.

        Raises:
            InvalidInputError: a handler advances the clock.
        """
        self._enter()
        try:
            resume = _first(steps)
            while True:
                try:
                    called = resume()
                except StopIteration as end:
                    return end.value
                task = asyncio.get_running_loop().create_task(called)
                try:
                    await asyncio.wait({task})
                except asyncio.CancelledError:  # of the test, not of the handler
                    task.cancel()
                    raise
                resume = _resume(steps, task)
        finally:
            steps.close()
            self._busy = False

    def forget(self) -> None:
        """Forget all listeners, whose process was killed."""
        self._running.clear()

    def close(self) -> None:
        """Close the event loop."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    def _enter(self) -> None:
        if self._busy:
            raise InvalidInputError(
                "a handler advances the clock: only the test does; a handler sends delayed messages"
            )
        self._busy = True


Resume = Callable[[], Coroutine[Any, Any, Any]]


def _first(steps: Step) -> Resume:
    """Return a function that begins."""
    return lambda: next(steps)


def _resume(steps: Step, task: asyncio.Task[Any]) -> Resume:
    """Return a function that continues after a coroutine with its result or error."""
    if task.cancelled():
        return lambda: steps.throw(asyncio.CancelledError())
    error = task.exception()
    if error is not None:
        return lambda: steps.throw(error)
    return lambda: steps.send(task.result())


def _has_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
