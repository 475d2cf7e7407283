"""Tests of the level topic cache of a producer."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from delaylevel.errors import DelayTooLongError, UpgradeRequiredError
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from delaylevel.producer.checks import Message
from delaylevel.producer.level_topic_cache import LevelTopicCache
from delaylevel.producer.routing import Routing
from delaylevel.testing import ManualClock, MemoryPulsar
from delaylevel.topics import lifecycle

DAY = timedelta(days=1)
WEEK = PartitionStrategy(partition_by=PartitionBy.DAY, maximum_delay=7 * DAY)


def test_refusals_query_the_broker_at_most_once_a_second() -> None:
    with MemoryPulsar() as memory:
        producer = memory.client().create_producer(
            "orders", enable_delay_level_topic=True, partition_strategy=WEEK
        )
        description = producer.description
        longer = replace(
            description,
            levels=lifecycle.longer_levels(description.levels, 9 * DAY),
            former=(description.levels,),
        )
    now = [0.0]
    queries = []
    known = [description]

    def describe() -> object:
        queries.append(now[0])
        return known[0]

    routing = Routing(description, description.targets[0], None, ManualClock(1_800_000_000_000))
    cache = LevelTopicCache(routing, describe, lambda: now[0])  # type: ignore[arg-type]

    def route() -> int:
        return cache.route(Message(deliver_after=8 * DAY)).partition

    now[0] = 2.0
    for _ in range(3):
        with pytest.raises(DelayTooLongError):
            route()
    assert queries == [2.0]
    known[0] = longer
    now[0] = 2.9
    with pytest.raises(DelayTooLongError):
        route()
    now[0] = 3.1
    assert route() == 7
    assert queries == [2.0, 3.1]
    # Another level topic of the same name is not an expansion.
    hours = Levels(PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(hours=9)))
    known[0] = replace(description, levels=hours)
    now[0] = 5.0
    assert not cache.refresh_after_refusal()
    assert cache.description == longer


def test_a_running_producer_continues_when_the_level_topic_needs_a_later_version(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every version understands ordinary messages; the producer refuses at its next start."""
    with MemoryPulsar() as memory:
        description = (
            memory.client()
            .create_producer("orders", enable_delay_level_topic=True, partition_strategy=WEEK)
            .description
        )

    def describe() -> None:
        raise UpgradeRequiredError("it is described in format 9")

    now = [0.0]
    routing = Routing(description, description.targets[0], None, ManualClock(1_800_000_000_000))
    cache = LevelTopicCache(routing, describe, lambda: now[0])
    cache.check_exists()
    now[0] = 2.0
    assert not cache.refresh_after_refusal()
    assert "format 9" in caplog.text
    assert cache.route(Message(deliver_after=2 * DAY)).partition == 1
