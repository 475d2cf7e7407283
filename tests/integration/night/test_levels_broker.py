"""Tests of level topics where others delete, expire or subscribe to as much as they can."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel import topics
from delaylevel.model.level_topic import Role
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.topics.status import status
from support.world import HOURS, RealWorld

MINUTES = Levels(PartitionStrategy(partition_by="MINUTE", maximum_delay=timedelta(minutes=5)))
EVERYTHING_EATS = {
    "brokerDeleteInactiveTopicsFrequencySeconds": 1,
    "brokerDeleteInactiveTopicsMaxInactiveDurationSeconds": 1,
    "brokerDeleteInactiveTopicsMode": "delete_when_subscriptions_caught_up",
    "messageExpiryCheckIntervalInMinutes": 1,
}


def test_parked_messages_survive_ttl_and_the_deletion_of_inactive_topics(
    broker_with: Callable[..., Any],
) -> None:
    namespace = "public/default"
    with ExitStack() as stack:
        world = RealWorld(broker_with(EVERYTHING_EATS).connection, stack, namespace)
        admin = world.admin
        world.set_policy("messageTTL", 1)
        wanted = world.level_topic(MINUTES)
        control, idle = world.name("control"), world.name("idle")
        for topic in (control, idle):
            admin.create_partitioned(topic, 1)
            admin.create_subscription(topic, "s")
        for topic in (control.partition(0), wanted.name.partition(0)):
            world.plain_client.create_producer(topic.full).send(b"x")

        def expired() -> bool:
            if not admin.topic_exists(control.partition(0)):
                return True
            stats = admin.partition_stats(control.partition(0))
            return not stats.subscriptions["s"].backlog_entries

        # The empty topic is deleted with its subscription, and the other topic's message expires.
        world.eventually(lambda: not admin.topic_exists(idle.partition(0)), "the deletion")
        world.eventually(expired, "the expiry", 100)
        at = status(admin, wanted, 0)
        assert at.problems == ()
        assert at.entries(Role.LEVEL) == 1


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
