"""Tests of listeners on a real broker: threads and coroutines at once, order, limits, and ends."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel.consumer import Backoff, ReceivedMessage
from delaylevel.model.level_topic import FinalWindow
from delaylevel.model.strategy import Levels, PartitionStrategy
from support.listening import AppRunner, bodies
from support.world import RealWorld

pytestmark = pytest.mark.broker

HALF_DAY = timedelta(hours=12)
LEVELS = Levels([PartitionStrategy(partition_by=HALF_DAY, maximum_delay=4 * HALF_DAY)])
both = pytest.mark.parametrize("coroutine", [False, True], ids=["function", "coroutine"])


@pytest.fixture
def runner(world: RealWorld) -> Iterator[AppRunner]:
    """Listeners to ``orders``, which has a level topic."""
    # Its few partitions are created faster than the default ones.
    world.level_topic(LEVELS, final_window=FinalWindow.TRACKER)
    with AppRunner(world, stop_timeout="10s") as made:
        yield made


def handler(
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


def waiting(coroutine: bool, release: threading.Event) -> Callable[[], Any]:
    """Return a function, or a coroutine function, that waits for an event."""

    async def wait_async() -> None:
        while not release.is_set():
            await asyncio.sleep(0.01)

    return wait_async if coroutine else lambda: release.wait(60)


@both
def test_a_handler_that_hangs_stops_no_other(
    world: RealWorld, runner: AppRunner, coroutine: bool
) -> None:
    other = world.topic("others")
    release, handled, of_other = threading.Event(), [], []
    wait = waiting(coroutine, release)

    def handle(message: Any) -> None:
        if message.value == b"3":
            wait()
        handled.append(message.value)

    async def handle_async(message: Any) -> None:
        if message.value == b"3":
            await wait()
        handled.append(message.value)

    runner.on(handle_async if coroutine else handle, concurrency=2, retry=False)
    runner.on(lambda message: of_other.append(message.value), topic=other, retry=False)
    for topic in (runner.topic, other):
        runner.send(bodies(0, 100), topic=topic)
    runner.start()
    world.eventually(lambda: len(of_other) == 100, "the other listener")
    # The threads share one consumer, so those that wait with the hanging one are not stuck.
    world.eventually(lambda: len(handled) == 99, "all other messages")
    assert b"3" not in handled
    release.set()
    world.eventually(lambda: len(handled) == 100, "the message that hung")


@both
def test_slow_handlers_make_no_queue_grow(
    world: RealWorld, runner: AppRunner, coroutine: bool
) -> None:
    runner.send(bodies(0, 3_000), batching_enabled=False)
    release = threading.Event()
    wait = waiting(coroutine, release)

    async def handle_async(_: Any) -> None:
        await wait()

    handle = handle_async if coroutine else lambda _: wait()
    runner.on(handle, concurrency=5, receiver_queue_size=20, retry=False)
    runner.start()
    stats = runner.listener.stats
    world.eventually(lambda: stats.counts().in_progress == 5, "all calls")

    def delivered() -> int:
        found = world.admin.partition_stats(world.name("orders")).subscriptions["billing"]
        return int(found.messages_out)

    # The queue, what is being handled, one that a thread has received, and the next permits.
    world.eventually(lambda: delivered() >= 20, "a full queue")
    time.sleep(1)  # a queue that grows would do so now
    assert stats.counts().received <= 6
    assert stats.counts().in_progress == 5
    assert delivered() <= 20 + 5 + 1 + 20, delivered()
    release.set()
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

    handle = handler(coroutine, begin, end)
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


@both
def test_retries_do_not_exceed_the_concurrency(
    world: RealWorld, runner: AppRunner, coroutine: bool
) -> None:
    running = most = 0
    attempts: Counter[bytes] = Counter()

    def enter(message: ReceivedMessage) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        attempts[message.value] += 1
        return 0.01

    def leave(message: ReceivedMessage) -> None:
        nonlocal running
        running -= 1
        if message.attempt == 1:
            raise ValueError

    runner.on(handler(coroutine, enter, leave), concurrency=1, retry=Backoff("0s"))
    runner.send(bodies(0, 30))
    runner.start()
    world.eventually(lambda: runner.listener.stats.counts().handled == 30, "the second attempts")
    assert most == 1
    assert set(attempts.values()) == {2}


@pytest.mark.parametrize("kind", ["Shared", "Failover"])
def test_partitions_and_their_retries(world: RealWorld, runner: AppRunner, kind: str) -> None:
    name = world.name("parts")
    world.admin.create_partitioned(name, 3)
    attempts: Counter[tuple[bytes, str, str]] = Counter()

    def handle(message: ReceivedMessage) -> None:
        attempts[message.value, message.id, message.topic] += 1
        if message.attempt == 1:
            raise ValueError

    options = {"subscription_type": kind, "concurrency": 3, "retry": Backoff("0s")}
    runner.on(handle, topic=name.full, **options)
    runner.send(bodies(0, 30), topic=name.full, batching_enabled=False)
    runner.start()
    world.eventually(lambda: runner.listener.stats.counts().handled == 30, "the second attempts")
    assert set(attempts.values()) == {2}
    assert sorted(value for value, _, _ in attempts) == sorted(bodies(0, 30))
    assert {topic for _, _, topic in attempts} == {name.full}


def test_a_busy_subscription_is_taken_when_it_is_free(world: RealWorld, runner: AppRunner) -> None:
    other = world.client().subscribe(runner.topic, "billing")
    seen: list[bytes] = []
    runner.on(lambda message: seen.append(message.value), subscription_type="Exclusive")
    runner.send([b"1"])
    runner.app.start()
    (state,) = runner.app.health().values()
    assert (state.alive, state.subscribed) == (True, False)
    other.close()
    world.eventually(lambda: seen, "the message")
    runner.app.close()


def test_run_ends_by_a_signal_and_restores_the_handlers(runner: AppRunner) -> None:
    earlier = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    runner.on(lambda message: os.kill(os.getpid(), signal.SIGTERM))
    runner.send([b"1"])
    runner.app.run()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == earlier
    assert runner.unacknowledged() == 0


def test_a_second_signal_does_not_wait_for_handlers(world: RealWorld, runner: AppRunner) -> None:
    go, patient = threading.Event(), AppRunner(world, stop_timeout="1h")

    def handle(message: ReceivedMessage) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            go.wait(1)
        go.wait(60)

    patient.on(handle)
    patient.send([b"1"])
    patient.app.run()
    assert not go.is_set()
    go.set()
    assert patient.unacknowledged() == 1


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


@pytest.mark.parametrize("name", ["a+b", "100%", "a%2Bb", "a b#c?d=é&,"])
def test_every_name_of_a_subscription_names_that_of_the_retries(
    world: RealWorld, runner: AppRunner, name: str
) -> None:
    def handle(message: ReceivedMessage) -> None:
        raise ValueError

    runner.on(handle, subscription=name, retry=Backoff("20s"))
    runner.send([b"order 1"])
    runner.start()
    world.eventually(lambda: runner.listener.stats.counts().retried, "the retry")
    retries = world.name(f"orders-{name}-RETRY")
    stats = world.admin.partition_stats(retries.partition(0))
    assert list(stats.subscriptions) == [name]
    runner.stop()
    world.admin.delete_subscription(retries, name)
    assert not world.admin.partition_stats(retries.partition(0)).subscriptions
