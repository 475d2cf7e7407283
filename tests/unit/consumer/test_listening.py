"""Tests of listeners on the in-memory Pulsar."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel import topics
from delaylevel.cluster.connection.settings import Connection
from delaylevel.consumer import Backoff, Deduplication, Listeners, ReceivedMessage, Reject, Retry
from delaylevel.consumer.retry_topics import subscriptions_with_dead_letters
from delaylevel.errors import InvalidInputError
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import MemoryPulsar

DAY = timedelta(days=1)
NOW = timedelta(0)
RETRY = Backoff("10s", "5m", "2h", "1d")
DEAD = "orders-billing-DLQ"


class Calls:
    """The calls of a handler: payload, attempt and time of each."""

    def __init__(self, memory: MemoryPulsar) -> None:
        self._clock = memory.clock
        self.start = self._clock.now()
        self.found: list[tuple[bytes, int, timedelta]] = []

    def add(self, message: ReceivedMessage) -> None:
        at = self._clock.now() - self.start
        self.found.append((message.data, message.attempt, at))

    def failing(self, error: BaseException) -> Callable[[ReceivedMessage], None]:
        """Return a handler that always fails."""

        def fail(message: ReceivedMessage) -> None:
            self.add(message)
            raise error

        return fail

    @property
    def attempts(self) -> list[int]:
        return [attempt for _, attempt, _ in self.found]


@pytest.fixture
def calls(memory_pulsar: MemoryPulsar) -> Calls:
    """An empty list of calls."""
    return Calls(memory_pulsar)


@pytest.fixture
def app(memory_pulsar: MemoryPulsar) -> Iterator[Listeners]:
    """Listeners without handlers."""
    app = Listeners(memory_pulsar.client())
    yield app
    app.close()


def send(memory: MemoryPulsar, *bodies: bytes, topic: str = "orders", **options: Any) -> None:
    producer = memory.client().create_producer(topic, **options)
    for body in bodies:
        producer.send(body)


Register = Callable[..., None]


@pytest.fixture(params=["function", "coroutine"])
def register(request: pytest.FixtureRequest, app: Listeners) -> Register:
    """Register a handler, given as a function, as a function or as a coroutine function."""

    def register(handle: Callable[[Any], Any], **options: Any) -> None:
        async def coroutine(message: Any) -> None:
            await asyncio.sleep(0)
            handle(message)

        handler = handle if request.param == "function" else coroutine
        app.on("orders", subscription="billing", name="bill", **options)(handler)

    return register


def test_every_retry_is_handled_at_its_own_time(
    memory_pulsar: MemoryPulsar, register: Register, calls: Calls, app: Listeners
) -> None:
    register(calls.failing(ValueError("no funds")), retry=RETRY)
    send(memory_pulsar, b"1")
    memory_pulsar.advance(2 * DAY)
    wanted = [NOW, timedelta(seconds=10), timedelta(minutes=5), timedelta(hours=2), DAY]
    assert calls.attempts == [1, 2, 3, 4, 5]
    late = [at - sum(wanted[: number + 1], NOW) for number, (_, _, at) in enumerate(calls.found)]
    assert all(NOW <= each < timedelta(seconds=1) for each in late), late
    (dead,) = memory_pulsar.delivered(DEAD)
    assert dead.data == b"1"
    assert dead.properties["delaylevel.reason"] == "attempt 5 failed: ValueError: no funds"
    described = topics.describe(memory_pulsar.admin, "orders")
    orders = TopicName.parse("orders")
    found = subscriptions_with_dead_letters(memory_pulsar.admin, described)
    assert found == [(orders, "billing", 1)]
    (listener,) = app.listeners
    counts = listener.stats.counts()
    assert (counts.received, counts.failed, counts.retried, counts.dead) == (5, 5, 4, 1)
    assert memory_pulsar.pending("orders-billing-RETRY") == []


class BrokenError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("broken")


ONCE = Backoff("1h", retry_on=ValueError, give_up_on=UnicodeError)


@pytest.mark.parametrize(
    ("error", "after"),
    [
        (ValueError("no such\n account"), timedelta(hours=1)),
        (Retry(), timedelta(hours=1)),
        (Retry("3d", "closed"), 3 * DAY),  # whatever the kinds of errors
    ],
)
def test_a_failed_attempt_is_repeated_once(
    memory_pulsar: MemoryPulsar,
    register: Register,
    calls: Calls,
    error: Exception,
    after: timedelta,
) -> None:
    register(calls.failing(error), retry=ONCE)
    send(memory_pulsar, b"1")
    memory_pulsar.advance(NOW)
    assert calls.attempts == [1]
    (waiting,) = memory_pulsar.pending("orders-billing-RETRY")
    assert waiting.at == calls.start + after
    memory_pulsar.advance(8 * DAY)
    assert calls.attempts == [1, 2], "a chosen delay counts as an attempt"
    (dead,) = memory_pulsar.delivered(DEAD)
    assert dead.properties["delaylevel.reason"].startswith("attempt 2 failed: ")


@pytest.mark.parametrize(
    ("error", "retry", "reason"),
    [
        (Reject("no such customer"), ONCE, "no such customer"),
        (UnicodeError("x"), ONCE, "UnicodeError: x"),
        (KeyError("x"), ONCE, "KeyError: 'x'"),
        (BrokenError(), False, "BrokenError"),
        (SystemExit(1), False, "attempt 1 failed: SystemExit: 1"),
        (ValueError("x\n" * 5000), False, "ValueError: x x x"),
        (Retry("1h"), False, "retry=False"),
        (Retry("400d"), ONCE, "cannot be retried: a delay of 400d"),
    ],
)
def test_a_message_without_another_attempt_becomes_a_dead_letter(
    memory_pulsar: MemoryPulsar,
    register: Register,
    calls: Calls,
    error: BaseException,
    retry: Any,
    reason: str,
) -> None:
    register(calls.failing(error), retry=retry)
    send(memory_pulsar, b"1")
    memory_pulsar.advance(NOW)
    (dead,) = memory_pulsar.delivered(DEAD)
    found = dead.properties["delaylevel.reason"]
    assert (reason in found, "\n" in found, len(found) < 1100) == (True, False, True)
    assert memory_pulsar.pending("orders-billing-RETRY") == []


def test_filter_and_deduplication(
    memory_pulsar: MemoryPulsar, register: Register, app: Listeners
) -> None:
    got: list[bytes] = []
    register(
        lambda message: got.append(message.data),
        filter=lambda message: message.data != b"skip",
        deduplicate=Deduplication(by=lambda message: message.data.decode()),
    )
    send(memory_pulsar, b"same", b"skip", b"1", b"same", b"2")
    memory_pulsar.advance(NOW)
    send(memory_pulsar, b"same")
    memory_pulsar.advance(NOW)
    assert got == [b"same", b"1", b"2"]
    (listener,) = app.listeners
    counts = listener.stats.counts()
    assert (counts.handled, counts.filtered, counts.duplicates) == (3, 1, 2)


def test_everything_happens_in_the_thread_of_the_test(
    memory_pulsar: MemoryPulsar, register: Register
) -> None:
    threads = []
    before = set(threading.enumerate())
    register(lambda message: threads.append(threading.current_thread()))
    send(memory_pulsar, b"1")
    memory_pulsar.advance(NOW)
    assert threads == [threading.current_thread()]
    names = {thread.name for thread in set(threading.enumerate()) - before}
    assert not [name for name in names if name.startswith("delaylevel") and "search" not in name]


def test_an_outcome_of_the_test_is_not_a_failure_of_the_handler(
    memory_pulsar: MemoryPulsar, register: Register
) -> None:
    register(lambda message: pytest.fail("the handler was called"))
    send(memory_pulsar, b"1")
    with pytest.raises(pytest.fail.Exception, match="was called"):
        memory_pulsar.advance(NOW)
    memory_pulsar.advance(NOW)  # the clock can be advanced again


def test_closed_listeners_are_not_called(
    memory_pulsar: MemoryPulsar, register: Register, app: Listeners, calls: Calls
) -> None:
    register(calls.add)
    assert [state.subscribed for state in app.health().values()] == [True]
    app.close()
    assert app.health() == {}
    send(memory_pulsar, b"1")
    memory_pulsar.advance(DAY)
    assert calls.found == []
    app.start()
    memory_pulsar.advance(NOW)
    assert [body for body, _, _ in calls.found] == [b"1"], "the subscription kept it"


def test_the_listeners_of_a_module_run_here(memory_pulsar: MemoryPulsar, calls: Calls) -> None:
    connection = Connection(service_url="pulsar://nowhere.invalid:6650")
    client = connection.open_client(logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, "/dev/null"))
    app = Listeners(client)

    @app.on("orders", subscription="billing", retry=["1d"])
    def bill(message: ReceivedMessage) -> None:
        calls.add(message)
        app.create_producer("bills").send(b"bill")
        if message.attempt == 1:
            raise ValueError

    memory_pulsar.listen(app)
    send(memory_pulsar, b"1")
    memory_pulsar.advance(2 * DAY)
    assert calls.attempts == [1, 2]
    assert len(memory_pulsar.delivered("bills")) == 2
    memory_pulsar.close()
    assert app.client is client
    assert app.health() == {}
    client.close()


# -- in a running event loop


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop of its own."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        asyncio.run(test(**arguments))

    return run


@in_a_loop
async def test_coroutines_are_awaited_in_the_running_loop(
    memory_pulsar: MemoryPulsar, app: Listeners, calls: Calls
) -> None:
    lock, loops = asyncio.Lock(), set()

    @app.on("orders", subscription="billing", retry=["1d"])
    async def bill(message: ReceivedMessage) -> None:
        loops.add(asyncio.get_running_loop())
        async with lock:
            await asyncio.sleep(0.001)
        calls.add(message)
        if message.attempt == 1:
            raise ValueError

    app.on("orders", subscription="shipping")(calls.add)
    send(memory_pulsar, b"1")
    await memory_pulsar.advance_async(2 * DAY)
    assert sorted(calls.attempts) == [1, 1, 2]
    assert loops == {asyncio.get_running_loop()}
    with pytest.raises(InvalidInputError, match=r"write `await memory.advance_async"):
        memory_pulsar.advance(DAY)


@pytest.mark.parametrize("cancel", [False, True])
@in_a_loop
async def test_a_test_that_is_cancelled_ends(
    memory_pulsar: MemoryPulsar, app: Listeners, calls: Calls, cancel: bool
) -> None:
    @app.on("orders", subscription="billing", retry=False)
    async def bill(message: ReceivedMessage) -> None:
        calls.add(message)
        if not cancel:
            raise asyncio.CancelledError
        await asyncio.Event().wait()

    send(memory_pulsar, b"1")
    advancing = asyncio.ensure_future(memory_pulsar.advance_async(NOW))
    while not calls.found:
        await asyncio.sleep(0)
    if cancel:
        advancing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await advancing
    else:
        await advancing
    assert len(memory_pulsar.delivered(DEAD)) == (0 if cancel else 1)
