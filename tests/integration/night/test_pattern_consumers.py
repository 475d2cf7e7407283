"""Tests of consumers that subscribe to all topics whose names match a pattern."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pulsar
import pytest
from click.testing import Result

from delaylevel import DelayLevelClient, PartitionBy, PartitionStrategy, topics
from delaylevel.cluster.connection.settings import Connection
from delaylevel.doctor import State, examine
from delaylevel.errors import LevelTopicError
from delaylevel.model.level_topic import LevelTopicDescription, Role, default_level_topic
from delaylevel.model.strategy import Levels
from delaylevel.testing.embedded import own_namespace
from delaylevel.topics.lifecycle import delete
from delaylevel.topics.status import status
from support.world import QUIET, RealWorld

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


@pytest.mark.parametrize("pattern", ["orders-.*", "orders.*", ".*-eu", "[^_].*", r"\w+-eu"])
def test_new_level_topic_is_out_of_reach_of_patterns_for_business_topics(
    world: RealWorld, pattern: str
) -> None:
    description = _park(world)
    assert description.topic == world.topic("_orders-eu-delay-level")
    assert _received(world, pattern, 1) == {b"now"}
    assert _topics_with(world, description) == set()


def test_a_level_topic_with_the_other_default_name_is_within_reach_and_used(
    world: RealWorld,
) -> None:
    earlier = world.topic("orders-eu-delay-level")
    description = _park(world, delay_level_topic=earlier)
    assert _received(world, "orders-.*", 3) == {b"now", b"soon", b"later"}
    every = {"level", "held", "dead-letter", "window", "journal", "outcomes"}
    assert _topics_with(world, description) == every
    # Without a name, producers and commands find it.
    assert _park(world) == description
    assert topics.find(world.admin, world.topic("_orders-eu-delay-level")) is None
    assert len(world.stored(earlier)) == 2


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


def test_without_admin_access_the_level_topic_is_found_by_its_partition_counts(
    world: RealWorld, connection: Connection, levels_namespace: str
) -> None:
    client = DelayLevelClient(connection.service_url, logger=QUIET)

    def level_topic_of(name: str, **options: Any) -> str:
        producer = client.create_producer(
            world.topic(name), enable_delay_level_topic=True, partition_strategy=HOURS, **options
        )
        producer.send(b"later", deliver_after=timedelta(hours=2))
        producer.close()
        found = [item.topic for item in topics.list_level_topics(world.admin, world.namespace)]
        found += [item.topic for item in topics.list_level_topics(world.admin, levels_namespace)]
        (used,) = [topic for topic in found if world.stored(topic)]
        delete(world.plain_client, world.admin, topics.describe(world.admin, used), discard=1)
        return used

    def create(name: str, level_topic: str) -> None:
        topics.create(
            world.admin, LevelTopicDescription(level_topic, Levels(HOURS), (world.topic(name),))
        )

    try:
        create("a", world.topic("a-delay-level"))
        assert level_topic_of("a") == world.topic("a-delay-level")
        create("a", world.topic("_a-delay-level"))
        assert level_topic_of("a") == world.topic("_a-delay-level")
        own = default_level_topic(world.topic("a"), levels_namespace)
        with pytest.raises(LevelTopicError, match=f"--level-namespace {levels_namespace}`"):
            level_topic_of("a", delay_level_namespace=levels_namespace)
        create("a", own)
        assert level_topic_of("a", delay_level_namespace=levels_namespace) == own
        create("a", world.topic("a-delay-level"))
        create("a", world.topic("_a-delay-level"))
        with pytest.raises(LevelTopicError, match="name it"):
            level_topic_of("a")
        with pytest.raises(LevelTopicError, match="acme/nowhere"):
            level_topic_of("a", delay_level_namespace="acme/nowhere")
    finally:
        client.close()


# -- subscriptions that such consumers leave behind


@pytest.fixture
def matched(world: RealWorld) -> LevelTopicDescription:
    """A level topic whose name has no underscore, with the subscriptions of a pattern consumer."""
    description = _park(world, delay_level_topic=world.topic("orders-eu-delay-level"))
    _received(world, "orders-.*", 1)
    return description


def test_subscriptions_of_others_are_named_with_the_command_that_removes_them(
    world: RealWorld, connection: Connection, invoke: Callable[..., Result], matched: Any
) -> None:
    reader = world.plain_client.create_reader(
        matched.window_topic.partition(0).full, pulsar.MessageId.earliest
    )
    listed = status(world.admin, matched, 0).foreign
    durable = [item for item in listed if item.durable]
    assert {item.name for item in durable} == {PATTERN}
    # Applications may read the outcomes topic; this level topic does not have one.
    assert {item.role for item in durable} == set(Role) - {Role.OUTCOMES}
    (of_reader,) = [item for item in listed if not item.durable]
    assert of_reader.topic == matched.window_topic
    assert of_reader.consumers

    (finding,) = [
        item for item in examine(connection, matched.topic) if item.check == "foreign subscriptions"
    ]
    assert finding.state is State.FAILED
    assert f"subscription {PATTERN} of {matched.topic} is not ours" in finding.says
    assert len(finding.outcome.problems) == len(listed)
    described = invoke("levels", "describe", matched.topic, "-o", "json")
    assert f"subscription {PATTERN} of {matched.topic} is not ours" in described.stdout
    reader.close()
