"""Tests of a user's own DataFrame steps between source and sink, on a real broker."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("pyspark")

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from delaylevel.cli.main import cli
from delaylevel.errors import StepsError
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.spark_sync import SparkSyncJob, job
from delaylevel.spark_sync.arrow_rows import SCHEMA
from delaylevel.spark_sync.steps import dropped
from support.world import RealWorld

pytestmark = pytest.mark.spark

HOUR = 3_600_000
LEVELS = Levels(PartitionStrategy(partition_by=timedelta(hours=6), maximum_delay=timedelta(days=1)))
Steps = Callable[[DataFrame], DataFrame]


@pytest.fixture
def ready(
    world: RealWorld, skewed: Callable[..., None], parked: Callable[..., dict[str, str]]
) -> Callable[..., LevelTopicDescription]:
    """``ready(values)``: a level topic with messages parked long ago that are due in an hour."""

    def make(values: list[str], **description: Any) -> LevelTopicDescription:
        made = world.level_topic(LEVELS, **description)
        topic = made.level_topic(0).partition(0).full
        due_ms = SystemClock().now_ms() + HOUR
        for value in values:
            properties = parked(due_ms, account=value.split("-")[0])
            skewed(topic, -8 * HOUR, value.encode(), properties=properties)
        return made

    return make


def account() -> Any:
    return F.col("properties")["account"]


def test_a_table_of_closed_accounts_and_changed_due_times(
    ready: Callable[..., LevelTopicDescription],
    spark_once: Callable[..., list[Any]],
    world: RealWorld,
) -> None:
    description = ready(["a-1", "closed-1", "later-1", "soon-1", "a-2", "closed-2", "unwanted-1"])

    def steps(frame: DataFrame) -> DataFrame:
        closed = frame.sparkSession.createDataFrame([("closed",)], "account string")
        due = (
            F.when(account() == "later", F.col("due") + F.expr("interval 8 hours"))
            .when(account() == "soon", F.col("due") - F.expr("interval 2 hours"))
            .otherwise(F.col("due"))
        )
        open_only = frame.withColumn("account", account()).join(closed, "account", "left_anti")
        return open_only.filter("account <> 'unwanted'").withColumn("due", due)

    progress = spark_once(description, steps)
    # Dropped messages are acknowledged as well, and counted.
    drained_to = [
        m.value for m in world.stored(description.topic) if m.properties["account"] == "later"
    ]
    assert drained_to == [b"later-1", b"later-1"]
    assert sum(item.numInputRows for item in progress) == 7
    assert sum(dropped(item) for item in progress) == 3

    sent = {m.value: m for m in world.stored(description.targets[0])}
    assert sent.keys() == {b"a-1", b"a-2", b"soon-1"}
    now_ms = SystemClock().now_ms()
    assert int(sent[b"soon-1"].properties["delaylevel.due"]) < now_ms
    assert int(sent[b"a-1"].properties["delaylevel.due"]) > now_ms
    (again,) = [
        m
        for m in world.stored(description.level_topic(0).partition(0).full)
        if m.value == b"later-1" and "delaylevel.id" in m.properties
    ]
    assert int(again.properties["delaylevel.due"]) > now_ms + 8 * HOUR
    # Only the messages that were parked again are pending.
    spark_once(description, lambda frame: frame)
    assert len(world.stored(description.targets[0])) == 3


def test_messages_pass_spark_and_a_shuffle_as_they_are(
    world: RealWorld, parked: Callable[..., dict[str, str]], spark_once: Callable[..., list[Any]]
) -> None:
    """They leave the source as columns, and are messages again in another task."""
    unit = timedelta(milliseconds=200)
    strategy = PartitionStrategy(partition_by=unit, maximum_delay=2 * unit)
    description = world.level_topic(Levels(strategy))
    source, (orders,) = description.level_topic(0).partition(0).full, description.targets
    properties = parked(SystemClock().now_ms(), text="\u2713\n")
    bodies = (None, b"", bytes(range(256)), random.Random(3).randbytes(1 << 20))
    with closing(world.plain_client.create_producer(source)) as producer:
        for body in bodies:
            producer.send(body, properties)
            late = (1 << 64) - 1  # no column can have this time
            producer.send(body, properties, "key \u2713", "order", event_timestamp=late)
    time.sleep(2 * unit.total_seconds())  # now they are ready
    spark_once(description, lambda frame: frame.repartition(3))

    def fields(topic: str) -> list[Any]:
        found = (
            (one.value, one.key, one.ordering_key, one.event_ms, one.properties["text"])
            for one in world.stored(topic)
        )
        return sorted(found, key=repr)

    assert fields(orders) == fields(source)
    assert len(fields(orders)) == 2 * len(bodies)


def test_a_join_that_multiplies_is_an_error(
    world: RealWorld,
    ready: Callable[..., LevelTopicDescription],
    spark_once: Callable[..., list[Any]],
    tmp_path: Path,
) -> None:
    description = ready(["a-1", "b-1", "b-2"])

    def in_one_task(frame: DataFrame) -> DataFrame:
        regions = frame.sparkSession.createDataFrame(
            [("a", "eu"), ("b", "eu"), ("b", "us")], "account string, region string"
        )
        return frame.withColumn("account", account()).join(F.broadcast(regions), "account")

    def far_apart(frame: DataFrame) -> DataFrame:
        return in_one_task(frame).repartition(7, "region")

    def exploded(frame: DataFrame) -> DataFrame:
        return frame.withColumn("copy", F.explode(F.sequence(F.lit(1), F.lit(2))))

    for number, steps in enumerate((in_one_task, far_apart, exploded)):
        with pytest.raises(StepsError, match=r"came twice in one batch.*left_semi"):
            spark_once(description, steps, checkpoint=str(tmp_path / str(number)))
        assert world.backlog(description) == 3


def test_the_result_of_the_steps_is_checked_before_the_first_batch(
    world: RealWorld,
    ready: Callable[..., LevelTopicDescription],
    spark_once: Callable[..., list[Any]],
    tmp_path: Path,
) -> None:
    description = ready(["a-1"])
    wrong: dict[str, Steps] = {
        "nothing as ledger": lambda frame: frame.drop("ledger", "entry"),
        "nothing as value": lambda frame: frame.withColumnRenamed("value", "body"),
        "return string as due, which must be one timestamp": lambda frame: frame.withColumn(
            "due", F.col("due").cast("string")
        ),
        "return string and string as key": lambda frame: frame.select("*", F.lit("x").alias("key")),
        "not a stream": lambda frame: frame.sparkSession.createDataFrame([], SCHEMA),
        "return a NoneType": lambda frame: None,  # type: ignore[dict-item, return-value]
        "contain Deduplicate": lambda frame: frame.dropDuplicates(["key"]),
        "contain GlobalLimit": lambda frame: frame.limit(5),
        "more than one stream": lambda frame: frame.union(frame),
    }
    for text, steps in wrong.items():
        with pytest.raises(StepsError, match=text):
            spark_once(description, steps)
    assert not (tmp_path / "checkpoint").exists()
    assert world.backlog(description) == 1


def test_steps_given_by_name(
    world: RealWorld,
    ready: Callable[..., LevelTopicDescription],
    spark: Any,
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = tmp_path / "own_steps_of_this_test.py"
    module.write_text("def keep_a(frame):\n    return frame.filter(\"value <> X'622d31'\")\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    description = ready(["a-1", "b-1"])
    # The command itself, in the session that all tests share.
    monkeypatch.setattr(job, "SparkSyncJob", partial(SparkSyncJob, spark=spark))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    steps = f"{module.stem}:keep_a"
    result = CliRunner().invoke(
        cli, ["mover", "run", description.topic, "--once", "--steps", steps], env=environment
    )
    assert result.exit_code == 0, result.output
    assert [m.value for m in world.stored(description.targets[0])] == [b"a-1"]
    assert "1 messages moved. 1 dropped by the steps." in result.stderr
