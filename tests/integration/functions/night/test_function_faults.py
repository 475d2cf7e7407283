"""Tests with 20,000 messages over two levels: no fault loses a message."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.http import Rest
from delaylevel.errors import BrokerError, DelayLevelError
from delaylevel.functions import deployment, health
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription, Mover
from delaylevel.model.strategy import Levels, PartitionStrategy
from support.world import RealWorld

MESSAGES = 20_000
TWO_LEVELS = Levels(
    [
        PartitionStrategy(partition_by=timedelta(seconds=12), maximum_delay=timedelta(seconds=60)),
        PartitionStrategy(partition_by=timedelta(seconds=3), maximum_delay=timedelta(seconds=18)),
    ]
)


@pytest.fixture
def own_broker(
    private_broker: Callable[..., EmbeddedBroker],
) -> EmbeddedBroker:
    return private_broker({}, functions=True, heap_mb=400)


@pytest.fixture
def connection(own_broker: EmbeddedBroker) -> Connection:
    return own_broker.connection


def publish(client: Any, description: LevelTopicDescription, first_ms: int, spread_ms: int) -> None:
    """Publish all messages, due in mixed order within ``spread_ms`` from ``first_ms`` on."""
    outcomes: dict[Any, Any] = {}
    with contextlib.closing(
        client.create_producer(
            description.targets[0],
            enable_delay_level_topic=True,
            partition_strategy=description.levels,
            block_if_queue_full=True,
            send_timeout_millis=120_000,  # a busy machine must not fail the test
        )
    ) as producer:
        for number in range(MESSAGES):
            producer.send_async(
                b"%d" % number,
                outcomes.setdefault,
                partition_key=f"key-{number % 97}",
                deliver_after=timedelta(milliseconds=first_ms + number * 7919 % spread_ms),
            )
        producer.flush()
    assert list(outcomes) == [pulsar.Result.Ok], outcomes.keys()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", ["none", "kill", "restart", "broker"])
def test_nothing_is_lost(
    fault: str,
    own_broker: EmbeddedBroker,
    world: RealWorld,
    deployed: Callable[..., Any],
    collector: Callable[[str], Any],
    pids: Callable[..., list[int]],
    kill: Callable[[int], None],
    connection: Connection,
) -> None:
    description = world.level_topic(TWO_LEVELS, mover=Mover.FUNCTION)
    made = deployed(description)
    orphans: list[int] = []
    got = collector(description.targets[0])
    # For a crash, most messages are due at once, so that many are in flight at that moment.
    crash = fault in ("kill", "broker")
    publish(world.client(), description, *((14_000, 6_000) if crash else (4_000, 46_000)))
    world.eventually(lambda: len(got.ids) > MESSAGES // 5, "a fifth of the messages", 90)
    if fault == "kill":
        (pid,) = pids(made.function, own_broker)
        kill(pid)
    elif fault == "restart":
        deployment.restart(connection, made.function)
    elif fault == "broker":
        orphans = pids(made.function, own_broker)
        own_broker.kill()
        own_broker.start()
        _restart_when_ready(connection, made.function)
    try:
        world.eventually(lambda: len(got.ids) == MESSAGES, "all messages", 240)
    finally:
        print(f"{fault}: {len(got.ids):,} of {MESSAGES:,}, {got.duplicates:,} duplicates")
        with contextlib.suppress(DelayLevelError):
            lines = deployment.log_lines(
                world.plain_client, world.admin, deployment.log_topic(description)
            )
            print("\n".join(lines))
            at = health.status(connection, world.admin, description, made.function, 0)
            print([(item.counts, item.late_ms) for item in at.instances])
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                kill(pid)
    world.drained(description)
    got.check_identities()
    written = [item.value for item in world.stored(description.targets[0])]
    print(f"{fault}: {len(written):,} written, {len(set(written)):,} different")
    if fault == "none":
        assert len(written) == MESSAGES
        assert got.duplicates == 0


def _restart_when_ready(connection: Connection, function: str) -> None:
    """Restart a function; a worker that has just started may not know its functions yet."""
    deadline = time.monotonic() + 60
    while True:
        try:
            deployment.restart(connection, function)
            return
        except BrokerError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


@pytest.mark.timeout(600)
def test_the_brokers_index_of_a_partition_stays_small(
    world: RealWorld,
    deployed: Callable[..., Any],
    connection: Connection,
    collector: Callable[[str], Any],
    parked: Callable[..., dict[str, str]],
) -> None:
    """200,000 pending messages in one partition need fewer than 60,000 entries of the index."""
    pending = 200_000
    levels = Levels([PartitionStrategy(maximum_delay=timedelta(days=2))])
    description = world.level_topic(levels, mover=Mover.FUNCTION)
    got = collector(description.targets[0])
    deployed(description)
    rest = Rest(connection.admin_url)
    partition = description.level_topic(0).partition(0)

    def subscription() -> Any:
        return rest.get(f"{partition.rest_path}/stats")["subscriptions"][SUBSCRIPTION]

    world.eventually(lambda: subscription()["consumers"], "the Function", 60)
    # The engine takes over with the first message, so that one is ready.
    level = world.plain_client.create_producer(partition.full)
    level.send(b"first", properties=parked(int(time.time() * 1000)))
    world.eventually(lambda: got.ids, "the first message", 60)
    outcomes: dict[Any, Any] = {}
    producer = world.client().create_producer(
        description.targets[0],
        enable_delay_level_topic=True,
        partition_strategy=levels,
        block_if_queue_full=True,
        max_pending_messages=5000,
    )
    for number in range(pending):
        producer.send_async(b"%d" % number, outcomes.setdefault, deliver_after=timedelta(hours=30))
    producer.flush()
    assert list(outcomes) == [pulsar.Result.Ok]
    at = world.eventually(
        lambda: (now := subscription())["msgBacklog"] >= pending and now, "the backlog", 60
    )
    print(f"{at['msgBacklog']:,} pending, {at['msgDelayed']:,} in the index")
    assert 0 < at["msgDelayed"] < 60_000
