"""Tests of listeners on the broker: at-least-once handling, stops, failures and ways to run."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel import DelayLevelClient
from delaylevel.consumer import Backoff, Listener, Listeners, ReceivedMessage, Reject, Retry
from delaylevel.errors import DelayLevelError
from delaylevel.model.level_topic import FinalWindow
from delaylevel.model.strategy import Levels, PartitionStrategy
from support.world import RealWorld, eventually

pytestmark = pytest.mark.broker

HALF_DAY = timedelta(hours=12)
LEVELS = Levels([PartitionStrategy(partition_by=HALF_DAY, maximum_delay=4 * HALF_DAY)])


class Orders:
    """A topic with an application's listeners."""

    def __init__(self, world: RealWorld) -> None:
        self.world = world
        self.topic = world.topic("orders")
        # Its few partitions are created faster than the default ones.
        world.level_topic(LEVELS, final_window=FinalWindow.TRACKER)
        self.client: DelayLevelClient = world.client()
        self.app = Listeners(self.client, stop_timeout="10s")

    def on(self, handler: Callable[[Any], Any], **options: Any) -> None:
        given = {"subscription": "billing", "initial_position": "earliest", **options}
        self.app.on(self.topic, **given)(handler)

    def send(self, *bodies: bytes, **options: Any) -> None:
        producer = self.client.create_producer(self.topic, batching_enabled=False)
        for body in bodies:
            producer.send(body, **options)
        producer.close()

    @contextmanager
    def running(self) -> Iterator[Listener]:
        self.app.start()
        try:
            yield self.app.listeners[0]
        finally:
            self.app.close()

    def unacknowledged(self, topic: str | None = None) -> int:
        name = self.world.name(topic or "orders")
        return self.world.admin.partition_stats(name).subscriptions["billing"].backlog_entries

    def acknowledged(self) -> None:
        eventually(lambda: not self.unacknowledged(), "the acknowledgements")

    def dead(self) -> list[Any]:
        return self.world.stored(f"{self.topic}-billing-DLQ")


@pytest.fixture
def orders(world: RealWorld) -> Orders:
    return Orders(world)


def bodies(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


@pytest.mark.parametrize("kind", ["Shared", "Key_Shared", "Failover", "Exclusive"])
@pytest.mark.parametrize("coroutine", [False, True], ids=["function", "coroutine"])
def test_every_message_is_handled_and_acknowledged(
    orders: Orders, kind: str, coroutine: bool
) -> None:
    seen: list[bytes] = []

    async def later(message: ReceivedMessage) -> None:
        await asyncio.sleep(0)
        seen.append(message.value)

    def at_once(message: ReceivedMessage) -> None:
        seen.append(message.value)

    orders.on(later if coroutine else at_once, subscription_type=kind)
    orders.send(*bodies(50))
    with orders.running() as listener:
        eventually(lambda: len(seen) == 50, "all messages")
        orders.acknowledged()
    if kind in ("Failover", "Exclusive"):
        assert seen == bodies(50)
    assert sorted(seen) == sorted(bodies(50))
    counts = listener.stats.counts()
    assert (counts.received, counts.handled, counts.failed, counts.in_progress) == (50, 50, 0, 0)
    assert sum(counts.durations) == 50


def test_fields_of_a_message(orders: Orders) -> None:
    seen: list[ReceivedMessage] = []
    orders.on(seen.append, schema=pulsar.schema.StringSchema())
    producer = orders.client.create_producer(orders.topic, schema=pulsar.schema.StringSchema())
    producer.send("päid", properties={"who": "me"}, partition_key="k", event_timestamp=7)
    before_ms = orders.world.clock.now_ms()
    with orders.running():
        (message,) = eventually(lambda: seen, "the message")
    assert message.value == "päid"
    assert message.properties == {"who": "me"}
    assert (message.key, message.event_timestamp_ms, message.attempt) == ("k", 7, 1)
    assert message.topic == orders.topic
    assert message.subscription == "billing"
    assert message.id.startswith(orders.topic.removeprefix("persistent://") + ":")
    assert message.due is None
    assert message.lateness is None
    assert abs(before_ms - message.received_ms) < 60_000
    assert message.first_published.timestamp() * 1000 == pytest.approx(message.publish_ms)


def test_a_failed_message_is_dead_with_its_error(orders: Orders) -> None:
    def fail(message: ReceivedMessage) -> None:
        raise ValueError("no such account")

    orders.on(fail, retry=False)
    orders.send(b"1")
    with orders.running() as listener:
        eventually(lambda: listener.stats.counts().dead, "the dead letter")
        orders.acknowledged()
    (letter,) = orders.dead()
    assert letter.value == b"1"
    assert letter.properties["delaylevel.reason"].endswith("ValueError: no such account")
    trace = letter.properties["delaylevel-retry-traceback"]
    assert trace.count("File ") == 1
    assert "in fail" in trace


def test_a_listener_without_retries_handles_a_dead_letter_that_is_replayed(
    orders: Orders, invoke: Callable[..., Any]
) -> None:
    attempts: list[int] = []

    def fail_once(message: ReceivedMessage) -> None:
        attempts.append(message.attempt)
        if len(attempts) == 1:
            raise ValueError("not yet")

    orders.on(fail_once, retry=False)
    orders.send(b"1")
    with orders.running() as listener:
        eventually(lambda: listener.stats.counts().dead, "the dead letter")
        for command in (("dlq", "replay"), ("run", "--once")):
            own = ("--subscription", "billing", "--all") if command[0] == "dlq" else ()
            result = invoke(*command, orders.topic, *own)
            assert result.exit_code == 0, result.output
        eventually(lambda: attempts == [1, 1], "the second first attempt")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), Reject("no"), None])
