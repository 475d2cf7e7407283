"""Tests of listeners on a real broker: threads and coroutines, order, limits, faults, and ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel import DelayLevelClient, topics
from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.locks import PartitionLock
from delaylevel.consumer import (
    Backoff,
    Deduplication,
    Listener,
    Listeners,
    ReceivedMessage,
    Reject,
    TopicIdStore,
)
from delaylevel.errors import BrokerError
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow
from delaylevel.model.position import source_partitions
from delaylevel.model.strategy import Levels, PartitionStrategy
from support.background import Background
from support.world import QUIET, RealWorld, quiet_client

pytestmark = pytest.mark.broker

HALF_DAY = timedelta(hours=12)
LEVELS = Levels([PartitionStrategy(partition_by=HALF_DAY, maximum_delay=4 * HALF_DAY)])
both = pytest.mark.parametrize("coroutine", [False, True], ids=["function", "coroutine"])


def bodies(begin: int, end: int) -> list[bytes]:
    """Return the numbers of a range as payloads."""
    return [b"%d" % number for number in range(begin, end)]


class AppRunner:
    """An application with listeners of ``billing`` to ``orders``, in a thread of the test."""

    def __init__(self, world: RealWorld, **options: Any) -> None:
        self._world = world
        self.topic = world.topic("orders")
        self.app = Listeners(world.client(), **options)
        self._running: Background | None = None

    def __enter__(self) -> AppRunner:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def on(self, handler: Callable[[Any], Any], **options: Any) -> None:
        """Register a handler."""
        given = {"subscription": "billing", "initial_position": "earliest", **options}
        self.app.on(given.pop("topic", self.topic), **given)(handler)

    def send(self, messages: Iterable[bytes], **options: Any) -> None:
        """Publish messages to ``orders``, or another ``topic``."""
        topic = options.pop("topic", self.topic)
        key_of = options.pop("key_of", lambda body: None)
        producer = self._world.plain_client.create_producer(
            topic, block_if_queue_full=True, **options
        )
        for body in messages:
            producer.send_async(body, None, partition_key=key_of(body))
        producer.flush()
        producer.close()

    @property
    def listener(self) -> Listener:
        """The only listener."""
        (found,) = self.app.listeners
        return found

    def unacknowledged(self, subscription: str = "billing") -> int:
        """Return the number of entries of ``orders`` that a subscription has not acknowledged."""
        stats = self._world.admin.partition_stats(self._world.name("orders"))
        return stats.subscriptions[subscription].backlog_entries

    def left(self, count: int) -> list[bytes]:
        """Return what the next consumer of the subscription gets."""
        shared = pulsar.ConsumerType.Shared
        consumer = self._world.plain_client.subscribe(self.topic, "billing", shared)
        return self._world.bodies(consumer, count)

    def start(self) -> None:
        """Run the application, and wait until all consumers are subscribed."""
        self._running = Background(self.app.run, self.app.stop)
        self._world.eventually(self.ready, "the listeners")

    def ready(self) -> bool:
        """Return True if all listeners are subscribed."""
        if self._running is not None and self._running.failure is not None:
            raise self._running.failure
        states = self.app.health().values()  # of those that have started
        return len(states) == len(self.app.listeners) and all(each.subscribed for each in states)

    def stop(self) -> None:
        """Stop the application gracefully."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()


@pytest.fixture
def runner(world: RealWorld) -> Iterator[AppRunner]:
    """Listeners to ``orders``, which has a level topic."""
    # Its few partitions are created faster than the default ones.
    world.level_topic(LEVELS, final_window=FinalWindow.TRACKER)
    with AppRunner(world, stop_timeout="10s") as made:
        yield made


def both_kinds(
    coroutine: bool, begin: Callable[[Any], float], end: Callable[[Any], None]
) -> Callable[[Any], Any]:
    """Return a function or a coroutine function that waits between two calls."""

    def handle(message: Any) -> None:
        time.sleep(begin(message))
        end(message)

    async def handle_async(message: Any) -> None:
        await asyncio.sleep(begin(message))
        end(message)

    return handle_async if coroutine else handle


