"""Tests of the deployed Function: a deletion keeps what is parked, the broker's index is small."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cluster.connection.settings import Connection
from delaylevel.errors import LevelTopicError
from delaylevel.functions import deployment, health
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription, Mover
from delaylevel.model.strategy import Levels, PartitionStrategy
from support.world import RealWorld


@pytest.fixture
def connection(private_broker: Callable[..., EmbeddedBroker]) -> Connection:
    return private_broker(functions=True, heap_mb=400).connection


def test_delete_keeps_parked_messages_and_a_new_deployment_moves_them(
    description: LevelTopicDescription,
    producer: Any,
    deployed: Callable[..., Any],
    world: RealWorld,
    connection: Connection,
) -> None:
    get = world.arrivals(description.targets[0])
    made = deployed(description)
    assert not made.updated
    producer.send(b"first", deliver_after=timedelta(seconds=1.5))
    get(1, 60)
    world.drained(description)  # acknowledgement follows arrival
    for number in range(20):
        producer.send(b"%d" % number, deliver_after=timedelta(seconds=8))
    deployment.delete(connection, description)
    # No mover runs, so these stay whatever their due times.
    for number in range(20, 40):
        producer.send(b"%d" % number, deliver_after=timedelta(seconds=4))
    assert world.backlog(description) >= 20
    for member in description.members():
        assert SUBSCRIPTION in world.admin.subscriptions(member.topic.partition(0))
    with pytest.raises(LevelTopicError, match="is not deployed"):
        deployment.delete(connection, description)
    with pytest.raises(LevelTopicError, match="is not deployed"):
        health.status(connection, world.admin, description, 0)
    assert not deployed(description).updated
    again = deployed(description, parallelism=2)
    assert again.updated
    found = get(40, 120)  # an instance that fails at its start is restarted after 30 s
    assert {item.message.data() for item in found} == {b"%d" % n for n in range(40)}
    at = health.status(connection, world.admin, description, SystemClock().now_ms())
    assert len(at.instances) == 2


@pytest.mark.timeout(600)
def test_the_brokers_index_of_a_partition_stays_small(
    world: RealWorld,
    deployed: Callable[..., Any],
    parked: Callable[..., dict[str, str]],
) -> None:
    """200,000 pending messages in one partition need fewer than 60,000 entries of the index."""
    pending = 200_000
    levels = Levels([PartitionStrategy(maximum_delay=timedelta(days=2))])
    description = world.level_topic(levels, mover=Mover.FUNCTION)
    (orders,) = description.targets
    deployed(description)
    partition = description.level_topic(0).partition(0)

    def subscription() -> Any:
        return world.rest.get(f"{partition.rest_path}/stats")["subscriptions"][SUBSCRIPTION]

    world.eventually(lambda: subscription()["consumers"], "the Function", 60)
    # The engine takes over with the first message, so that one is ready.
    level = world.plain_client.create_producer(partition.full)
    level.send(b"first", properties=parked(int(time.time() * 1000)))
    world.eventually(lambda: world.stored(orders), "the first message", 60)
    outcomes: dict[Any, Any] = {}
    producer = world.producer(
        orders, partition_strategy=levels, block_if_queue_full=True, max_pending_messages=5000
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
