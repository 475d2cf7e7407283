"""Tests of the messages that the Spark sync job moves, in one shared session on a real broker."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.position import Position
from delaylevel.model.strategy import Levels, PartitionStrategy
from support.world import RealWorld

HOUR_MS = 3_600_000


BRIEF = Levels(
    PartitionStrategy(
        partition_by=timedelta(milliseconds=200), maximum_delay=timedelta(milliseconds=800)
    )
)


def overdue(description: LevelTopicDescription, eventually: Callable[..., Any]) -> None:
    """Wait until every message parked in a brief level is overdue."""
    ready_ms = SystemClock().now_ms() + 1000
    eventually(lambda: SystemClock().now_ms() > ready_ms, "the due time")


pytestmark = [pytest.mark.spark, pytest.mark.broker]


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