class Gate:
    """Handlers that wait, from one message on, until they are released."""

    def __init__(self, coroutine: bool, held: Callable[[Any], bool] = lambda message: True) -> None:
        self.release = threading.Event()
        self.handled: list[bytes] = []
        self._held = held
        self.handle = self._wait_async if coroutine else self._wait

    def _wait(self, message: Any) -> None:
        if self._held(message):
            self.release.wait(60)
        self.handled.append(message.value)

    async def _wait_async(self, message: Any) -> None:
        while self._held(message) and not self.release.is_set():
            await asyncio.sleep(0.01)
        self.handled.append(message.value)


@both
def test_a_handler_that_hangs_stops_no_other(
    world: RealWorld, runner: AppRunner, coroutine: bool
) -> None:
    gate, others = Gate(coroutine, lambda message: message.value == b"3"), Gate(coroutine=False)
    others.release.set()
    runner.on(gate.handle, concurrency=2, retry=False)
    runner.on(others.handle, topic=world.topic("others"), retry=False)
    for topic in (runner.topic, world.topic("others")):
        runner.send(bodies(0, 100), topic=topic)
    runner.start()
    world.eventually(lambda: len(others.handled) == 100, "the other listener")
    # The threads share one consumer, so those that wait with the hanging one are not stuck.
    world.eventually(lambda: len(gate.handled) == 99, "all other messages")
    assert b"3" not in gate.handled
    gate.release.set()
    world.eventually(lambda: len(gate.handled) == 100, "the message that hung")


@both
def test_slow_handlers_make_no_queue_grow(
    world: RealWorld, runner: AppRunner, coroutine: bool
) -> None:
    runner.send(bodies(0, 3_000), batching_enabled=False)
    gate = Gate(coroutine)
    runner.on(gate.handle, concurrency=5, receiver_queue_size=20, retry=False)
    runner.start()
    stats = runner.listener.stats
    world.eventually(lambda: stats.counts().in_progress == 5, "all calls")

    def delivered() -> int:
        found = world.rest.get(f"{world.name('orders').rest_path}/stats")["subscriptions"]
        return int(found["billing"]["msgOutCounter"])

    # The queue, what is being handled, one that a thread has received, and the next permits.
    world.eventually(lambda: delivered() >= 20, "a full queue")
    time.sleep(1)  # a queue that grows would do so now
    assert stats.counts().received <= 6
    assert delivered() <= 20 + 5 + 1 + 20, delivered()
    gate.release.set()
    world.eventually(lambda: stats.counts().handled == 3_000, "all messages")


@both
def test_the_order_within_a_key_is_kept(
    world: RealWorld, runner: AppRunner, coroutine: bool
) -> None:
    found: dict[str, list[int]] = defaultdict(list)
    running: set[str] = set()
    together = 0
    chosen = random.Random(5)

    def begin(message: Any) -> float:
        nonlocal together
        assert message.key not in running
        running.add(message.key)
        together = max(together, len(running))
        return chosen.uniform(0, 0.01)

    def end(message: Any) -> None:
        found[message.key].append(int(message.value))
        running.discard(message.key)

    handle = both_kinds(coroutine, begin, end)
    runner.on(handle, subscription_type="Key_Shared", concurrency=8, retry=False)
    runner.start()
    # A Key_Shared subscription needs batches of one key.
    by_key = {"batching_type": pulsar.BatchingType.KeyBased}
    runner.send(bodies(0, 600), key_of=lambda body: f"k{int(body) % 20}", **by_key)
    stats = runner.listener.stats
    world.eventually(lambda: stats.counts().handled == 600, "all messages")
    assert {key: sorted(numbers) for key, numbers in found.items()} == found
    assert stats.counts().failed == 0
    assert together > 1


@pytest.mark.parametrize("kind", ["Shared", "Failover"])
def test_partitions_and_their_retries(world: RealWorld, runner: AppRunner, kind: str) -> None:
    name = world.name("parts")
    world.admin.create_partitioned(name, 3)
    attempts: Counter[tuple[bytes, str, str]] = Counter()
    running: list[bytes] = []
    most = 0

    def handle(message: ReceivedMessage) -> None:
        nonlocal most
        running.append(message.value)
        most = max(most, len(running))
        time.sleep(0.01)
        running.pop()
        attempts[message.value, message.id, message.topic] += 1
        if message.attempt == 1:
            raise ValueError

    odd = "a b#c?d=é&,+100%2Bb"
    options = {"subscription_type": kind, "concurrency": 3, "retry": Backoff("0s")}
    runner.on(handle, topic=name.full, subscription=odd, **options)
    runner.send(bodies(0, 30), topic=name.full, batching_enabled=False)
    runner.start()
    world.eventually(lambda: runner.listener.stats.counts().handled == 30, "the second attempts")
    assert set(attempts.values()) == {2}
    assert sorted(value for value, _, _ in attempts) == sorted(bodies(0, 30))
    assert {topic for _, _, topic in attempts} == {name.full}
    assert most <= 3, "retries count, too"
    retries = world.admin.partition_stats(world.name(f"parts-{odd}-RETRY").partition(0))
    assert list(retries.subscriptions) == [odd]


