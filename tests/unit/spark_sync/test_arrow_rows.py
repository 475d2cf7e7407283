"""Tests of the schema of the Spark source, on which users and checkpoints rely."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructField, StructType

from delaylevel.inspection.columns import LATEST_MS
from delaylevel.model.level_topic import Role
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import SourcePartition
from delaylevel.spark_sync.arrow_rows import (
    ARROW_SCHEMA,
    SCHEMA,
    from_batch,
    to_batches,
    values_of,
)

COLUMNS = """
    due timestamp?, target string?, id string, key string?, ordering_key string?,
    event_time timestamp?, properties map<string;string>, value binary?, size bigint, place string,
    level_topic string, topic string, role string, level int, partition int, ledger bigint,
    entry bigint, batch int, publish_time timestamp, routed_at timestamp
"""


def test_the_columns_are_pinned() -> None:
    found = [
        f"{one.name} {one.dataType.simpleString()}{'?' * one.nullable}".replace(",", ";")
        for one in SCHEMA
    ]
    assert found == [" ".join(each.split()) for each in COLUMNS.split(",")]
    assert not SCHEMA["properties"].dataType.valueContainsNull
    assert to_arrow_schema(SCHEMA, timezone="UTC").equals(ARROW_SCHEMA, True)


TOPIC = "persistent://public/default/orders-delay-level-partition-0"
SOURCE = SourcePartition(TOPIC.removesuffix("-partition-0"), TOPIC, Role.LEVEL, 0, 0, 0)


@pytest.mark.parametrize("names", [["due"], ["id", "properties"], SCHEMA.names])
def test_batches_have_the_schema_that_spark_expects(names: list[str]) -> None:
    message = ParkedMessage(7, 0, -1, 5, "k", "", 0, {"a": "b"}, b"body")
    required = StructType([SCHEMA[name] for name in names])
    # In a schema that a user writes as text, every value may be null.
    loose = StructType([StructField(one.name, one.dataType, True) for one in required])
    for schema in (required, loose):
        (batch,) = to_batches(SOURCE, [message], "DAY 0", 9, schema)
        assert batch.schema.equals(to_arrow_schema(schema, timezone="UTC"), True)


@pytest.mark.parametrize("event_ms", [0, 5, LATEST_MS - 1, LATEST_MS, LATEST_MS + 1, (1 << 64) - 1])
def test_rows_keep_any_event_time_whatever_a_foreign_producer_has_sent(event_ms: int) -> None:
    properties = {"delaylevel.due": "1900000000000", "delaylevel.event-time": "soon"}
    message = ParkedMessage(7, 0, -1, 5, "k", "", event_ms, properties, b"body")
    (batch,) = to_batches(SOURCE, [message], "DAY 0", 9)
    ((_, found),) = from_batch(batch)
    assert found.event_ms == event_ms


def test_times_are_rounded_up() -> None:
    times = pa.array([2000, 1001, None], pa.timestamp("us", tz="UTC"))
    assert values_of(pa.RecordBatch.from_arrays([times], ["due"]), "due") == [2, 2, None]
