"""Tests of listeners whose topics, brokers and messages fail, and of a graceful stop."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pulsar
import pytest
import urllib3

from delaylevel import DelayLevelClient
from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.locks import PartitionLock
from delaylevel.consumer import Backoff, Deduplication, Listeners, ReceivedMessage, TopicIdStore
from delaylevel.consumer import host as unfinished_messages
from delaylevel.errors import BrokerError
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow
from delaylevel.model.position import source_partitions
from delaylevel.model.strategy import Levels, PartitionStrategy
from support.listening import AppRunner, bodies
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


@pytest.mark.parametrize("kind", ["Shared", "Exclusive"])
def test_an_unloaded_topic_stops_no_listener(
    world: RealWorld, runner: AppRunner, kind: str
) -> None:
    handled: list[bytes] = []

    async def handle(message: Any) -> None:
        handled.append(message.value)

    runner.on(handle, subscription_type=kind, retry=False)
    runner.start()
    runner.send(bodies(0, 50))
    world.eventually(lambda: len(set(handled)) >= 25, "some messages")
    world.admin.unload(world.name("orders"))
    runner.send(bodies(50, 100))
    world.eventually(lambda: set(handled) == set(bodies(0, 100)), "all messages")
    runner.stop()
    assert runner.unacknowledged() == 0


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
        world.plain_client.create_producer(world.topic("orders")).send(b"now")
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

        runner.on(lambda message: functions.append(message.value), retry=False)
        runner.on(handle, subscription="coroutines", retry=False)
        runner.start()
        runner.send(bodies(0, 10))
        world.eventually(lambda: len(functions) == len(coroutines) == 10, "the first messages")
        assert broker.kill()
        world.eventually(lambda: not runner.ready(), "the end of the connections")
        broker.start()
        runner.send(bodies(10, 20))
        wanted = set(bodies(0, 20))
        world.eventually(lambda: set(functions) == set(coroutines) == wanted, "all messages", 120)
        world.eventually(runner.ready, "the listeners")


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
    world.level_topic(LEVELS, final_window=FinalWindow.TRACKER, window_partitions=1)
    seen: list[bytes] = []

    def handle(message: ReceivedMessage) -> None:
        seen.append(message.value)
        if message.value.startswith(b"bad") and seen.count(message.value) == 1:
            raise ValueError(message.value)

    redelivery = {"negative_ack_redelivery_delay_ms": 500}
    runner.on(handle, retry=Backoff("20s"), crypto_key_reader=keys, **redelivery)
    runner.start()
    bad = [b"bad %d" % number for number in range(6)]
    unbatched = {"batching_enabled": False, "encryption_key": "key"}
    runner.send([*bad, b"good"], crypto_key_reader=keys, **unbatched)
    world.eventually(lambda: b"good" in seen, "a message behind the failed ones")
    world.eventually(lambda: not runner.unacknowledged(), "the second attempts")
    assert sorted(seen) == sorted([*bad, *bad, b"good"])
    assert not world.stored(f"{runner.topic}-billing-DLQ")


@pytest.mark.parametrize("coroutine", [False, True])
def test_a_graceful_stop_finishes_calls_and_copies(
    world: RealWorld, runner: AppRunner, coroutine: bool
) -> None:
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

    runner.on(handle_async if coroutine else handle, retry=Backoff("20s"), concurrency=50)
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
    stored = [m for each in description.members() for m in world.stored(each.topic.full)]
    assert sorted(m.value for m in stored if m.value) == sorted(odd)
    # The other messages are delivered to the next consumer, and none of those that are done.
    assert set(runner.left(200 - len(done))) == set(bodies(0, 200)) - done


def test_a_handler_that_does_not_end_is_left_behind(world: RealWorld) -> None:
    release = threading.Event()
    with AppRunner(world, stop_timeout="1s") as runner:
        runner.on(lambda _: release.wait(60), retry=False)
        runner.start()
        runner.send([b"x"])
        stats = runner.listener.stats
        world.eventually(lambda: stats.counts().in_progress == 1, "the call")
        start_s = time.monotonic()
        runner.stop()
        assert 0.9 < time.monotonic() - start_s < 30
        release.set()
    assert runner.left(1) == [b"x"]