@pytest.mark.parametrize("coroutine", [False, True], ids=["function", "coroutine"])
def test_any_exception_of_a_handler_is_a_failed_attempt(
    orders: Orders, error: BaseException | None, coroutine: bool
) -> None:
    async def later(message: ReceivedMessage) -> None:
        raise error or asyncio.CancelledError

    def at_once(message: ReceivedMessage) -> Any:
        if error is None:
            return asyncio.sleep(0)  # a coroutine that nothing awaits
        raise error

    orders.on(later if coroutine else at_once, retry=False)
    orders.send(b"1", b"2")
    with orders.running() as listener:
        eventually(lambda: listener.stats.counts().dead == 2, "the dead letters")
        orders.acknowledged()
    assert len(orders.dead()) == 2


def test_a_failed_message_is_parked_then_acknowledged(orders: Orders) -> None:
    def fail(message: ReceivedMessage) -> None:
        raise Retry("1d") if message.value == b"1" else ValueError

    orders.on(fail, retry=Backoff("5h"))
    orders.send(b"1", b"2")
    with orders.running() as listener:
        eventually(lambda: listener.stats.counts().retried == 2, "the copies")
        orders.acknowledged()
    assert listener.stats.counts().dead == 0


def test_a_retried_message_is_handled_again(orders: Orders) -> None:
    seen: list[tuple[bytes, int, str]] = []

    def fail_once(message: ReceivedMessage) -> None:
        seen.append((message.value, message.attempt, message.id))
        if message.attempt == 1:
            raise ValueError

    orders.on(fail_once, retry=Backoff("0s"))
    orders.send(b"1")
    with orders.running():
        eventually(lambda: len(seen) == 2, "the second attempt")
        orders.acknowledged()
        eventually(lambda: not orders.unacknowledged("orders-billing-RETRY-partition-0"), "the end")
    (first, second) = seen
    assert second == (b"1", 2, first[2])


def test_a_filtered_message_is_acknowledged(orders: Orders) -> None:
    seen: list[bytes] = []
    orders.on(
        lambda message: seen.append(message.value), filter=lambda message: message.value != b"1"
    )
    orders.send(*bodies(3))
    with orders.running() as listener:
        eventually(lambda: len(seen) == 2, "the messages")
        orders.acknowledged()
    assert listener.stats.counts().filtered == 1


