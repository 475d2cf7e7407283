"""Tests of the Spark sync job on a real broker, in one shared session."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pulsar
import pytest

pytest.importorskip("pyspark")

from delaylevel import topics
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.port import AcknowledgedRange
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow, Role
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.spark_sync import DelayLevelDataSource, connection_options, pending
from delaylevel.spark_sync.arrow_rows import SCHEMA
from support.world import HOURS, Arrival, RealWorld

pytestmark = [pytest.mark.spark, pytest.mark.broker]

BRIEF = Levels(
    PartitionStrategy(
        partition_by=timedelta(milliseconds=200), maximum_delay=timedelta(milliseconds=800)
    )
)


def test_once_leaves_messages_that_are_not_ready(
    world: RealWorld, spark_once: Callable[..., list[Any]]
) -> None:
    description = world.level_topic(HOURS)
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


SECOND, MINUTE = 1000, 60_000


def moment(time_ms: int) -> datetime:
    return datetime.fromtimestamp(time_ms / 1000, timezone.utc)


def test_all_that_waits_and_nothing_that_is_done_with(
    spark: Any, connection: Connection, world: RealWorld
) -> None:
    description = world.level_topic(HOURS, final_window=FinalWindow.TRACKER)
    orders = description.targets[0]
    now_ms = SystemClock().now_ms()
    due = {f"soon-{n}": now_ms + SECOND for n in range(100)}
    due |= {f"near-{n}": now_ms + 30 * MINUTE + n for n in range(200)}
    due |= {f"far-{n}": now_ms + 150 * MINUTE + n for n in range(300)}
    with (
        world.serving(description),
        world.producer(orders) as producer,
    ):
        rows = spark.createDataFrame(
            [(name, moment(due_ms), "x" * 9) for name, due_ms in due.items()],
            "id string, due timestamp, value string",
        )
        spark.dataSource.register(DelayLevelDataSource)
        (
            rows.write.format("delaylevel")
            .options(target=orders, **connection_options(connection))
            .mode("append")
            .save()
        )
        world.eventually(lambda: len(world.stored(orders)) == 100, "the release of the first ones")
        decided = producer.cancel(message_id="near-7", deliver_at=due["near-7"], timeout=30)
        assert decided.status.value == "cancelled"
        producer.cancel(message_id="far-7", deliver_at=due["far-7"])
        frame = pending(spark, connection, orders)
        rows = frame.collect()
        in_window = frame.filter("role = 'window'").count()
        window = {"due_from": moment(due["far-10"]), "due_before": moment(due["far-20"])}
        some = pending(spark, connection, orders, **window).select("id").collect()
    assert Counter(row["id"].split("-")[0] for row in rows) == {"near": 199, "far": 299}
    assert not {"near-7", "far-7"} & {row["id"] for row in rows}
    assert {row["id"]: round(row["due"].timestamp() * 1000) for row in rows}.items() <= due.items()
    assert in_window == 199
    assert {row["id"] for row in some} == {f"far-{n}" for n in range(10, 20)}
    assert frame.schema == SCHEMA
    for row in rows:
        assert (row["size"], bytes(row["value"]), row["target"]) == (9, b"x" * 9, orders)
        assert row["level_topic"] == description.topic
        assert row["topic"].endswith(f"-partition-{row['partition']}")
        if row["id"].startswith("near"):
            assert row["place"] in ("window 0", "window 1")
            assert row["role"] == "window"
        else:
            assert (row["place"], row["role"]) == ("HOUR 1", "level")
    # The read has left no trace: no acknowledgement, and no consumer on a subscription.
    for topic in {row["topic"] for row in rows if row["role"] == "level"}:
        stats = world.admin.partition_stats(TopicName.parse(topic)).subscriptions
        assert stats.keys() == {SUBSCRIPTION}
        assert stats[SUBSCRIPTION].backlog_entries > 0
        assert not stats[SUBSCRIPTION].consumers
