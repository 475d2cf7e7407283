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

import pytest

from delaylevel import DelayLevelClient
from delaylevel.consumer import Backoff, Listener, Listeners, ReceivedMessage
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


def test_a_listener_without_retries_handles_a_dead_letter_that_is_replayed(
    orders: Orders, invoke: Callable[..., Any], cli_process: Callable[..., Any]
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
        result = invoke("dlq", "replay", orders.topic, "--subscription", "billing", "--all")
        assert result.exit_code == 0, result.output
        cli_process("run", orders.topic)
        eventually(lambda: attempts == [1, 1], "the second first attempt")


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
