"""Tests of levels, window and dispatcher together: acknowledgements follow the topics' order."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel.cluster.port import AcknowledgedRange
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow, Role
from delaylevel.model.strategy import Levels, PartitionStrategy
from support.world import Arrival, RealWorld

pytestmark = [pytest.mark.spark, pytest.mark.broker]

LEVELS = Levels(
    [
        PartitionStrategy(
            partition_by=timedelta(seconds=2),
            maximum_delay=timedelta(seconds=6),
            lead=timedelta(seconds=1),
        ),
        PartitionStrategy(
            partition_by=timedelta(milliseconds=500), maximum_delay=timedelta(seconds=2)
        ),
    ]
)


def test_from_wrapper_to_consumer_without_acknowledgement_holes(
    world: RealWorld, spark_job: Callable[..., Any]
) -> None:
    description = world.level_topic(LEVELS, final_window=FinalWindow.TRACKER)
    orders = description.targets[0]
    get = world.arrivals(orders, consumer_type=pulsar.ConsumerType.Exclusive)
    sources = [
        member.topic.partition(index)
        for member in description.members()
        if member.role in (Role.LEVEL, Role.HELD, Role.WINDOW)
        for index in range(member.partitions)
    ]

    def holes() -> list[AcknowledgedRange]:
        ranges = (world.admin.acknowledged_ranges(source, SUBSCRIPTION) for source in sources)
        return [each for found in ranges for each in found]

    delays = [random.Random(5).randint(0, 6000) for _ in range(600)]
    arrivals: list[Arrival] = []
    with (
        world.serving(description),
        spark_job(description) as job,
        world.producer(orders) as producer,
    ):
        job.ready()
        begin_ms = SystemClock().now_ms()
        for number, delay_ms in enumerate(delays):
            producer.send_async(
                b"%d" % number,
                None,
                deliver_at=begin_ms + delay_ms,
                partition_key=f"key-{number % 7}",
            )
        producer.flush()
        while len(arrivals) < len(delays):
            arrivals += get(10)
            assert holes() == []
        world.drained(description)
        world.drained(description, Role.WINDOW)

    assert sorted(int(a.message.data()) for a in arrivals) == list(range(len(delays)))
    delayed = [a for a in arrivals if "delaylevel.due" in a.message.properties()]
    assert len(delayed) > len(delays) // 2
    assert min(a.late_ms for a in delayed) >= 0
