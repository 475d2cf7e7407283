"""Tests of pending messages as a DataFrame, on a real broker."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

pytest.importorskip("pyspark")

from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.spark_sync import pending
from delaylevel.spark_sync.arrow_rows import SCHEMA
from delaylevel.spark_sync.options import SyncOptions, connection_options
from delaylevel.spark_sync.source import BatchOptions, PendingReader
from support.world import RealWorld

pytestmark = pytest.mark.spark

HOUR = 3_600_000
LEVELS = Levels(
    [
        PartitionStrategy(partition_by=timedelta(hours=6), maximum_delay=timedelta(hours=24)),
        PartitionStrategy(partition_by=timedelta(hours=2), maximum_delay=timedelta(hours=6)),
    ]
)


def moment(time_ms: int) -> datetime:
    return datetime.fromtimestamp(time_ms / 1000, timezone.utc)


@pytest.fixture
def filled(world: RealWorld, clock: Any) -> tuple[LevelTopicDescription, dict[str, int]]:
    """A level topic with one message for each hour from 2 to 23, and their due times."""
    description = world.level_topic(LEVELS)
    due = {str(hours): clock.now_ms() + hours * HOUR + 60_000 for hours in range(2, 24)}
    with world.client(clock).create_producer(
        description.targets[0], enable_delay_level_topic=True
    ) as producer:
        for name, due_ms in due.items():
            producer.send_async(
                name.encode() * 100,
                None,
                deliver_at=due_ms,
                partition_key=f"k{name}",
                event_timestamp=int(name),
                properties={"hours": name},
            )
        producer.send(b"", deliver_at=clock.now_ms() + 20 * HOUR, message_id="chosen")
    return description, due


def planned(
    connection: Connection, description: LevelTopicDescription, **options: str
) -> list[tuple[str, int]]:
    """Return the (role, partition) of every slice of a read with the given options."""
    wanted, rest = BatchOptions.split(
        {"levelTopics": description.topic, **connection_options(connection), **options}
    )
    reader = PendingReader(SyncOptions.parse(rest), wanted, SCHEMA)
    return [(item.source.level, item.source.partition) for item in reader.partitions()]


def test_every_pending_message_is_read(
    spark: Any,
    connection: Connection,
    filled: tuple[LevelTopicDescription, dict[str, int]],
    admin: Admin,
) -> None:
    description, due = filled
    frame = pending(spark, connection, description.topic)
    assert frame.schema == SCHEMA
    rows = {row["properties"].get("hours", "chosen"): row for row in frame.collect()}
    assert rows.keys() == {*due, "chosen"}
    for name, due_ms in due.items():
        row = rows[name]
        assert row["due"].replace(tzinfo=timezone.utc) == moment(due_ms)
        assert bytes(row["value"]) == name.encode() * 100
        assert row["size"] == len(name) * 100
        assert (row["target"], row["key"]) == (description.targets[0], f"k{name}")
        assert row["event_time"].replace(tzinfo=timezone.utc) == moment(int(name))
        assert row["ordering_key"] is None
        assert row["level"] == (0 if int(name) >= 6 else 1)
        assert row["partition"] == int(name) // (6 if int(name) >= 6 else 2) - 1
        assert row["role"] == "level"
        assert row["place"] == f"{description.levels[row['level']].name} {row['partition']}"
        position = f"{row['ledger']}:{row['entry']}:{row['batch']}"
        assert row["id"] == f"{row['topic'].removeprefix('persistent://')}:{position}"
        assert row["topic"].endswith(f"-partition-{row['partition']}")
        assert row["level_topic"] == description.topic
    assert (rows["chosen"]["id"], rows["chosen"]["size"]) == ("chosen", 0)
    # The read has left no trace: no acknowledgement, and no consumer on a subscription.
    for topic in {row["topic"] for row in rows.values()}:
        stats = admin.partition_stats(TopicName.parse(topic)).subscriptions
        assert stats.keys() == {SUBSCRIPTION}
        assert stats[SUBSCRIPTION].backlog_entries > 0
        assert not stats[SUBSCRIPTION].consumers


def test_a_window_of_due_times(
    spark: Any,
    connection: Connection,
    filled: tuple[LevelTopicDescription, dict[str, int]],
) -> None:
    description, due = filled

    def hours(**options: Any) -> set[str]:
        frame = pending(spark, connection, description.topic, slack=timedelta(minutes=1), **options)
        return {row["properties"]["hours"] for row in frame.filter("size > 0").collect()}

    assert hours(due_from=moment(due["8"]), due_before=moment(due["14"])) == {
        str(hour) for hour in range(8, 14)
    }
    assert hours(due_from=moment(due["22"])) == {"22", "23"}
    assert hours(due_before=moment(due["3"] + 1)) == {"2", "3"}

    # Partitions without matching due times are not opened, except the last one of a level.
    from_8, before_14 = str(due["8"]), str(due["14"])
    tight = {"dueSlackMs": "60000"}
    assert planned(connection, description, dueFrom=from_8, dueBefore=before_14, **tight) == [
        (0, 0),
        (0, 1),
        (1, 1),
    ]
    assert planned(connection, description, dueBefore=str(due["3"]), **tight) == [(1, 0)]
    assert planned(connection, description, dueFrom=from_8, dueBefore=before_14) == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
    ]
