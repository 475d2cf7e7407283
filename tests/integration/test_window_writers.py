"""Tests of the window topic's writers on a real broker: the wrapper, the Function and Spark."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import delaylevel.producer.aio
from delaylevel import topics
from delaylevel.cluster.connection.settings import Connection
from delaylevel.errors import LevelTopicError, UnsupportedOptionError
from delaylevel.functions.consumer_loop import ConsumerLoop, FunctionSettings
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow, LevelTopicDescription, Mover
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.producer.client import DelayLevelClient
from support.world import RealWorld, Stored

pytestmark = pytest.mark.broker

HOURS = PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=4))
BRIEF = Levels(
    PartitionStrategy(
        partition_by=timedelta(milliseconds=200), maximum_delay=timedelta(milliseconds=800)
    )
)
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


def test_the_asyncio_twin_writes_to_the_window(connection: Connection, world: RealWorld) -> None:
    orders = f"persistent://{world.namespace}/orders"

    async def run() -> LevelTopicDescription:
        client = delaylevel.producer.aio.AsyncDelayLevelClient.from_connection(connection)
        producer = await client.create_producer(
            orders,
            enable_delay_level_topic=True,
            partition_strategy=HOURS,
            final_window="tracker",
        )
        sends = [
            producer.send(b"%d" % number, None, f"{number}", deliver_after=NEAR)
            for number in range(50)
        ]
        await asyncio.gather(
            *sends, producer.send(b"now"), producer.send(b"far", deliver_after=FAR)
        )
        with pytest.raises(UnsupportedOptionError, match="sequence_id"):
            await producer.send(b"", deliver_after=NEAR, sequence_id=7)
        await producer.close()
        await client.close()
        return producer.description

    description = asyncio.run(run())
    assert places(description, world.stored) == {
        b"%d" % number: {description.window_partition(f"{number}", "")} for number in range(50)
    }
    assert [message.value for message in world.stored(orders)] == [b"now"]
    assert [message.value for message in world.stored(description.topic)] == [b"far"]


def test_the_function_writes_to_the_window(
    world: RealWorld, parked: Callable[..., dict[str, str]]
) -> None:
    """The Function's own loop runs without a worker; the target does not exist."""
    description = world.level_topic(BRIEF, final_window=FinalWindow.TRACKER, mover=Mover.FUNCTION)
    target = TopicName.parse(description.targets[0])
    world.admin.delete(target)
    producer = world.plain_client.create_producer(description.name.partition(0).full)
    now_ms = SystemClock().now_ms()
    for number in range(100):
        key = f"key-{number}" if number % 2 else None
        own = {"delaylevel.id": f"id-{number}"}
        producer.send_async(b"%d" % number, None, parked(now_ms - number, **own), key)
    producer.flush()
    held = world.plain_client.create_producer(description.held_topic.partition(0).full)
    tried = {"delaylevel.id": "held", "delaylevel.attempt": "3", "delaylevel.reason": "away"}
    held.send(b"held", parked(now_ms, **tried), "key-0")

    engine = ConsumerLoop(
        world.plain_client,
        world.admin,
        FunctionSettings(description.topic, world.admin.admin_url),
        "a test's",
    )
    engine.start()
    try:
        world.eventually(
            lambda: len(world.stored(description.window_topic.full)) >= 101, "the window", 60
        )
        world.drained(description)
    finally:
        engine.stop()

    expected = {
        b"%d" % number: {
            description.window_partition(f"key-{number}" if number % 2 else "", f"id-{number}")
        }
        for number in range(100)
    }
    expected[b"held"] = {description.window_partition("key-0", "")}
    assert places(description, world.stored) == expected
    window = {
        message.value: message.properties for message in world.stored(description.window_topic.full)
    }
    assert window[b"held"]["delaylevel.attempt"] == "3"
    assert "delaylevel.reason" not in window[b"held"]
    assert not world.admin.topic_exists(target)


@pytest.mark.spark
def test_the_spark_job_writes_to_the_window_and_acknowledges_cumulatively(
    world: RealWorld, parked: Callable[..., dict[str, str]], spark_once: Callable[..., None]
) -> None:
    """Overdue messages go to the window too, by key or ID; the target does not exist."""
    description = world.level_topic(BRIEF, final_window=FinalWindow.TRACKER)
    target = TopicName.parse(description.targets[0])
    world.admin.delete(target)
    producer = world.plain_client.create_producer(
        description.name.partition(0).full, batching_enabled=True
    )
    now_ms = SystemClock().now_ms()
    for number in range(400):
        producer.send_async(
            b"%d" % number,
            None,
            parked(now_ms + number, **{"delaylevel.id": f"id-{number}"}),
            f"key-{number}" if number % 2 else None,
        )
    producer.flush()
    world.eventually(lambda: SystemClock().now_ms() > now_ms + 2000, "the hand-off", 60)

    spark_once(description)
    world.drained(description)

    window = world.stored(description.window_topic.full)
    assert Counter(message.value for message in window) == Counter(
        b"%d" % number for number in range(400)
    )
    assert all(m.properties["delaylevel.id"] == f"id-{int(m.value or b'')}" for m in window)
    for value, indexes in places(description, world.stored).items():
        number = int(value)
        key = f"key-{number}" if number % 2 else ""
        assert indexes == {description.window_partition(key, f"id-{number}")}
    assert not world.admin.topic_exists(target)
    for member in description.members():
        for index in range(member.partitions):
            assert (
                world.admin.acknowledged_ranges(member.topic.partition(index), SUBSCRIPTION) == ()
            )
