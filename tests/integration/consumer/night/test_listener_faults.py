"""Tests of listeners whose consumers fail, and of a graceful stop."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pulsar
import pytest
import urllib3

from delaylevel import DelayLevelClient
from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.locks import PartitionLock
from delaylevel.consumer import Backoff, Deduplication, Listeners, TopicIdStore
from delaylevel.errors import BrokerError
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow
from delaylevel.model.position import source_partitions
from delaylevel.model.strategy import Levels, PartitionStrategy
from support.listening import AppRunner
from support.world import QUIET, RealWorld, quiet_client

pytestmark = pytest.mark.broker

LEVELS = Levels(
    [PartitionStrategy(partition_by=timedelta(seconds=1), maximum_delay=timedelta(seconds=30))]
)


@pytest.fixture
def runner(world: RealWorld) -> Iterator[AppRunner]:
    """The listeners of a test, stopped at the end."""
    with AppRunner(world) as made:
        yield made


def send(world: RealWorld, topic: str, *bodies: bytes) -> None:
    producer = world.plain_client.create_producer(topic)
    for body in bodies:
        producer.send_async(body, None)
    producer.flush()
    producer.close()


def numbers(begin: int, end: int) -> list[bytes]:
    return [str(number).encode() for number in range(begin, end)]


@pytest.mark.parametrize("subscription_type", ["Shared", "Exclusive"])
@pytest.mark.parametrize("is_coroutine", [False, True])
def test_an_unloaded_topic_stops_no_listener(
    world: RealWorld, runner: AppRunner, subscription_type: str, is_coroutine: bool
) -> None:
    topic = world.topic("orders")
    handled: list[bytes] = []

    async def handle_async(message: Any) -> None:
        handled.append(message.value)

    runner.app.on(topic, subscription="s", subscription_type=subscription_type, retry=False)(
        handle_async if is_coroutine else lambda message: handled.append(message.value)
    )
    runner.start()
    send(world, topic, *numbers(0, 50))
    world.eventually(lambda: len(set(handled)) >= 25, "some messages")
    world.admin.unload(world.name("orders"))
    send(world, topic, *numbers(50, 100))
    world.eventually(lambda: set(handled) == set(numbers(0, 100)), "all messages")
    runner.stop()
    assert backlog(world, "orders") == 0


def test_a_deleted_topic_stops_no_listener(world: RealWorld, runner: AppRunner) -> None:
    topic, other = world.topic("orders"), world.topic("others")
    handled: list[bytes] = []
    for each in (topic, other):
        runner.app.on(each, subscription="s", retry=False)(
            lambda message: handled.append(message.value)
        )
    runner.start()
    send(world, topic, b"before")
    world.eventually(lambda: handled == [b"before"], "a message")
    world.admin.delete(world.name("orders"), force=True)
    send(world, other, b"other")
    world.eventually(lambda: b"other" in handled, "the other listener")

    def arrives() -> bool:
        # Connected clients create the topic again, maybe after this message.
        send(world, topic, b"after")
        return b"after" in handled

    world.eventually(arrives, "messages of the topic that exists again")


def test_a_missing_subscription_is_named(world: RealWorld, connection: Connection) -> None:
    # The client takes this refusal for one that may pass, and reports a timeout.
    url = f"{connection.admin_url}/admin/v2/namespaces/{world.namespace}/autoSubscriptionCreation"
    rule = {"allowAutoSubscriptionCreation": False}
    world.admin.create_partitioned(world.name("orders"), 2, {})
    level_topic = world.level_topic(LEVELS, ("orders",))
    assert urllib3.request("POST", url, json=rule).status == 204
    handled: list[bytes] = []
    with DelayLevelClient.from_connection(
        connection.model_copy(update={"operation_timeout_seconds": 3}), logger=QUIET
    ) as client:
        app = Listeners(client)
        store = Deduplication(store=TopicIdStore())
        app.on(world.topic("orders"), subscription="s", retry=False, deduplicate=store)(
            lambda message: handled.append(message.value)
        )
        missing = (
            r"subscription s of \S+/orders-partition-0 does not exist.*create-subscription -s s"
        )
        with pytest.raises(pulsar.SubscriptionNotFound, match=missing):
            app.start()
        world.admin.create_subscription(world.name("orders"), "s")
        app.start()
        send(world, world.topic("orders"), b"now")
        world.eventually(lambda: handled == [b"now"], "the message")
        app.close()
        source = source_partitions(level_topic)[0]
        world.admin.delete_subscription(source.name, SUBSCRIPTION, force=True)
        with pytest.raises(BrokerError, match=rf"{source.topic} .*subscription {SUBSCRIPTION} of"):
            PartitionLock(client, world.admin, [source], "local")


def test_listeners_go_on_when_the_broker_is_back(
    private_broker: Callable[..., EmbeddedBroker],
) -> None:
    broker = private_broker()
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(contextlib.closing(quiet_client(broker.connection)))
        world = RealWorld(broker.connection, stack, "public/default", client)
        runner = stack.enter_context(AppRunner(world))
        functions: list[bytes] = []
        coroutines: list[bytes] = []

        async def handle(message: Any) -> None:
            coroutines.append(message.value)

        topic = world.topic("orders")
        runner.app.on(topic, subscription="functions", retry=False)(
            lambda message: functions.append(message.value)
        )
        runner.app.on(topic, subscription="coroutines", retry=False)(handle)
        runner.start()
        send(world, topic, *numbers(0, 10))
        world.eventually(lambda: len(functions) == len(coroutines) == 10, "the first messages")
        assert broker.kill()
        world.eventually(lambda: not runner.ready(), "the end of the connections")
        broker.start()
        send(world, topic, *numbers(10, 20))
        wanted = set(numbers(0, 20))
        world.eventually(lambda: set(functions) == set(coroutines) == wanted, "all messages", 120)
        world.eventually(runner.ready, "the listeners")


@pytest.mark.parametrize("is_coroutine", [False, True])
def test_a_graceful_stop_finishes_calls_and_copies(
    world: RealWorld, runner: AppRunner, is_coroutine: bool
) -> None:
    import asyncio

    topic = world.topic("orders")
    description = world.level_topic(LEVELS, final_window=FinalWindow.TRACKER)
    ended: list[bytes] = []
    started = threading.Semaphore(0)

    def end(message: Any) -> None:
        ended.append(message.value)
        if int(message.value) % 2:
            raise ValueError("odd")

    def handle(message: Any) -> None:
        started.release()
        time.sleep(0.3)
        end(message)

    async def handle_async(message: Any) -> None:
        started.release()
        await asyncio.sleep(0.3)
        end(message)

    runner.app.on(topic, subscription="s", retry=Backoff("20s"), concurrency=50)(
        handle_async if is_coroutine else handle
    )
    runner.start()
    send(world, topic, *numbers(0, 200))
    for _ in range(60):
        assert started.acquire(timeout=30)
    runner.stop()  # while calls run, and copies are on their way
    done = set(ended)
    assert 50 <= len(done) < 200
    counts = runner.app.listeners[0].stats.counts()
    odd = {body for body in done if int(body) % 2}
    assert (counts.handled, counts.retried) == (len(done) - len(odd), len(odd))
    assert counts.in_progress == 0
    stored = [m for each in description.members() for m in world.stored(each.topic.full)]
    assert sorted(m.value for m in stored if m.value) == sorted(odd)
    # The other messages are delivered to the next consumer, and none of those that are done.
    consumer = world.plain_client.subscribe(topic, "s", pulsar.ConsumerType.Shared)
    left = world.bodies(consumer, 200 - len(done))
    assert set(left) == set(numbers(0, 200)) - done


def test_a_handler_that_does_not_end_is_left_behind(world: RealWorld) -> None:
    topic, release = world.topic("orders"), threading.Event()
    with AppRunner(world, stop_timeout="1s") as runner:
        runner.app.on(topic, subscription="s", retry=False)(lambda _: release.wait(60))
        runner.start()
        send(world, topic, b"x")
        (listener,) = runner.app.listeners
        world.eventually(lambda: listener.stats.counts().in_progress == 1, "the call")
        start_s = time.monotonic()
        runner.stop()
        assert 0.9 < time.monotonic() - start_s < 8
        release.set()
    consumer = world.plain_client.subscribe(topic, "s", pulsar.ConsumerType.Shared)
    assert world.bodies(consumer, 1) == [b"x"]


def backlog(world: RealWorld, name: str) -> int:
    """Return the number of entries that the subscription has not acknowledged."""
    stats = world.admin.partition_stats(world.name(name))
    return int(stats.subscriptions["s"].backlog_entries)
