"""A test of the broker's index of delayed messages while the Function moves them."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cluster.connection.settings import Connection
from delaylevel.model.level_topic import SUBSCRIPTION, Mover
from delaylevel.model.strategy import Levels, PartitionStrategy
from support.world import RealWorld


@pytest.fixture
def own_broker(
    private_broker: Callable[..., EmbeddedBroker],
) -> EmbeddedBroker:
    return private_broker({}, functions=True, heap_mb=400)


@pytest.fixture
def connection(own_broker: EmbeddedBroker) -> Connection:
    return own_broker.connection


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
