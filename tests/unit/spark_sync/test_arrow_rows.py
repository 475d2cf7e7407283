"""Tests of the schema of the Spark source, on which users and checkpoints rely."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from delaylevel.model.level_topic import Role
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import SourcePartition
from delaylevel.spark_sync.arrow_rows import ARROW_SCHEMA, SCHEMA, to_batches

COLUMNS = [
    StructField("due", TimestampType(), True),
    StructField("target", StringType(), True),
    StructField("id", StringType(), False),
    StructField("key", StringType(), True),
    StructField("ordering_key", StringType(), True),
    StructField("event_time", TimestampType(), True),
    StructField("properties", MapType(StringType(), StringType(), False), False),
    StructField("value", BinaryType(), True),
    StructField("size", LongType(), False),
    StructField("place", StringType(), False),
    StructField("level_topic", StringType(), False),
    StructField("topic", StringType(), False),
    StructField("role", StringType(), False),
    StructField("level", IntegerType(), False),
    StructField("partition", IntegerType(), False),
    StructField("ledger", LongType(), False),
    StructField("entry", LongType(), False),
    StructField("batch", IntegerType(), False),
    StructField("publish_time", TimestampType(), False),
    StructField("routed_at", TimestampType(), False),
]


def test_the_columns_are_pinned() -> None:
    assert StructType(COLUMNS) == SCHEMA
    assert StructType(COLUMNS).json() == SCHEMA.json()
    assert to_arrow_schema(StructType(COLUMNS), timezone="UTC").equals(ARROW_SCHEMA, True)


@pytest.mark.parametrize("names", [["due"], ["id", "properties"], SCHEMA.names])
def test_batches_have_the_schema_that_spark_expects(names: list[str]) -> None:
    topic = "persistent://public/default/orders-delay-level-partition-0"
    source = SourcePartition(topic.removesuffix("-partition-0"), topic, Role.LEVEL, 0, 0, 0)
    message = ParkedMessage(7, 0, -1, 5, "k", "", 0, {"a": "b"}, b"body")
    required = StructType([SCHEMA[name] for name in names])
    # In a schema that a user writes as text, every value may be null.
    loose = StructType([StructField(one.name, one.dataType, True) for one in required])
    for schema in (required, loose):
        (batch,) = to_batches(source, [message], "DAY 0", 9, schema)
        assert batch.schema.equals(to_arrow_schema(schema, timezone="UTC"), True)
