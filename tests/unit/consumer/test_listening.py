"""Tests of listeners on the in-memory Pulsar, and of the topics of their retries."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from datetime import timedelta
from typing import Any

import pulsar
import pytest
from pulsar.schema import AvroSchema, Integer, JsonSchema, Record, String

from delaylevel import topics
from delaylevel.cluster.connection.settings import Connection
from delaylevel.consumer import Backoff, Deduplication, Listeners, ReceivedMessage, Reject, Retry
from delaylevel.consumer.retry_topics import (
    RetryTopics,
    find_dead_letters,
    prepare,
    subscriptions_with_dead_letters,
)
from delaylevel.errors import DelayTooLongError, InvalidInputError, LevelTopicError
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow, LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.mover import dead_letters
from delaylevel.testing import ManualClock, MemoryPulsar

DAY = timedelta(days=1)
NOW = timedelta(0)
RETRY = Backoff("10s", "5m", "2h", "1d")
ONCE = Backoff("1h", retry_on=ValueError, give_up_on=UnicodeError)


class Scene:
    """A listener of ``billing`` to ``orders`` in memory; a call has payload, attempt and time."""

    def __init__(self, memory: MemoryPulsar, coroutines: bool = False) -> None:
        self.memory = memory
        self.app = Listeners(memory.client())
        self.start = memory.clock.now()
        self.calls: list[tuple[bytes, int, timedelta]] = []
        self._coroutines = coroutines

    def on(self, handle: Callable[[Any], Any], **options: Any) -> None:
        """Register a handler, as a function or as a coroutine function."""

        async def coroutine(message: Any) -> None:
            await asyncio.sleep(0)
            handle(message)

        handler = coroutine if self._coroutines else handle
        self.app.on("orders", subscription="billing", name="bill", **options)(handler)

    def add(self, message: ReceivedMessage) -> None:
        at = self.memory.clock.now() - self.start
        self.calls.append((message.data, message.attempt, at))

    def fail(self, error: BaseException, **options: Any) -> None:
        """Register a handler that always fails, and send a message."""

        def handle(message: ReceivedMessage) -> None:
            self.add(message)
            raise error

        self.on(handle, **options)
        self.send(b"1")

    def send(self, *bodies: bytes) -> None:
        producer = self.memory.client().create_producer("orders")
        for body in bodies:
            producer.send(body)

    @property
    def attempts(self) -> list[int]:
        return [attempt for _, attempt, _ in self.calls]

    @property
    def counts(self) -> Any:
        (listener,) = self.app.listeners
        return listener.stats.counts()

    def retries(self) -> Any:
        """Return the copies that wait for another attempt."""
        return self.memory.pending("orders-billing-RETRY")

    def reasons(self) -> list[str]:
        """Return the reasons of the dead letters."""
        letters = self.memory.delivered("orders-billing-DLQ")
        return [letter.properties["delaylevel.reason"] for letter in letters]


@pytest.fixture(params=[False, True], ids=["function", "coroutine"])
def scene(request: pytest.FixtureRequest, memory_pulsar: MemoryPulsar) -> Iterator[Scene]:
    made = Scene(memory_pulsar, request.param)
    yield made
    made.app.close()


def test_a_delay_that_fits_only_without_its_jitter_is_refused_at_the_start(scene: Scene) -> None:
    with pytest.raises(DelayTooLongError, match="a delay of 33d is beyond the longest level"):
        scene.on(scene.add, retry=Backoff("30d", jitter=0.1))


def test_every_retry_is_handled_at_its_own_time(scene: Scene) -> None:
    scene.fail(ValueError("no funds"), retry=RETRY)
    scene.memory.advance(2 * DAY)
    wanted = [NOW, timedelta(seconds=10), timedelta(minutes=5), timedelta(hours=2), DAY]
    assert scene.attempts == [1, 2, 3, 4, 5]
    late = [at - sum(wanted[: n + 1], NOW) for n, (_, _, at) in enumerate(scene.calls)]
    assert all(NOW <= each < timedelta(seconds=1) for each in late), late
    assert scene.reasons() == ["attempt 5 failed: ValueError: no funds"]
    admin = scene.memory.admin
    found = subscriptions_with_dead_letters(admin, topics.describe(admin, "orders"))
    assert found == [(TopicName.parse("orders"), "billing", 1)]
    counts = scene.counts
    assert (counts.received, counts.failed, counts.retried, counts.dead) == (5, 5, 4, 1)
    assert scene.retries() == []


def test_a_retry_is_handled_by_a_clock_that_begins_in_1970() -> None:
    with MemoryPulsar(ManualClock(start_ms=0)) as memory:
        scene = Scene(memory)
        scene.fail(ValueError("no funds"), retry=Backoff("10s", "1m"))
        memory.advance(timedelta(minutes=2))
        assert (scene.attempts, len(scene.reasons())) == ([1, 2, 3], 1)
        scene.app.close()


class Order(Record):
    number = Integer()


class LaterOrder(Record):
    number = Integer()
    note = String(default=None, required_default=True)


# One Avro record in two versions.
LaterOrder.__name__ = "Order"


@pytest.mark.parametrize("schema", [AvroSchema, JsonSchema])
def test_a_retry_has_everything_of_its_message_for_its_subscription_only(
    scene: Scene, schema: Any
) -> None:
    received: list[ReceivedMessage] = []
    others: list[int] = []

    def handle(message: ReceivedMessage) -> None:
        received.append(message)
        if message.attempt < 3:
            raise ValueError("no money")

    client = scene.memory.client()
    with_old = client.create_producer("orders", schema=schema(Order))
    scene.on(handle, retry=["1h", "1h"], schema=schema(LaterOrder))
    scene.app.on("orders", subscription="shipping", schema=schema(LaterOrder))(
        lambda message: others.append(message.value.number)
    )
    with_old.send(
        Order(number=1), {"mine": "1"}, "k", ordering_key="o", event_timestamp=1_700_000_000_123
    )
    client.create_producer("orders", schema=schema(LaterOrder)).send(LaterOrder(number=2, note="x"))
    scene.memory.advance(DAY)
    assert others == [1, 2]
    values = [(each.attempt, each.value.number, each.value.note) for each in received]
    assert sorted(values) == [(n, *value) for n in (1, 2, 3) for value in ((1, None), (2, "x"))]
    message, copy, third = (each for each in received if each.value.number == 1)
    for each in (message, copy, third):
        assert (each.key, each.ordering_key, each.properties) == ("k", "o", {"mine": "1"})
        assert (each.event_timestamp_ms, each.id) == (1_700_000_000_123, message.id)
        assert each.topic == "persistent://public/default/orders"
        assert each.first_published_ms == message.publish_ms
    for each in (copy, third):
        found = each.all_properties
        assert (found["REAL_TOPIC"], found["REAL_SUBSCRIPTION"]) == (each.topic, "billing")
        assert found["ORIGIN_MESSAGE_ID"] == message.id
        assert found["delaylevel-retry-error"] == "ValueError: no money"
    assert copy.all_properties["delaylevel.id"] == f"{message.id}#billing#1"


@pytest.mark.parametrize("size", [5_212_500, 5_225_000])  # a parked message may be smaller only
def test_what_has_no_room_for_the_error_leaves_it_out(scene: Scene, size: int) -> None:
    errors = []

    def handle(message: ReceivedMessage) -> None:
        scene.add(message)
        errors.append(message.all_properties.get("delaylevel-retry-error"))
        if message.attempt == 1:
            raise ValueError("e" * 2000)

    scene.on(handle, retry=["1h"])
    scene.send(b"x" * size)
    scene.memory.advance(DAY)
    if size == 5_212_500:
        assert (scene.attempts, errors, scene.reasons()) == ([1, 2], [None, None], [])
    else:
        (reason,) = scene.reasons()
        assert "the copy would be too large" in reason
        assert scene.attempts == [1]


def test_a_replayed_dead_letter_begins_again(scene: Scene) -> None:
    """Its attempts are others than those before, for the dispatcher as well, which drops copies."""
    scene.fail(ValueError("no"), retry=["1h"])
    scene.memory.advance(DAY)
    admin, clock = scene.memory.admin, scene.memory.clock
    description, source = find_dead_letters(admin, "orders", "billing")
    assert not list(dead_letters.dead_letters(scene.app.client, admin, description))
    for target in (None, None, "persistent://public/default/orders"):
        letter = scene.memory.delivered("orders-billing-DLQ")[-1]
        assert "raise error" in letter.properties["delaylevel-retry-traceback"]
        (replayed,) = dead_letters.replay(
            scene.app.client,
            admin,
            description,
            lambda _: True,
            clock=clock,
            source=source,
            target=target,
        )
        assert replayed.outcome in ("delivered", "handed off")
        scene.memory.advance(DAY)
    assert scene.attempts == 4 * [1, 2]
    new = scene.memory.delivered("orders")[-1]
    assert not [name for name in new.properties if name.startswith("delaylevel-retry")]


@pytest.mark.parametrize(
    ("error", "after"),
    [
        (ValueError("no such\n account"), timedelta(hours=1)),
        (Retry(), timedelta(hours=1)),
        (Retry("3d", "closed"), 3 * DAY),  # whatever the kinds of errors
    ],
)
def test_a_failed_attempt_is_repeated_once(
    scene: Scene, error: Exception, after: timedelta
) -> None:
    scene.fail(error, retry=ONCE)
    scene.memory.advance(NOW)
    assert scene.attempts == [1]
    assert [each.at for each in scene.retries()] == [scene.start + after]
    scene.memory.advance(8 * DAY)
    assert scene.attempts == [1, 2], "a chosen delay counts as an attempt"
    (reason,) = scene.reasons()
    assert reason.startswith("attempt 2 failed: ")


class BrokenError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("broken")


@pytest.mark.parametrize(
    ("error", "retry", "reason"),
    [
        (Reject("no such customer"), ONCE, "no such customer"),
        (UnicodeError("x"), ONCE, "UnicodeError: x"),
        (KeyError("x"), ONCE, "KeyError: 'x'"),
        (BrokenError(), False, "BrokenError"),
        (SystemExit(1), False, "attempt 1 failed: SystemExit: 1"),
        (ValueError("a \ud800 b\n" * 5000), False, "ValueError: a \\ud800 b a"),
        (Retry("1h"), False, "the handler asked for another attempt"),
        (Retry("400d"), ONCE, "cannot be retried: a delay of 400d"),
        (Retry(after=timedelta(days=3_000_000)), ONCE, "cannot be retried: "),
    ],
)
def test_a_message_without_another_attempt_becomes_a_dead_letter(
    scene: Scene, error: BaseException, retry: Any, reason: str
) -> None:
    scene.fail(error, retry=retry)
    scene.memory.advance(NOW)
    (found,) = scene.reasons()
    assert (reason in found, "\n" in found, len(found) < 1100) == (True, False, True)
    (letter,) = scene.memory.delivered("orders-billing-DLQ")
    assert len(letter.properties.get("delaylevel-retry-error", "")) <= 1000
    assert len(letter.properties.get("delaylevel-retry-traceback", "")) <= 8000
    assert scene.retries() == []


def test_the_topic_of_dead_letters_comes_back_with_its_subscription(scene: Scene) -> None:
    """Somebody has deleted it while it was empty."""
    admin = scene.memory.admin
    scene.fail(ValueError("no funds"), retry=False)
    admin.delete(TopicName.parse("orders-billing-DLQ"))
    scene.memory.advance(NOW)
    found = subscriptions_with_dead_letters(admin, topics.describe(admin, "orders"))
    assert found == [(TopicName.parse("orders"), "billing", 1)]


def test_filter_and_deduplication(scene: Scene) -> None:
    scene.on(
        scene.add,
        filter=lambda message: message.data != b"skip",
        deduplicate=Deduplication(by=lambda message: message.data.decode()),
    )
    for bodies in ((b"same", b"skip", b"1", b"same", b"2"), (b"same",)):
        scene.send(*bodies)
        scene.memory.advance(NOW)
    assert [body for body, _, _ in scene.calls] == [b"same", b"1", b"2"]
    counts = scene.counts
    assert (counts.handled, counts.filtered, counts.duplicates) == (3, 1, 2)


def test_everything_happens_in_the_thread_of_the_test(scene: Scene) -> None:
    threads = []
    before = set(threading.enumerate())
    scene.on(lambda message: threads.append(threading.current_thread()))
    scene.send(b"1")
    scene.memory.advance(NOW)
    assert threads == [threading.current_thread()]
    names = {thread.name for thread in set(threading.enumerate()) - before}
    assert not [name for name in names if name.startswith("delaylevel") and "search" not in name]


def test_an_outcome_of_the_test_is_not_a_failure_of_the_handler(scene: Scene) -> None:
    scene.on(lambda message: pytest.fail("the handler was called"))
    scene.send(b"1")
    with pytest.raises(pytest.fail.Exception, match="was called"):
        scene.memory.advance(NOW)
    scene.memory.advance(NOW)  # the clock can be advanced again


def test_an_outcome_of_the_test_leaves_no_claim_on_an_id(scene: Scene) -> None:
    def handle(message: ReceivedMessage) -> None:
        scene.add(message)
        if message.data == b"1":
            pytest.fail("enough")

    scene.on(handle, deduplicate=Deduplication(by=lambda _: "same"))
    scene.app.start()
    scene.send(b"1", b"2", b"3")
    with pytest.raises(pytest.fail.Exception, match="enough"):
        scene.memory.advance(NOW)
    scene.memory.advance(NOW)
    assert [data for data, _, _ in scene.calls] == [b"1", b"2"]
    assert (scene.counts.handled, scene.counts.duplicates, scene.counts.failed) == (1, 1, 0)


def test_closed_listeners_are_not_called(scene: Scene) -> None:
    scene.on(scene.add)
    assert [state.subscribed for state in scene.app.health().values()] == [True]
    scene.app.close()
    assert scene.app.health() == {}
    scene.send(b"1")
    scene.memory.advance(DAY)
    assert scene.calls == []
    scene.app.start()
    scene.memory.advance(NOW)
    assert scene.attempts == [1], "the subscription kept it"


def test_a_handler_that_closes_its_listener_is_named_in_the_log(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.on(lambda _: scene.app.close())
    scene.app.start()
    scene.send(b"1")
    with pytest.raises(pulsar.AlreadyClosed):  # its consumer cannot acknowledge the message
        scene.memory.advance(NOW)
    assert "1 calls of the handler still run; their messages are delivered again" in caplog.text


def test_nothing_keeps_the_client_of_a_closed_listener() -> None:
    memory = MemoryPulsar()
    scene = Scene(memory)
    scene.on(scene.add)
    scene.app.start()
    scene.app.close()
    core = weakref.ref(scene.app.client._client)
    del scene, memory
    gc.collect()
    assert core() is None


def test_the_listeners_of_a_module_run_here(memory_pulsar: MemoryPulsar) -> None:
    connection = Connection(service_url="pulsar://nowhere.invalid:6650")
    client = connection.open_client(logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, "/dev/null"))
    scene, test_thread = Scene(memory_pulsar), threading.current_thread()
    app = scene.app = Listeners(client)

    @app.on("orders", subscription="billing", retry=["1d"])
    def bill(message: ReceivedMessage) -> None:
        assert threading.current_thread() is test_thread
        scene.add(message)
        app.client.create_producer("bills").send(b"bill")
        if message.attempt == 1:
            raise ValueError

    memory_pulsar.listen(app)
    with pytest.raises(InvalidInputError, match="advance its clock instead"):
        app.run()
    scene.send(b"1")
    memory_pulsar.advance(2 * DAY)
    assert scene.attempts == [1, 2]
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
async def test_coroutines_are_awaited_in_the_running_loop(memory_pulsar: MemoryPulsar) -> None:
    scene, lock, loops = Scene(memory_pulsar), asyncio.Lock(), set()

    @scene.app.on("orders", subscription="billing", retry=["1d"])
    async def bill(message: ReceivedMessage) -> None:
        loops.add(asyncio.get_running_loop())
        async with lock:
            await asyncio.sleep(0.001)
        scene.add(message)
        if message.attempt == 1:
            raise ValueError

    scene.app.on("orders", subscription="shipping")(scene.add)
    scene.send(b"1")
    await memory_pulsar.advance_async(2 * DAY)
    assert sorted(scene.attempts) == [1, 1, 2]
    assert loops == {asyncio.get_running_loop()}
    with pytest.raises(InvalidInputError, match=r"write `await memory.advance_async"):
        memory_pulsar.advance(DAY)


@pytest.mark.parametrize("cancel", [False, True])
@in_a_loop
async def test_a_test_that_is_cancelled_ends(memory_pulsar: MemoryPulsar, cancel: bool) -> None:
    scene = Scene(memory_pulsar)

    @scene.app.on("orders", subscription="billing", retry=False)
    async def bill(message: ReceivedMessage) -> None:
        scene.add(message)
        if not cancel:
            raise asyncio.CancelledError
        await asyncio.Event().wait()

    scene.send(b"1")
    advancing = asyncio.ensure_future(memory_pulsar.advance_async(NOW))
    while not scene.calls:
        await asyncio.sleep(0)
    if cancel:
        advancing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await advancing
    else:
        await advancing
    assert len(scene.reasons()) == (0 if cancel else 1)


DAYS = Levels(PartitionStrategy(maximum_delay=timedelta(days=3)))


def test_everything_is_created_once(memory_pulsar: MemoryPulsar) -> None:
    admin, wanted = memory_pulsar.admin, RetryTopics.of("orders", "billing")
    made = prepare(admin, wanted)
    assert made.name.local == "_orders-delay-level"
    for name, subscription in ((wanted.retry, "billing"), (wanted.dead_letter, SUBSCRIPTION)):
        assert admin.partitioned_stats(name)[0].subscriptions[subscription].durable
        assert admin.topic_policies(name).message_ttl_s == 0
    assert prepare(admin, wanted) == made


@pytest.mark.parametrize("subscription", ["", "a/b"])
def test_subscriptions_that_cannot_be_a_part_of_a_name_are_refused(subscription: str) -> None:
    with pytest.raises(InvalidInputError, match="cannot have retries"):
        RetryTopics.of("orders", subscription)


def test_topics_of_another_subscription_are_refused(memory_pulsar: MemoryPulsar) -> None:
    prepare(memory_pulsar.admin, RetryTopics.of("orders-billing-x", "y"))
    other = RetryTopics.of("orders", "billing-x-y")
    with pytest.raises(LevelTopicError, match="give one of the two subscriptions another name"):
        prepare(memory_pulsar.admin, other)


@pytest.mark.parametrize("kind", ["Shared", "Key_Shared", "Failover", "Exclusive"])
@pytest.mark.parametrize("window", list(FinalWindow))
def test_a_level_topic_of_another_name_carries_the_retries(
    memory_pulsar: MemoryPulsar, kind: str, window: FinalWindow
) -> None:
    """Copies that the broker delays come in time to subscriptions of every type."""
    orders = "persistent://public/default/orders"
    memory_pulsar.client().create_producer(orders)
    topic = "persistent://public/default/any-name"
    made = topics.create(
        memory_pulsar.admin, LevelTopicDescription(topic, DAYS, (orders,), final_window=window)
    )
    app = Listeners(memory_pulsar.client())
    at: list[Any] = []

    @app.on("orders", subscription="billing", subscription_type=kind, retry=["2d"])
    def fail_once(message: Any) -> None:
        at.append(memory_pulsar.clock.now())
        if len(at) == 1:
            raise ValueError

    memory_pulsar.client().create_producer(orders).send(b"pay")
    memory_pulsar.advance(timedelta(days=2, minutes=1))
    first, second = at
    assert timedelta(days=2) <= second - first < timedelta(days=2, seconds=2)
    assert [
        each.topic for each in topics.list_level_topics(memory_pulsar.admin, "public/default")
    ] == [made.topic]
    app.close()
