"""Tests of the expansion of a level topic while the Spark job runs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.topics import lifecycle
from delaylevel.topics.lifecycle import longer_levels
from support.world import RealWorld

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.timeout(300)]

UNIT = timedelta(seconds=4)
LEVELS = Levels(PartitionStrategy(partition_by=UNIT, maximum_delay=3 * UNIT))


@pytest.mark.parametrize("overflow", ["reject", "recirculate"])
def test_a_running_job_moves_messages_of_new_partitions(
    world: RealWorld, spark_job: Callable[..., Any], overflow: str
) -> None:
    strategy = LEVELS.strategies[0].model_copy(update={"overflow": overflow})
    levels = Levels(strategy)
    description = world.level_topic(levels)
    get = world.arrivals(description.targets[0])
    producer = world.client().create_producer(
        description.targets[0], enable_delay_level_topic=True, partition_strategy=levels.strategies
    )
    sent = []

    def send(number: int, units: float) -> None:
        body = f"{number}".encode()
        producer.send(body, deliver_after=UNIT * units)
        sent.append(body)

    with spark_job(description) as job:
        job.ready()
        for number in range(20):
            send(number, 1 + number % 2 + (3 if overflow == "recirculate" and number > 15 else 0))
        expanded = lifecycle.expand(world.admin, description.topic, longer_levels(levels, 6 * UNIT))
        if overflow == "recirculate":
            producer._cache._refresh_once()  # it also refreshes every minute
        for number in range(20, 40):
            send(number, 1 + number % 5)
        assert producer.description == expanded
        found = get(len(sent), 90)
        world.drained(expanded)
    producer.close()
    assert sorted(item.message.data() for item in found) == sorted(sent)
    assert all(item.late_ms > -1100 for item in found)
