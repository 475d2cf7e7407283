"""Tests of handlers that run at the same time: slow ones, ones that hang, and ordered ones."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pulsar
import pytest

from support.listening import AppRunner
from support.world import RealWorld

pytestmark = pytest.mark.broker


@pytest.fixture
def runner(world: RealWorld) -> Iterator[AppRunner]:
    """The listeners of a test, stopped at the end."""
    with AppRunner(world) as made:
        yield made


def publish(world: RealWorld, topic: str, count: int, keys: int = 0, **options: Any) -> None:
    """Publish numbers; number *n* has the key ``k<n % keys>``."""
    # A Key_Shared subscription needs batches of one key.
    batching = pulsar.BatchingType.KeyBased if keys else pulsar.BatchingType.Default
    producer = world.plain_client.create_producer(
        topic, batching_type=batching, block_if_queue_full=True, **options
    )
    for number in range(count):
        key = f"k{number % keys}" if keys else None
        producer.send_async(str(number).encode(), None, partition_key=key)
    producer.flush()
    producer.close()


def orders(world: RealWorld, name: str = "orders") -> str:
    """Return a topic with two partitions and the subscription ``s``."""
    topic = world.name(name)
    world.admin.create_partitioned(topic, 2, {})
    world.admin.create_subscription(topic, "s", earliest=True)
    return topic.full


@pytest.mark.parametrize("is_coroutine", [False, True])
def test_a_handler_that_hangs_stops_no_other(
    world: RealWorld, runner: AppRunner, is_coroutine: bool
) -> None:
    topic, other = orders(world), orders(world, "others")
    publish(world, topic, 100)
    publish(world, other, 100)
    release, handled, of_other = threading.Event(), [], []

    def handle(message: Any) -> None:
        if message.value == b"3":
            release.wait(60)
        handled.append(message.value)

    async def handle_async(message: Any) -> None:
        if message.value == b"3":
            while not release.is_set():
                await asyncio.sleep(0.01)
        handled.append(message.value)

    app = runner.app
    app.on(topic, subscription="s", concurrency=2, retry=False)(
        handle_async if is_coroutine else handle
    )
    app.on(other, subscription="s", retry=False)(lambda message: of_other.append(message.value))
    runner.start()
    world.eventually(lambda: len(of_other) == 100, "the other listener")
    # The threads share one consumer, so those that wait with the hanging one are not stuck.
    world.eventually(lambda: len(handled) == 99, "all other messages")
    assert b"3" not in handled
    release.set()
    world.eventually(lambda: len(handled) == 100, "the message that hung")


@pytest.mark.parametrize("is_coroutine", [False, True])
def test_slow_handlers_make_no_queue_grow(
    world: RealWorld, runner: AppRunner, is_coroutine: bool
) -> None:
    topic = orders(world)
    publish(world, topic, 3_000, batching_enabled=False)
    release = threading.Event()

    async def handle_async(_: Any) -> None:
        while not release.is_set():
            await asyncio.sleep(0.01)

    app = runner.app
    app.on(topic, subscription="s", concurrency=5, receiver_queue_size=20, retry=False)(
        handle_async if is_coroutine else lambda _: release.wait(60)
    )
    runner.start()
    (listener,) = app.listeners
    world.eventually(lambda: listener.stats.counts().in_progress == 5, "all calls")

    def delivered() -> int:
        stats = world.admin.partitioned_stats(world.name("orders")).values()
        return sum(each.subscriptions["s"].messages_out for each in stats)

    # The queues of two partitions, what is being handled, and one that a thread has received.
    limit = 2 * 20 + 5 + 1
    world.eventually(lambda: delivered() >= 20, "full queues")
    time.sleep(1)  # a queue that grows would do so now
    assert listener.stats.counts().received <= 6
    assert listener.stats.counts().in_progress == 5
    assert delivered() <= limit + 20, delivered()
    release.set()
    world.eventually(lambda: listener.stats.counts().handled == 3_000, "all messages")


@pytest.mark.parametrize("is_coroutine", [False, True])
def test_the_order_within_a_key_is_kept(
    world: RealWorld, runner: AppRunner, is_coroutine: bool
) -> None:
    topic = orders(world)
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

    def handle(message: Any) -> None:
        time.sleep(begin(message))
        end(message)

    async def handle_async(message: Any) -> None:
        await asyncio.sleep(begin(message))
        end(message)

    app = runner.app
    app.on(topic, subscription="s", subscription_type="Key_Shared", concurrency=8, retry=False)(
        handle_async if is_coroutine else handle
    )
    runner.start()
    publish(world, topic, 600, keys=20)  # now, or the first consumer fetches all of them
    (listener,) = app.listeners
    world.eventually(lambda: listener.stats.counts().handled == 600, "all messages")
    assert {key: sorted(numbers) for key, numbers in found.items()} == found
    assert listener.stats.counts().failed == 0
    assert together > 1
