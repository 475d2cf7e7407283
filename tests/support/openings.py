"""Producers, synchronous and asyncio, whose partitions open when a test says so.

A `Door` gives both the same calls, whose results are futures, so that one test is for both.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pulsar
import pulsar.asyncio
import pytest
from pulsar.schema import BytesSchema

from delaylevel.cluster.threads import in_thread
from delaylevel.errors import DelayLevelError
from delaylevel.producer import DelayLevelProducer
from delaylevel.producer.aio import AsyncDelayLevelProducer
from delaylevel.producer.client_calls import result_of
from delaylevel.producer.setup import ProducerSetup
from delaylevel.testing import ManualClock

from . import fakes
from .world import eventually

ORDERS = "persistent://public/default/orders"
TWO_DAYS = timedelta(days=2, hours=1)


class OpenedProducer:
    """The client's producer: a flush confirms messages, and a close fails those that wait.

    Like the client's, it stores messages in the order in which they were given, whichever of its
    threads flushes.

    Attributes:
        results: results of the next messages; Ok after the last.
        late: True to call back after the flush has returned, as the real client may.
        stored: bodies that a flush has stored.
        closed: True once it was closed.
    """

    def __init__(self) -> None:
        self._schema = BytesSchema()
        self._lock = threading.RLock()
        self._waiting: list[tuple[bytes, Callable[[Any, Any], None]]] = []
        self.results: list[Any] = []
        self.late = False
        self.stored: list[bytes] = []
        self.closed = False

    @property
    def taken(self) -> list[bytes]:
        """Bodies of all messages, in the order in which they were given."""
        with self._lock:
            return self.stored + [body for body, _ in self._waiting]

    def send_async(self, content: bytes, callback: Any, **_: Any) -> None:
        with self._lock:
            if self.closed:
                callback(pulsar.Result.AlreadyClosed, None)
            else:
                self._waiting.append((content, callback))

    def flush(self) -> None:
        if self.late:
            threading.Timer(0.05, self._flush).start()
        else:
            self._flush()

    def _flush(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
            for body, callback in waiting:
                result = self.results.pop(0) if self.results else pulsar.Result.Ok
                if result == pulsar.Result.Ok:
                    self.stored.append(body)
                # The client makes a new object for each result.
                position = pulsar.MessageId(0, 1, len(self.stored), -1)
                callback(pulsar.Result(result.value), position)

    def close(self) -> None:
        with self._lock:
            self.closed = True
            waiting, self._waiting = self._waiting, []
            for _, callback in waiting:
                callback(pulsar.Result.AlreadyClosed, None)

    def is_connected(self) -> bool:
        return not self.closed


class Openings:
    """The openings of a producer's partitions, which a test ends."""

    def __init__(self) -> None:
        self.calls: list[Callable[[Any, Exception | None], None]] = []

    def end(self, number: int = 1, error: Exception | None = None) -> OpenedProducer:
        """End an opening, by number from 1, with a new producer or an error."""
        eventually(lambda: len(self.calls) >= number, f"opening {number}")
        producer = OpenedProducer()
        self.calls[number - 1](None if error else producer, error)
        return producer


@pytest.fixture
def openings(monkeypatch: pytest.MonkeyPatch) -> Openings:
    found = Openings()

    class Opener:
        start = staticmethod(in_thread)

        def __init__(self, create_producer: Any) -> None:
            pass

        def open(self, topic: str, settings: Any, done: Any) -> None:
            found.calls.append(done)

    monkeypatch.setattr("delaylevel.producer.scheduling.PartitionOpener", Opener)
    return found


class Door:
    """A producer as an application calls it; each call has a future with its result.

    Attributes:
        producer: the producer.
        business: its producer of the business topic.
    """

    producer: Any

    def __init__(self, settings: dict[str, Any], describe: Any = None) -> None:
        self.business = OpenedProducer()
        described = fakes.describe(30, targets=(ORDERS,))
        settings = {"batching_enabled": True, **settings}
        self.setup = ProducerSetup(described, ORDERS, settings, settings, ManualClock(), describe)


class ThreadDoor(Door):
    """The synchronous producer; one thread sends, as long as it does not wait for room."""

    def __init__(self, settings: dict[str, Any], describe: Any = None) -> None:
        super().__init__(settings, describe)
        self.producer = DelayLevelProducer(lambda: None, self.business, self.setup)
        self._sender = ThreadPoolExecutor(1)
        self._others = ThreadPoolExecutor(8)

    def send(self, body: bytes, deliver_after: timedelta | None = TWO_DAYS) -> Future[Any]:
        sent: Future[Any] = Future()

        def send() -> None:
            try:
                self.producer.send_async(
                    body, lambda result, _: sent.set_result(result), deliver_after=deliver_after
                )
            except Exception as error:
                sent.set_exception(error)

        self._sender.submit(send)
        return sent

    def wait_for_calls(self) -> None:
        """Wait until all sends so far have begun."""
        self._sender.submit(int).result(60)

    def flush(self) -> Future[Any]:
        return self._others.submit(_result, self.producer.flush)

    def close(self) -> Future[Any]:
        return self._others.submit(_result, self.producer.close)

    def end(self) -> None:
        self._sender.shutdown(wait=False)
        self._others.shutdown(wait=False)


class LoopDoor(Door):
    """The asyncio producer, in an event loop of its own; ``end`` may be called twice."""

    def __init__(self, settings: dict[str, Any], describe: Any = None) -> None:
        super().__init__(settings, describe)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

        async def create() -> AsyncDelayLevelProducer:
            return AsyncDelayLevelProducer(
                lambda: None, self.business, self.setup, self._send_straight
            )

        self.producer = asyncio.run_coroutine_threadsafe(create(), self.loop).result(60)

    def send(self, body: bytes, deliver_after: timedelta | None = TWO_DAYS) -> Future[Any]:
        return self._call(lambda: self.producer.send(body, deliver_after=deliver_after))

    def wait_for_calls(self) -> None:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop).result(60)

    def flush(self) -> Future[Any]:
        return self._call(self.producer.flush)

    def close(self) -> Future[Any]:
        return self._call(self.producer.close)

    def end(self) -> None:
        if self.loop.is_closed():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(60)
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                self.loop.run_until_complete(task)
        self.loop.close()

    async def _send_straight(self, content: bytes, **_: Any) -> Any:
        self.business.stored.append(content)

    def _call(self, call: Callable[[], Any]) -> Future[Any]:
        async def result() -> Any:
            try:
                await call()
            except DelayLevelError:
                raise
            except pulsar.asyncio.PulsarException as error:
                return error.error()
            return pulsar.Result.Ok

        return asyncio.run_coroutine_threadsafe(result(), self.loop)


def _result(call: Callable[[], Any]) -> Any:
    try:
        call()
    except pulsar.PulsarException as error:
        return result_of(error)
    return pulsar.Result.Ok


Open = Callable[..., Any]


@pytest.fixture(params=[ThreadDoor, LoopDoor], ids=["synchronous", "asyncio"])
def door_of(request: pytest.FixtureRequest, openings: Openings) -> Iterator[Open]:
    """Return a function that makes a producer, from its settings."""
    made: list[Any] = []

    def make(describe: Any = None, **settings: Any) -> Door:
        made.append(request.param(settings, describe))
        return made[-1]

    yield make
    for door in made:
        door.end()
