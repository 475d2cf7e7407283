"""Tests of rows that are scheduled, and of all that waits, while a dispatcher releases it."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

pytest.importorskip("pyspark")

from delaylevel.cluster.connection.settings import Connection
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.spark_sync import DelayLevelDataSource, connection_options, pending
from delaylevel.spark_sync.arrow_rows import SCHEMA
from support.world import RealWorld

pytestmark = [pytest.mark.spark, pytest.mark.broker]

SECOND, MINUTE = 1000, 60_000


def moment(time_ms: int) -> datetime:
    return datetime.fromtimestamp(time_ms / 1000, timezone.utc)


def test_all_that_waits_and_nothing_that_is_done_with(
    spark: Any, connection: Connection, world: RealWorld
) -> None:
    description = world.level_topic(
        Levels(PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(hours=4))),
        final_window=FinalWindow.TRACKER,
    )
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