@pytest.mark.parametrize("coroutine", [False, True], ids=["function", "coroutine"])
def test_no_message_is_handled_twice_with_deduplication(orders: Orders, coroutine: bool) -> None:
    seen: list[bytes] = []

    async def later(message: ReceivedMessage) -> None:
        await asyncio.sleep(0.01)
        seen.append(message.value)

    def at_once(message: ReceivedMessage) -> None:
        time.sleep(0.01)
        seen.append(message.value)

    by_value = lambda message: message.value.decode()  # noqa: E731
    orders.on(later if coroutine else at_once, deduplicate=by_value, concurrency=4)
    orders.send(*bodies(5), *bodies(5), *bodies(5))
    with orders.running() as listener:
        orders.acknowledged()
        eventually(lambda: listener.stats.counts().duplicates == 10, "the duplicates")
    assert sorted(seen) == bodies(5)


@pytest.mark.parametrize("coroutine", [False, True], ids=["function", "coroutine"])
def test_batches(orders: Orders, coroutine: bool) -> None:
    seen: list[list[bytes]] = []

    def at_once(messages: list[ReceivedMessage]) -> None:
        seen.append([message.value for message in messages])
        if len(seen) == 1:
            raise Reject("the first batch")

    async def later(messages: list[ReceivedMessage]) -> None:
        at_once(messages)

    orders.on(later if coroutine else at_once, batch=10, concurrency=1)
    orders.send(*bodies(25))
    with orders.running() as listener:
        eventually(lambda: sum(map(len, seen)) == 25, "all messages")
        orders.acknowledged()
    assert len(seen[0]) == 10
    assert max(map(len, seen)) == 10
    counts = listener.stats.counts()
    assert (counts.dead, counts.handled) == (10, 15)
    assert len(orders.dead()) == 10


def test_a_batch_with_the_same_id_twice(orders: Orders) -> None:
    seen: list[bytes] = []
    orders.on(
        lambda messages: seen.extend(message.value for message in messages),
        batch=10,
        deduplicate=lambda message: "the same",
    )
    orders.send(*bodies(5))
    with orders.running():
        orders.acknowledged()
    assert len(seen) == 1


def test_a_handler_that_hangs_stops_no_other(orders: Orders) -> None:
    hang = threading.Event()
    seen: list[bytes] = []

    def handle(message: ReceivedMessage) -> None:
        if message.value == b"0":
            hang.wait()
        seen.append(message.value)

    orders.on(handle, concurrency=2)
    orders.send(*bodies(100))
    with orders.running() as listener:
        eventually(lambda: len(seen) == 99, "the others")
        assert listener.stats.counts().in_progress == 1
        hang.set()
        orders.acknowledged()


@pytest.mark.parametrize("coroutine", [False, True], ids=["function", "coroutine"])
def test_retries_do_not_exceed_the_concurrency(orders: Orders, coroutine: bool) -> None:
    running = most = 0
    attempts: Counter[bytes] = Counter()

    def enter(message: ReceivedMessage) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        attempts[message.value] += 1

    def leave(message: ReceivedMessage) -> None:
        nonlocal running
        running -= 1
        if message.attempt == 1:
            raise ValueError

    def at_once(message: ReceivedMessage) -> None:
        enter(message)
        time.sleep(0.01)
        leave(message)

    async def later(message: ReceivedMessage) -> None:
        enter(message)
        await asyncio.sleep(0.01)
        leave(message)

    orders.on(later if coroutine else at_once, concurrency=1, retry=Backoff("0s"))
    orders.send(*bodies(30))
    with orders.running() as listener:
        eventually(lambda: listener.stats.counts().handled == 30, "the second attempts")
    assert most == 1
    assert set(attempts.values()) == {2}


def test_slow_handlers_leave_messages_to_the_client(orders: Orders) -> None:
    go: list[asyncio.Event] = []

    async def handle(message: ReceivedMessage) -> None:
        go.append(asyncio.Event())
        await go[-1].wait()

    orders.on(handle, concurrency=5)
    orders.send(*bodies(100))
    with orders.running() as listener:
        eventually(lambda: len(go) == 5, "the first handlers")
        assert listener.stats.counts().received <= 6
        loop = orders.app._loop
        assert loop is not None

        def release() -> bool:
            for each in go:
                loop.loop.call_soon_threadsafe(each.set)
            return not orders.unacknowledged()

        eventually(release, "the acknowledgements")
    assert len(go) == 100


def test_two_hundred_coroutines_run_at_once(orders: Orders) -> None:
    running = most = 0

    async def handle(message: ReceivedMessage) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        while most < 200:
            await asyncio.sleep(0.01)
        running -= 1

    orders.on(handle, concurrency=200)
    orders.send(*bodies(300))
    with orders.running():
        orders.acknowledged()
    assert most == 200


