"""Tests of the window topic's writers on a real broker: the wrapper, the Function and Spark."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from delaylevel import topics
from delaylevel.cluster.connection.settings import Connection
from delaylevel.errors import LevelTopicError, UnsupportedOptionError
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Mover
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from delaylevel.producer.client import DelayLevelClient
from support.world import RealWorld, Stored

pytestmark = pytest.mark.broker

HOURS = PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=4))
NEAR = timedelta(minutes=30)
FAR = timedelta(hours=2)


def places(description: LevelTopicDescription, stored: Stored) -> dict[bytes, set[int]]:
    """Return the window partitions that hold each payload."""
    found: dict[bytes, set[int]] = {}
    for index in range(description.window_partitions):
        for message in stored(description.window_topic.partition(index).full):
            found.setdefault(message.value or b"", set()).add(index)
    return found


@pytest.mark.parametrize("mover", list(Mover))
def test_the_wrapper_writes_batches_by_key(world: RealWorld, mover: Mover) -> None:
    orders = f"persistent://{world.namespace}/orders"
    with world.client().create_producer(
        orders,
        enable_delay_level_topic=True,
        partition_strategy=HOURS,
        mover=mover,
        final_window="tracker",
        batching_max_publish_delay_ms=500,
    ) as producer:
        description = producer.description
        for number in range(200):
            producer.send_async(
                b"%d" % number, None, partition_key=f"key-{number % 50}", deliver_after=NEAR
            )
        producer.flush()
        producer.send(b"far", deliver_after=FAR)
        producer.send(b"now")
        producer.send(b"due", deliver_at=SystemClock().now_ms())
        with pytest.raises(UnsupportedOptionError, match="sequence_id"):
            producer.send(b"", deliver_after=NEAR, sequence_id=7)
        assert producer.is_connected()

    assert places(description, world.stored) == {
        b"%d" % number: {description.window_partition(f"key-{number % 50}", "")}
        for number in range(200)
    }
    window = world.stored(description.window_topic.full)
    assert len(window) == 200
    assert {message.properties["delaylevel.target"] for message in window} == {orders}
    assert all(message.batch >= 0 for message in window)
    assert len({(m.ledger, m.entry) for m in window}) < 100
    assert [message.value for message in world.stored(orders)] == [b"now", b"due"]
    assert [message.value for message in world.stored(description.topic)] == [b"far"]


def test_without_an_admin_url_the_window_is_found_by_its_partitions(
    connection: Connection, world: RealWorld
) -> None:
    orders = f"persistent://{world.namespace}/orders"
    wanted = LevelTopicDescription(
        f"{orders}-delay-level",
        Levels(HOURS),
        (orders,),
        final_window=FinalWindow.TRACKER,
        window_partitions=7,
    )
    topics.create(world.admin, wanted)
    options: dict[str, Any] = {"enable_delay_level_topic": True, "partition_strategy": HOURS}
    client = DelayLevelClient(connection.service_url)
    try:
        with client.create_producer(orders, final_window="tracker", **options) as producer:
            assert producer.description.window_partitions == 7
            for number in range(20):
                producer.send_async(b"%d" % number, None, None, f"{number}", deliver_after=NEAR)
        assert places(wanted, world.stored) == {
            b"%d" % number: {wanted.window_partition(f"{number}", "")} for number in range(20)
        }
        world.admin.delete(wanted.window_topic)
        with pytest.raises(LevelTopicError, match="final_window='broker'"):
            client.create_producer(orders, final_window="tracker", **options)
    finally:
        client.close()
