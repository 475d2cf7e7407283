"""Tests of consumers that subscribe to all topics whose names match a pattern."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pulsar
import pytest
from click.testing import Result

from delaylevel import PartitionBy, PartitionStrategy, topics
from delaylevel.cluster.connection.settings import Connection
from delaylevel.doctor import State, examine
from delaylevel.model.level_topic import LevelTopicDescription, Role
from delaylevel.testing.embedded import own_namespace
from delaylevel.topics.status import status
from support.world import RealWorld

HOURS = PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=3))
PATTERN = "by-pattern"


def _park(world: RealWorld, **options: Any) -> LevelTopicDescription:
    """Send one message now and one in two hours to ``orders-eu``; return its level topic."""
    orders = world.topic("orders-eu")
    producer = world.client().create_producer(
        orders, enable_delay_level_topic=True, partition_strategy=HOURS, **options
    )
    producer.send(b"now")
    producer.send(b"later", deliver_after=timedelta(hours=2))
    producer.send(b"soon", deliver_after=timedelta(minutes=30))  # into the window topic
    producer.close()
    return topics.describe(world.admin, orders, search=True)


def _received(world: RealWorld, pattern: str, awaited: int) -> set[bytes]:
    """Return what a new consumer of a pattern receives, after a number of messages arrived."""
    consumer = world.plain_client.subscribe(
        re.compile(f"persistent://{world.namespace}/{pattern}"),
        PATTERN,
        consumer_type=pulsar.ConsumerType.Shared,
        initial_position=pulsar.InitialPosition.Earliest,
    )
    try:
        return set(world.bodies(consumer, awaited))
    finally:
        consumer.close()


def _topics_with(world: RealWorld, description: LevelTopicDescription) -> set[str]:
    """Return the roles of the member topics that have the pattern consumer's subscription."""
    return {
        member.role.value
        for member in description.members()
        for stats in world.admin.partitioned_stats(member.topic).values()
        if PATTERN in stats.subscriptions
    }


@pytest.mark.parametrize("pattern", ["orders.*", ".*-eu", "[^_].*", r"\w+-eu"])
def test_new_level_topic_is_out_of_reach_of_patterns_for_business_topics(
    world: RealWorld, pattern: str
) -> None:
    description = _park(world)
    assert description.topic == world.topic("_orders-eu-delay-level")
    assert _received(world, pattern, 1) == {b"now"}
    assert _topics_with(world, description) == set()


@pytest.fixture
def levels_namespace(connection: Connection) -> Iterator[str]:
    with own_namespace(connection) as name:
        yield name


def test_namespace_of_its_own_is_out_of_reach_of_every_pattern(
    world: RealWorld, levels_namespace: str
) -> None:
    description = _park(world, delay_level_namespace=levels_namespace)
    assert description.name.namespace_path == levels_namespace
    assert _received(world, ".*", 1) == {b"now"}
    assert _topics_with(world, description) == set()
    assert topics.describe(world.admin, world.topic("orders-eu"), search=True) == description


# -- subscriptions that such consumers leave behind


def test_subscriptions_of_others_are_named_with_the_command_that_removes_them(
    world: RealWorld, connection: Connection, invoke: Callable[..., Result]
) -> None:
    """The name of the level topic has no underscore, so that a pattern matches it."""
    name = world.topic("orders-eu-delay-level")
    matched = _park(world, delay_level_topic=name)
    assert _received(world, "orders-.*", 3) == {b"now", b"soon", b"later"}
    # Without a name, producers and commands find it.
    assert _park(world) == matched
    reader = world.plain_client.create_reader(
        matched.window_topic.partition(0).full, pulsar.MessageId.earliest
    )
    listed = status(world.admin, matched, 0).foreign
    durable = [item for item in listed if item.durable]
    assert {item.name for item in durable} == {PATTERN}
    # Applications may read the outcomes topic.
    assert {item.role for item in durable} == set(Role) - {Role.OUTCOMES}
    (of_reader,) = [item for item in listed if not item.durable]
    assert of_reader.topic == matched.window_topic
    assert of_reader.consumers

    (finding,) = [
        item for item in examine(connection, matched.topic) if item.check == "foreign subscriptions"
    ]
    assert finding.state is State.FAILED
    assert f"subscription {PATTERN} of {matched.topic} is not ours" in finding.says
    assert len(finding.problems) == len(listed)
    described = invoke("levels", "describe", matched.topic, "-o", "json")
    assert f"subscription {PATTERN} of {matched.topic} is not ours" in described.stdout
    reader.close()