def test_keys_keep_their_order(orders: Orders) -> None:
    seen: dict[str, list[bytes]] = {"a": [], "b": [], "c": []}

    async def handle(message: ReceivedMessage) -> None:
        await asyncio.sleep(0.01 if message.value == b"0" else 0)
        seen[message.key].append(message.value)

    orders.on(handle, subscription_type="Key_Shared")
    for key in seen:
        orders.send(*bodies(20), partition_key=key)
    with orders.running():
        orders.acknowledged()
    assert seen == {key: bodies(20) for key in seen}


@pytest.mark.parametrize("coroutine", [False, True], ids=["function", "coroutine"])
def test_a_stop_finishes_what_runs(orders: Orders, coroutine: bool) -> None:
    started, go = threading.Event(), threading.Event()
    seen: list[bytes] = []

    def at_once(message: ReceivedMessage) -> None:
        started.set()
        go.wait(10)
        seen.append(message.value)

    async def later(message: ReceivedMessage) -> None:
        await asyncio.to_thread(at_once, message)

    orders.on(later if coroutine else at_once, concurrency=1)
    orders.send(*bodies(5))
    orders.app.start()
    assert started.wait(10)
    closing = threading.Thread(target=orders.app.close)
    closing.start()
    go.set()
    closing.join(20)
    assert not closing.is_alive()
    assert seen
    assert orders.unacknowledged() == 5 - len(seen)
    rest = list(seen)
    with orders.running():
        eventually(lambda: len(seen) == 5, "the rest")
    assert sorted(seen) == bodies(5), rest


@pytest.mark.parametrize("coroutine", [False, True], ids=["function", "coroutine"])
def test_a_stop_does_not_wait_for_ever(
    orders: Orders, coroutine: bool, caplog: pytest.LogCaptureFixture
) -> None:
    started, go = threading.Event(), threading.Event()

    def at_once(message: ReceivedMessage) -> None:
        started.set()
        go.wait(30)

    async def later(message: ReceivedMessage) -> None:
        started.set()
        await asyncio.sleep(30)

    orders.app = Listeners(orders.client, stop_timeout="300ms")
    orders.on(later if coroutine else at_once, name="slow")
    orders.send(b"1")
    orders.app.start()
    assert started.wait(10)
    orders.app.close()
    assert "slow" in caplog.text
    assert "1 calls of the handler still run" in caplog.text
    go.set()
    assert orders.unacknowledged() == 1


def test_a_consumer_that_is_lost_is_opened_again(orders: Orders) -> None:
    seen: Counter[bytes] = Counter()
    orders.on(lambda message: seen.update([message.value]))
    orders.send(b"1")
    with orders.running():
        eventually(lambda: seen[b"1"], "the first message")
        for consumer in list(orders.client._consumers):
            consumer._consumer.close()  # as the client does if the broker refuses it
        orders.send(b"2")
        eventually(lambda: seen[b"2"], "the second message")
        eventually(
            lambda: all(state.subscribed for state in orders.app.health().values()),
            "all consumers",
        )


def test_a_topic_that_was_deleted_is_received_from_again(orders: Orders) -> None:
    seen: Counter[bytes] = Counter()
    orders.on(lambda message: seen.update([message.value]))
    orders.send(b"1")
    with orders.running():
        eventually(lambda: seen[b"1"], "the first message")
        admin, name = orders.world.admin, orders.world.name("orders")
        admin.delete(name, force=True)
        eventually(
            lambda: admin.topic_exists(name) and admin.subscriptions(name) == ["billing"],
            "the subscription of the new topic",
        )
        orders.send(b"2")
        eventually(lambda: seen[b"2"], "the second message")


@pytest.mark.parametrize("kind", ["Shared", "Failover"])
def test_partitions_and_their_retries(orders: Orders, kind: str) -> None:
    name = orders.world.name("parts")
    orders.world.admin.create_partitioned(name, 3)
    orders.topic = name.full
    attempts: Counter[tuple[bytes, str, str]] = Counter()

    def handle(message: ReceivedMessage) -> None:
        attempts[message.value, message.id, message.topic] += 1
        if message.attempt == 1:
            raise ValueError

    orders.on(handle, subscription_type=kind, concurrency=3, retry=Backoff("0s"))
    orders.send(*bodies(30))
    with orders.running() as listener:
        eventually(lambda: listener.stats.counts().handled == 30, "the second attempts")
    assert set(attempts.values()) == {2}
    assert sorted(value for value, _, _ in attempts) == sorted(bodies(30))
    assert {topic for _, _, topic in attempts} == {name.full}


