"""Tests of the messages that the Spark sync job moves, in one shared session on a real broker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from delaylevel import topics
from delaylevel.model.level_topic import SUBSCRIPTION
from delaylevel.model.strategy import Levels, PartitionStrategy
from support.world import RealWorld

pytestmark = [pytest.mark.spark, pytest.mark.broker]

BRIEF = Levels(
    PartitionStrategy(
        partition_by=timedelta(milliseconds=200), maximum_delay=timedelta(milliseconds=800)
    )
)


def test_once_leaves_messages_that_are_not_ready(
    world: RealWorld, spark_once: Callable[..., list[Any]]
) -> None:
    description = world.level_topic(
        Levels(PartitionStrategy(partition_by=timedelta(hours=1), maximum_delay=timedelta(hours=3)))
    )
    orders = description.targets[0]
    with world.producer(orders) as producer:
        producer.send(b"x", deliver_after=timedelta(hours=1))
    spark_once(description)
    spark_once(description)
    assert world.stored(orders) == []
    partition = description.name.partition(0)

    def left() -> tuple[int, object]:
        subscription = world.admin.partition_stats(partition).subscriptions[SUBSCRIPTION]
        return subscription.backlog_entries, subscription.consumers

    world.eventually(lambda: left() == (1, ()), "the end of the job's consumers")


def test_targets_that_were_added_just_now_get_their_messages(
    world: RealWorld, spark_job: Callable[..., Any]
) -> None:
    """A job that reads the description too rarely takes their messages for dead."""
    description = world.level_topic(BRIEF)
    names = [world.topic(f"added-{number}") for number in range(10)]
    client = world.client()
    for name in names:
        world.plain_client.create_producer(name).close()
    with spark_job(description) as job:
        job.ready()
        for name in names:
            topics.create(world.admin, replace(description, targets=(*description.targets, name)))
            with client.create_producer(
                name, enable_delay_level_topic=True, delay_level_topic=description.topic
            ) as producer:
                for _ in range(7):
                    producer.send_async(b"x", None, deliver_after=timedelta(milliseconds=500))
        dead = description.dead_letter_topic.full

        def arrived() -> int:
            return sum(len(world.stored(name)) for name in names)

        world.eventually(lambda: arrived() + len(world.stored(dead)) >= 70, "all messages")
        assert (arrived(), world.stored(dead)) == (70, [])