# -- faults


def test_a_deleted_topic_stops_no_listener(world: RealWorld, runner: AppRunner) -> None:
    other = world.topic("others")
    handled: list[bytes] = []
    for each in (runner.topic, other):
        runner.on(lambda message: handled.append(message.value), topic=each, retry=False)
    runner.start()
    runner.send([b"before"])
    world.eventually(lambda: handled == [b"before"], "a message")
    world.admin.delete(world.name("orders"), force=True)
    runner.send([b"other"], topic=other)
    world.eventually(lambda: b"other" in handled, "the other listener")

    def arrives() -> bool:
        # Connected clients create the topic again, maybe after this message.
        runner.send([b"after"])
        return b"after" in handled

    world.eventually(arrives, "messages of the topic that exists again")


def test_a_missing_subscription_is_named(
    world: RealWorld, runner: AppRunner, connection: Connection
) -> None:
    # The client takes this refusal for one that may pass, and reports a timeout.
    world.set_policy("autoSubscriptionCreation", {"allowAutoSubscriptionCreation": False})
    world.admin.create_partitioned(world.name("parts"), 2, {})
    quick = connection.model_copy(update={"operation_timeout_seconds": 3})
    with DelayLevelClient.from_connection(quick, logger=QUIET) as client:
        app = Listeners(client)
        store = Deduplication(store=TopicIdStore())
        app.on(world.topic("parts"), subscription="s", retry=False, deduplicate=store)(print)
        missing = r"subscription s of \S+/parts-partition-0 does not .*create-subscription -s s"
        with pytest.raises(pulsar.SubscriptionNotFound, match=missing):
            app.start()
        world.admin.create_subscription(world.name("parts"), "s")
        app.start()
        app.close()
        source = source_partitions(topics.describe(world.admin, runner.topic))[0]
        world.admin.delete_subscription(source.name, SUBSCRIPTION, force=True)
        with pytest.raises(BrokerError, match=rf"{source.topic} .*subscription {SUBSCRIPTION} of"):
            PartitionLock(client, world.admin, [source], "local")


def test_listeners_go_on_when_the_broker_is_back_and_handle_nothing_again(
    private_broker: Callable[..., EmbeddedBroker],
) -> None:
    broker = private_broker()
    store = TopicIdStore(timeout_s=60)
    ids = Deduplication(by=lambda message: message.value.decode(), store=store)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(contextlib.closing(quiet_client(broker.connection)))
        world = RealWorld(broker.connection, stack, "public/default", client)

        def listening() -> tuple[AppRunner, list[Gate]]:
            runner = stack.enter_context(AppRunner(world))
            gates = [
                Gate(coroutine, lambda each: int(each.value) > 9) for coroutine in (False, True)
            ]
            for number, gate in enumerate(gates):
                options = {"retry": False, "deduplicate": ids, "concurrency": 20}
                runner.on(gate.handle, subscription=f"s{number}", **options)
            runner.start()
            return runner, gates

        def handled(gates: list[Gate], count: int) -> None:
            world.eventually(lambda: all(len(each.handled) >= count for each in gates), "all", 120)

        runner, gates = listening()
        runner.send(bodies(0, 20))
        handled(gates, 10)
        assert broker.kill()
        world.eventually(lambda: not runner.ready(), "the end of the connections")
        for gate in gates:
            gate.release.set()  # nobody can store their IDs
        broker.start()
        runner.send(bodies(20, 30))
        handled(gates, 30)
        world.eventually(runner.ready, "the listeners")
        runner.stop()
        assert [sorted(gate.handled) for gate in gates] == 2 * [sorted(bodies(0, 30))]
        runner, gates = listening()
        for gate in gates:
            gate.release.set()
        runner.send(bodies(0, 31))
        handled(gates, 1)
        assert [gate.handled for gate in gates] == 2 * [[b"30"]]


