"""Tests of the messages that the Spark sync job moves, in one shared session on a real broker."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from delaylevel.model.clock import SystemClock
from delaylevel.model.position import Position
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from support.spark_levels import BRIEF, HOUR_MS, overdue
from support.world import RealWorld

pytestmark = [pytest.mark.spark, pytest.mark.broker]


HOURS = Levels(
    [
        PartitionStrategy(
            partition_by=timedelta(hours=6),
            maximum_delay=timedelta(hours=24),
            overflow="recirculate",
        ),
        PartitionStrategy(partition_by=timedelta(hours=1), maximum_delay=timedelta(hours=6)),
    ]
)


def test_messages_far_from_due_are_parked_again(
    world: RealWorld,
    skewed: Callable[..., None],
    parked: Callable[..., dict[str, str]],
    spark_once: Callable[..., None],
) -> None:
    """Messages stamped long ago go to the first level again, to a finer one or to the target."""
    description = world.level_topic(HOURS)
    coarse, fine = (description.level_topic(level) for level in range(2))
    now_ms = SystemClock().now_ms()
    for value, hours in ((b"20", 20), (b"10", 10), (b"4", 4), (b"0.5", 0.5), (b"-1", -1)):
        due_ms = now_ms + int(hours * HOUR_MS)
        skewed(coarse.partition(0).full, -24 * HOUR_MS, value, parked(due_ms))
    spark_once(description)

    def again(topic: TopicName) -> list[bytes | None]:
        return [m.value for m in world.stored(topic.full) if "delaylevel.id" in m.properties]

    assert [again(coarse.partition(k)) for k in range(3)] == [[b"10"], [], [b"20"]]
    assert [again(fine.partition(k)) for k in range(5)] == [[], [], [b"4"], [], []]
    assert [m.value for m in world.stored(description.targets[0])] == [b"0.5", b"-1"]
    assert world.backlog(description) == 3


def test_earliest_moves_acknowledged_messages_again(
    world: RealWorld, spark_once: Callable[..., None], tmp_path: Any
) -> None:
    """Reading from the earliest offset makes duplicates with the same ID, and only on request."""
    description = world.level_topic(BRIEF)
    orders = description.targets[0]
    with world.client().create_producer(orders, enable_delay_level_topic=True) as producer:
        for number in range(20):
            producer.send(b"%d" % number, deliver_after=timedelta(milliseconds=400))
    overdue(description, world.eventually)
    spark_once(description)
    world.drained(description)
    spark_once(description, checkpoint=str(tmp_path / "second"))
    assert len(world.stored(orders)) == 20
    spark_once(
        description, checkpoint=str(tmp_path / "third"), options={"startingOffsets": "earliest"}
    )
    found = world.stored(orders)
    assert len(found) == 40
    assert len({m.properties["delaylevel.id"] for m in found}) == 20


def test_a_late_trigger(world: RealWorld, spark_once: Callable[..., None]) -> None:
    """One job for two level topics with several targets starts when all messages are overdue."""
    first = world.level_topic(BRIEF, ("orders", "invoices"))
    second = world.level_topic(BRIEF, ("letters",))
    client = world.client()
    for description in (first, second):
        for target in description.targets:
            with client.create_producer(
                target, enable_delay_level_topic=True, delay_level_topic=description.topic
            ) as producer:
                for number in range(200):
                    producer.send_async(
                        b"%d" % number,
                        None,
                        deliver_after=timedelta(milliseconds=300 + number % 400),
                    )
    overdue(first, world.eventually)
    spark_once(first, second)
    for description in (first, second):
        world.drained(description)
        for target in description.targets:
            # Delivered at once as a plain message, which every type of subscription gets.
            arrivals = world.arrivals(target)(200)
            assert sorted(int(a.message.data()) for a in arrivals) == list(range(200))
            assert min(a.late_ms for a in arrivals) > 0
            assert len(world.stored(target)) == 200


@pytest.mark.parametrize("at", [20, 49])
def test_a_start_in_the_middle_of_a_batch(
    at: int,
    world: RealWorld,
    parked: Callable[..., dict[str, str]],
    spark_once: Callable[..., None],
) -> None:
    description = world.level_topic(BRIEF)
    topic = description.name.partition(1).full
    producer = world.plain_client.create_producer(
        topic,
        batching_enabled=True,
        batching_max_messages=50,
        batching_max_publish_delay_ms=10_000,
    )
    due_ms = SystemClock().now_ms()
    for number in range(100):
        producer.send_async(b"%d" % number, None, parked(due_ms))
    producer.flush()
    entries = world.stored(topic)
    assert sorted({(m.entry, m.batch) for m in entries}) == [
        (e, b) for e in (0, 1) for b in range(50)
    ]
    overdue(description, world.eventually)

    start = Position(entries[0].ledger, 0, at)
    spark_once(description, options={"startingOffsets": json.dumps({topic: str(start)})})
    # Exactly the rest of the batch, and the messages after it.
    moved = [int(m.value or b"") for m in world.stored(description.targets[0])]
    assert moved == list(range(at, 100))
    world.drained(description)
