"""Four questions about level topics, each answered with a command (docs/lifecycle.md).

Who creates one, and how long does it keep data? What happens when the business topic is deleted?
What happens with too many partitions? Can it grow later?
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from click.testing import Result

from delaylevel import topics
from delaylevel.errors import LevelTopicError
from delaylevel.model.level_topic import SUBSCRIPTION, default_level_topic
from delaylevel.model.strategy import PartitionStrategy
from delaylevel.model.topic_name import TopicName
from support.world import RealWorld

FIVE_MINUTES = PartitionStrategy(partition_by="MINUTE", maximum_delay=timedelta(minutes=5))


@pytest.fixture
def run(invoke: Callable[..., Result]) -> Callable[..., Result]:
    return functools.partial(invoke, "levels")


@pytest.mark.parametrize("by", ["command", "producer"])
def test_creation_and_retention(
    world: RealWorld, run: Callable[..., Result], clock: Any, by: str
) -> None:
    orders = f"persistent://{world.namespace}/orders"
    if by == "command":
        made = run("create", orders, "--unit", "minute", "--max-delay", "5m")
        assert made.exit_code == 0, made.output
    else:
        with pytest.raises(LevelTopicError, match="does not exist"):
            world.client().create_producer(
                orders, enable_delay_level_topic=True, create_level_topic=False
            )
    producer = world.client().create_producer(
        orders, enable_delay_level_topic=True, partition_strategy=FIVE_MINUTES
    )
    description = topics.describe(world.admin, orders)
    producer.send(b"x", deliver_after=timedelta(minutes=2, seconds=30))
    for member in description.members():
        policies = world.admin.topic_policies(member.topic)
        assert (policies.message_ttl_s, policies.delete_while_inactive) == (0, False)
        for stats in world.admin.partitioned_stats(member.topic).values():
            assert stats.subscriptions[SUBSCRIPTION].durable

    # The message stays until it is handed off, and no longer.
    partition = description.name.partition(1)
    moving = world.mover(description, clock)
    assert moving.run_once().total == 0
    assert world.admin.partition_stats(partition).subscriptions[SUBSCRIPTION].backlog_entries == 1
    clock.advance(125_000)
    assert moving.run_once().window == 1
    moving.close()
    assert world.admin.partition_stats(partition).subscriptions[SUBSCRIPTION].backlog_entries == 0
    producer.close()


def test_deletion_of_the_business_topic(
    world: RealWorld, run: Callable[..., Result], clock: Any
) -> None:
    orders = TopicName.parse(f"persistent://{world.namespace}/orders")
    with world.client(clock).create_producer(
        orders.full,
        enable_delay_level_topic=True,
        partition_strategy=FIVE_MINUTES,
        final_window="broker",
    ) as producer:
        for minutes in (2, 4):
            producer.send(b"%d" % minutes, deliver_after=timedelta(minutes=minutes))
    world.admin.delete(orders, force=True)
    description = topics.describe(world.admin, orders.full)

    # The level topic stays, ready messages are held, and the business topic is not recreated.
    moving = world.mover(description, clock)
    clock.advance(125_000)
    assert moving.run_once().held[orders.full] >= 1
    assert not world.admin.topic_exists(orders)

    def orphan() -> Any:
        output = run("orphans", world.namespace, "-o", "jsonl").stdout
        (row,) = [json.loads(line) for line in output.split("\n") if line]
        return row if row["parked"] < 2 else None

    row = world.eventually(orphan, "the acknowledgement of held messages", 60)
    assert (row["missing"], row["entirely"], row["parked"]) == ([orders.full], True, 1)
    assert row["held"] >= 1
    refused = run("delete", orders.full)
    assert refused.exit_code == 1
    moving.close()

    # The recreated topic gets all messages; then the level topic can be deleted.
    world.plain_client.create_producer(orders.full).close()
    answer = run("delete", orders.full, "--drain")
    assert answer.exit_code == 0, answer.output
    assert {item.value for item in world.stored(orders.full)} == {b"2", b"4"}
    assert world.admin.list_partitioned_topics(world.namespace) == []


def test_too_many_partitions_are_refused_and_no_topic_is_created(
    world: RealWorld, run: Callable[..., Result]
) -> None:
    refused = run("create", f"{world.namespace}/orders", "--unit", "hour", "--max-delay", "365d")
    assert refused.exit_code == 2
    assert "needs 8,759 partitions" in refused.stderr
    assert "these levels fit: DAY for 365d, then HOUR for 1d" in refused.stderr
    assert world.admin.list_partitioned_topics(world.namespace) == []


def test_it_grows_later(world: RealWorld, run: Callable[..., Result]) -> None:
    orders = f"persistent://{world.namespace}/orders"
    producer = world.client().create_producer(
        orders, enable_delay_level_topic=True, partition_strategy=FIVE_MINUTES
    )
    producer.send(b"before", deliver_after=timedelta(minutes=5))
    grown = run("expand", orders, "--max-delay", "20m", "-o", "json")
    assert grown.exit_code == 0, grown.output
    assert json.loads(grown.stdout)["partitions"] == 19
    producer._cache._read_s -= 10  # as if the last read were some seconds ago
    producer.send(b"after", deliver_after=timedelta(minutes=20))
    producer.close()
    level_topic = TopicName.parse(default_level_topic(orders))
    places = [world.stored(level_topic.partition(index).full) for index in (3, 18)]
    assert [[item.value for item in found] for found in places] == [[b"before"], [b"after"]]
