"""Tests of messages that cannot be retried, and of listeners that are stopped while they start."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pulsar
import pytest

from delaylevel.consumer import Backoff, ReceivedMessage
from delaylevel.consumer import host as unfinished_messages
from delaylevel.model.level_topic import FinalWindow
from delaylevel.model.strategy import Levels, PartitionStrategy
from support.listening import AppRunner
from support.world import RealWorld

pytestmark = pytest.mark.broker

LEVELS = Levels(
    [PartitionStrategy(partition_by=timedelta(seconds=1), maximum_delay=timedelta(seconds=30))]
)


@pytest.fixture
def runner(world: RealWorld) -> Iterator[AppRunner]:
    """The listeners of a test, stopped at the end."""
    world.level_topic(LEVELS, final_window=FinalWindow.TRACKER, window_partitions=1)
    with AppRunner(world) as made:
        yield made


def backlog(world: RealWorld, name: str, subscription: str = "billing") -> int:
    return world.admin.partition_stats(world.name(name)).subscriptions[subscription].backlog_entries


def send(world: RealWorld, *bodies: bytes, **options: Any) -> None:
    producer = world.plain_client.create_producer(
        world.topic("orders"), batching_enabled=False, **options
    )
    for body in bodies:
        producer.send(body)
    producer.close()


def test_encrypted_messages_that_fail_do_not_stop_a_listener(
    world: RealWorld, runner: AppRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    private, public = str(tmp_path / "private.pem"), str(tmp_path / "public.pem")
    for words in (
        ["genrsa", "-out", private, "2048"],
        ["rsa", "-in", private, "-pubout", "-out", public],
    ):
        subprocess.run([openssl, *words], check=True, capture_output=True)
    keys = pulsar.CryptoKeyReader(public, private)
    monkeypatch.setattr(unfinished_messages, "_MOST", 3)
    seen: list[bytes] = []

    def handle(message: ReceivedMessage) -> None:
        seen.append(message.value)
        if message.value.startswith(b"bad") and seen.count(message.value) == 1:
            raise ValueError(message.value)

    runner.app.on(
        world.topic("orders"),
        subscription="billing",
        retry=Backoff("20s"),
        crypto_key_reader=keys,
        negative_ack_redelivery_delay_ms=500,
    )(handle)
    runner.start()
    bad = [b"bad %d" % number for number in range(6)]
    send(world, *bad, b"good", encryption_key="key", crypto_key_reader=keys)
    world.eventually(lambda: b"good" in seen, "a message behind the failed ones", 10)
    world.eventually(lambda: not backlog(world, "orders"), "the second attempts", 20)
    assert sorted(seen) == sorted([*bad, *bad, b"good"])
    assert not world.stored(f"{world.topic('orders')}-billing-DLQ")


def test_a_message_whose_consumer_was_closed_is_delivered_again_and_recognised(
    world: RealWorld, runner: AppRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled: list[bytes] = []
    consumers: list[Any] = []
    subscribe = runner.app.client.subscribe

    def subscribe_and_note(*args: Any, **options: Any) -> Any:
        consumers.append(subscribe(*args, **options))
        return consumers[-1]

    def handle(message: ReceivedMessage) -> None:
        handled.append(message.value)
        if len(handled) == 1:
            consumers[0]._consumer.close()  # as another thread of the listener does when it fails

    monkeypatch.setattr(runner.app.client, "subscribe", subscribe_and_note)
    world.plain_client.subscribe(world.topic("orders"), "billing").close()
    send(world, b"1", b"2")
    runner.app.on(
        world.topic("orders"), subscription="billing", retry=Backoff("20s"), deduplicate=True
    )(handle)
    runner.start()
    world.eventually(lambda: not backlog(world, "orders"), "the acknowledgements", 20)
    assert handled == [b"1", b"2"]
    assert runner.app.listeners[0].stats.counts().duplicates == 1


def test_a_start_that_is_cancelled_leaves_nothing(world: RealWorld, runner: AppRunner) -> None:
    async def handle(message: ReceivedMessage) -> None:
        """Do nothing."""

    async def start() -> None:
        async with runner.app:
            raise AssertionError("it has started")

    async def cancel() -> None:
        task = asyncio.create_task(start())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    runner.app.on(world.topic("orders"), subscription="billing", retry=Backoff("20s"))(handle)
    before = set(threading.enumerate())
    asyncio.run(cancel())
    assert not runner.app.health()
    left = {each.name for each in set(threading.enumerate()) - before}
    assert not {name for name in left if "handle" in name}
    assert not world.admin.partition_stats(world.name("orders")).subscriptions["billing"].consumers


def test_a_stop_that_is_cancelled_waits_for_no_handler(world: RealWorld, runner: AppRunner) -> None:
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
        await asyncio.sleep(0.5)  # in the stop now, which takes 30 s
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 15)
        assert seen == ["began", "cancelled"]

    runner.app.on(
        world.topic("orders"),
        subscription="billing",
        retry=Backoff("20s"),
        initial_position="earliest",
    )(handle)
    send(world, b"order 1")
    asyncio.run(cancel())
    assert not runner.app.health()
    assert backlog(world, "orders") == 1


@pytest.mark.parametrize("name", ["a+b", "100%", "a%2Bb", "a b#c?d=é&,"])
def test_every_name_of_a_subscription_names_that_of_the_retries(
    world: RealWorld, runner: AppRunner, name: str
) -> None:
    def handle(message: ReceivedMessage) -> None:
        raise ValueError

    runner.app.on(world.topic("orders"), subscription=name, retry=Backoff("20s"))(handle)
    runner.start()
    send(world, b"order 1")
    world.eventually(lambda: runner.app.listeners[0].stats.counts().retried, "the retry")
    retries = world.name(f"orders-{name}-RETRY")
    stats = world.admin.partition_stats(retries.partition(0))
    assert list(stats.subscriptions) == [name]
    runner.stop()
    world.admin.delete_subscription(retries, name)
    assert not world.admin.partition_stats(retries.partition(0)).subscriptions
