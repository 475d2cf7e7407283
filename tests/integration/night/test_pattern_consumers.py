"""A test of consumers that subscribe to all topics whose names match a pattern."""

from __future__ import annotations

import re
from datetime import timedelta

import pulsar
import pytest

from delaylevel import PartitionBy, PartitionStrategy, topics
from support.world import RealWorld

HOURS = PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=3))
PATTERN = "by-pattern"


@pytest.mark.parametrize("pattern", ["orders.*", ".*-eu", "[^_].*", r"\w+-eu"])
def test_new_level_topic_is_out_of_reach_of_patterns_for_business_topics(
    world: RealWorld, pattern: str
) -> None:
    orders = world.topic("orders-eu")
    with world.producer(orders, partition_strategy=HOURS) as producer:
        producer.send(b"now")
        producer.send(b"later", deliver_after=timedelta(hours=2))
        producer.send(b"soon", deliver_after=timedelta(minutes=30))  # into the window topic
    description = topics.describe(world.admin, orders, search=True)
    assert description.topic == world.topic("_orders-eu-delay-level")
    consumer = world.plain_client.subscribe(
        re.compile(f"persistent://{world.namespace}/{pattern}"),
        PATTERN,
        consumer_type=pulsar.ConsumerType.Shared,
        initial_position=pulsar.InitialPosition.Earliest,
    )
    assert world.bodies(consumer, 1) == [b"now"]
    for member in description.members():
        for stats in world.admin.partitioned_stats(member.topic).values():
            assert PATTERN not in stats.subscriptions
    consumer.close()
