"""A level topic that is expanded while the Spark job runs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from delaylevel.cluster.admin import Admin
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.producer.client import DelayLevelClient
from delaylevel.topics import lifecycle
from delaylevel.topics.lifecycle import longer_levels

pytestmark = [pytest.mark.broker, pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(300)]

UNIT = timedelta(seconds=4)
LEVELS = Levels(PartitionStrategy(partition_by=UNIT, maximum_delay=3 * UNIT))


@pytest.mark.parametrize("overflow", ["reject", "recirculate"])
def test_a_running_job_moves_what_is_in_new_partitions(
    admin: Admin,
    level_topic: Callable[..., LevelTopicDescription],
    dl_client: Callable[..., DelayLevelClient],
    spark_job: Callable[..., Any],
    receive: Callable[..., Any],
    drained: Callable[[LevelTopicDescription], None],
    overflow: str,
) -> None:
    strategy = LEVELS.strategies[0].model_copy(update={"overflow": overflow})
    levels = Levels(strategy)
    description = level_topic(levels)
    get = receive(description.targets[0])
    producer = dl_client().create_producer(
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
        expanded = lifecycle.expand(admin, description.topic, longer_levels(levels, 6 * UNIT))
        if overflow == "recirculate":
            producer._follower._look_once()  # as it does every minute; it is never refused
        for number in range(20, 40):
            send(number, 1 + number % 5)
        assert producer.description == expanded
        found = get(len(sent), 90)
        drained(expanded)
    producer.close()
    assert sorted(item.message.data() for item in found) == sorted(sent)
    assert all(item.late_ms > -1100 for item in found)