def test_a_busy_subscription_is_taken_when_it_is_free(orders: Orders) -> None:
    other = orders.world.client().subscribe(orders.topic, "billing")
    seen: list[bytes] = []
    orders.on(lambda message: seen.append(message.value), subscription_type="Exclusive")
    orders.send(b"1")
    with orders.running():
        (state,) = orders.app.health().values()
        assert state.alive
        assert not state.subscribed
        other.close()
        eventually(lambda: seen, "the message")


def test_run_ends_by_a_signal_and_restores_the_handlers(orders: Orders) -> None:
    earlier = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    orders.on(lambda message: os.kill(os.getpid(), signal.SIGTERM))
    orders.send(b"1")
    orders.app.run()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == earlier
    assert orders.unacknowledged() == 0


def test_a_second_signal_does_not_wait_for_handlers(orders: Orders) -> None:
    go = threading.Event()
    started = time.monotonic()

    def handle(message: ReceivedMessage) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            go.wait(1)
        go.wait(60)

    orders.app = Listeners(orders.client, stop_timeout="1h")
    orders.on(handle)
    orders.send(b"1")
    orders.app.run()
    go.set()
    assert time.monotonic() - started < 50
    assert orders.unacknowledged() == 1


def test_run_ends_by_stop(orders: Orders) -> None:
    orders.on(lambda message: orders.app.stop())
    orders.send(b"1")
    orders.app.run()
    assert orders.unacknowledged() == 0


def test_coroutines_run_in_the_running_loop(orders: Orders) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        seen: list[bytes] = []
        all_seen = asyncio.Event()

        async def handle(message: ReceivedMessage) -> None:
            assert asyncio.get_running_loop() is loop
            seen.append(message.value)
            if len(seen) == 3:
                all_seen.set()

        orders.on(handle)
        async with orders.app:
            await asyncio.wait_for(all_seen.wait(), 20)

    orders.send(*bodies(3))
    asyncio.run(main())
    assert orders.unacknowledged() == 0


def test_a_topic_that_cannot_be_used_is_refused_at_start(orders: Orders) -> None:
    producer = orders.client.create_producer(orders.topic, schema=pulsar.schema.StringSchema())
    producer.close()
    orders.on(print, schema=_int_schema())
    with pytest.raises((pulsar.PulsarException, DelayLevelError)):
        orders.app.start()
    assert orders.app.health() == {}


def _int_schema() -> Any:
    class Order(pulsar.schema.Record):  # type: ignore[misc]
        number = pulsar.schema.Integer()

    return pulsar.schema.JsonSchema(Order)


def test_a_client_without_admin_access_is_refused_at_start(orders: Orders) -> None:
    orders.app = Listeners(orders.world.plain_client)
    orders.on(print)
    with pytest.raises(DelayLevelError, match="admin"):
        orders.app.start()


def test_listeners_start_once_at_a_time(orders: Orders) -> None:
    with pytest.raises(DelayLevelError, match="no listener"):
        orders.app.start()
    orders.on(print)
    with orders.running(), pytest.raises(DelayLevelError, match="run already"):
        orders.app.start()
    with orders.running():
        pass


def test_slow_work_of_the_broker_does_not_stop_new_messages(orders: Orders) -> None:
    """A failed message waits for its confirmation while others are handled."""
    seen: list[bytes] = []

    def handle(message: ReceivedMessage) -> None:
        seen.append(message.value)
        if len(seen) % 2:
            raise ValueError

    orders.on(handle, retry=Backoff("1h", jitter=0.1))
    orders.send(*bodies(100))
    started = time.monotonic()
    with orders.running() as listener:
        orders.acknowledged()
    assert time.monotonic() - started < 30
    assert listener.stats.counts().retried == 50
    assert timedelta(0) < timedelta(seconds=listener.stats.counts().duration_s)