def test_what_cannot_be_copied_comes_again_or_is_a_dead_letter(
    world: RealWorld,
    runner: AppRunner,
    ordered: Callable[..., None],
    key_reader: pulsar.CryptoKeyReader,
) -> None:
    """An encrypted message is never stored in clear text."""
    keys = {"crypto_key_reader": key_reader}
    seen: list[tuple[bytes, int]] = []

    def handle(message: ReceivedMessage) -> None:
        seen.append((message.value, message.attempt))
        if message.value == b"secret" and len(seen) % 2:
            raise Reject("no money")
        raise ValueError("no money")

    again = {"negative_ack_redelivery_delay_ms": 100, **keys}
    runner.on(handle, retry=Backoff("0s"), **again)
    runner.start()
    runner.send([b"secret"], encryption_key="key", **keys)
    world.eventually(lambda: len(seen) > 3, "the message again and again")
    assert set(seen) == {(b"secret", 1)}
    members = topics.describe(world.admin, runner.topic).members()
    copies = [world.topic("orders-billing-DLQ"), *(each.topic.full for each in members)]
    assert not any(map(world.stored, copies))
    ordered(runner.topic, b"\xff\xfe", b"pay", properties={})
    world.eventually(lambda: world.stored(copies[0]), "the dead letter")
    (letter,) = world.stored(copies[0])
    assert letter.value == b"pay"
    assert "the ordering key is not UTF-8" in letter.properties["delaylevel.reason"]


# -- ends


@both
def test_a_graceful_stop_finishes_calls_and_copies(
    world: RealWorld, runner: AppRunner, coroutine: bool
) -> None:
    ended: list[bytes] = []
    started = threading.Semaphore(0)

    def begin(message: Any) -> float:
        started.release()
        return 0.3

    def end(message: Any) -> None:
        ended.append(message.value)
        if int(message.value) % 2:
            raise ValueError("odd")

    runner.on(both_kinds(coroutine, begin, end), retry=Backoff("1d"), concurrency=50)
    runner.start()
    runner.send(bodies(0, 200))
    for _ in range(60):
        assert started.acquire(timeout=30)
    runner.stop()  # while calls run, and copies are on their way
    done = set(ended)
    assert 50 <= len(done) < 200
    counts = runner.listener.stats.counts()
    odd = {body for body in done if int(body) % 2}
    assert (counts.handled, counts.retried) == (len(done) - len(odd), len(odd))
    assert counts.in_progress == 0
    members = topics.describe(world.admin, runner.topic).members()
    stored = [m.value for each in members for m in world.stored(each.topic.full) if m.value]
    assert sorted(stored) == sorted(odd)
    # The other messages are delivered to the next consumer, and none of those that are done.
    assert set(runner.left(200 - len(done))) == set(bodies(0, 200)) - done


def test_a_second_signal_or_the_timeout_leaves_a_handler_behind(world: RealWorld) -> None:
    earlier = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    for signals, timeout in ((2, "1h"), (1, "1s")):
        runner, go = AppRunner(world, stop_timeout=timeout), threading.Event()

        def handle(message: ReceivedMessage, signals: int = signals, go: Any = go) -> None:
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGTERM)
                go.wait(1)
            go.wait(60)

        runner.on(handle, subscription=f"s{signals}", retry=False)
        runner.send([b"1"])
        runner.app.run()
        assert not go.is_set()
        go.set()
        assert runner.unacknowledged(f"s{signals}"), "it has not been handled"
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == earlier


def test_a_stop_that_is_cancelled_waits_for_no_handler(runner: AppRunner) -> None:
    seen: list[str] = []

    async def handle(message: ReceivedMessage) -> None:
        seen.append("began")
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def run() -> None:
        async with runner.app:
            while not seen:
                await asyncio.sleep(0.01)

    async def cancel() -> None:
        task = asyncio.create_task(run())
        while not seen:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)  # in the stop now, which takes 10 s
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seen == ["began", "cancelled"]

    runner.on(handle, retry=Backoff("20s"))
    runner.send([b"order 1"])
    asyncio.run(cancel())
    assert not runner.app.health()
    assert runner.unacknowledged() == 1
