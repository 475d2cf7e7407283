"""Messages as rows: the schema of the source, and the way to Arrow and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
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

from delaylevel.model import envelope as env
from delaylevel.model.level_topic import Role
from delaylevel.model.message import ParkedMessage
from delaylevel.model.source_partition import SourcePartition

ROWS_PER_BATCH = 2000
BYTES_PER_BATCH = 8 * 1024 * 1024

# What a user's own step may look at and, for `due`, change; then what carries the message on.
SCHEMA = StructType(
    [
        StructField("due", TimestampType(), True),
        StructField("target", StringType(), True),
        StructField("key", StringType(), True),
        StructField("ordering_key", StringType(), True),
        StructField("event_time", TimestampType(), True),
        StructField("properties", MapType(StringType(), StringType(), False), False),
        StructField("value", BinaryType(), True),
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
)

_MOMENT = pa.timestamp("us", tz="UTC")
# Spark compares what a reader yields with this, field by field.
ARROW_SCHEMA = to_arrow_schema(SCHEMA, timezone="UTC")

_READ_BACK = (
    "due",
    "key",
    "ordering_key",
    "event_time",
    "properties",
    "value",
    "ledger",
    "entry",
    "batch",
    "publish_time",
    "routed_at",
)


def to_batches(
    source: SourcePartition, messages: Iterable[ParkedMessage], now_ms: int
) -> Iterator[pa.RecordBatch]:
    """Yield the messages of one partition as Arrow record batches of ``ARROW_SCHEMA``.

    Args:
        source: the partition.
        messages: as they were read there.
        now_ms: the present time that all of them are routed by.
    """
    held: list[ParkedMessage] = []
    size = 0
    for message in messages:
        held.append(message)
        size += len(message.value or b"")
        if len(held) >= ROWS_PER_BATCH or size >= BYTES_PER_BATCH:
            yield _batch(source, held, now_ms)
            held, size = [], 0
    if held:
        yield _batch(source, held, now_ms)


def _batch(source: SourcePartition, messages: list[ParkedMessage], now_ms: int) -> pa.RecordBatch:
    count = len(messages)
    ledgers, entries, batches, published, keys, ordering, events, properties, values = zip(
        *messages, strict=True
    )

    def same(value: Any, kind: pa.DataType) -> pa.Array:
        return pa.repeat(pa.scalar(value, kind), count)

    columns = [
        _moments([env.due_of(item) for item in properties]),
        pa.array([item.get(env.TARGET) for item in properties], pa.string()),
        pa.array([key or None for key in keys], pa.string()),
        pa.array([key or None for key in ordering], pa.string()),
        _moments([event or None for event in events]),
        _maps(properties),
        pa.array(values, pa.binary()),
        same(source.family, pa.string()),
        same(source.topic, pa.string()),
        same(source.role.value, pa.string()),
        same(source.level, pa.int32()),
        same(source.partition, pa.int32()),
        pa.array(ledgers, pa.int64()),
        pa.array(entries, pa.int64()),
        pa.array(batches, pa.int32()),
        _moments(published),
        same(now_ms * 1000, pa.int64()).cast(_MOMENT),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ARROW_SCHEMA)


def from_batch(batch: pa.RecordBatch) -> Iterator[tuple[SourcePartition, ParkedMessage, int]]:
    """Yield (source, message, routing time in ms) for each row of a record batch.

    A ``due`` that a user's step has changed replaces the one in the envelope.

    Raises:
        ValueError: a column that carries the message on is missing.
    """
    missing = [name for name in ARROW_SCHEMA.names if name not in batch.schema.names]
    if missing:
        raise ValueError(
            f"the rows lack {', '.join(missing)}: keep every column of the source, and change none "
            "but due"
        )
    columns = [
        _sources(batch),
        *(
            _milliseconds(column) if pa.types.is_timestamp(column.type) else column.to_pylist()
            for column in map(batch.column, _READ_BACK)
        ),
    ]
    for (
        source,
        due_ms,
        key,
        ordering_key,
        event_ms,
        pairs,
        value,
        ledger,
        entry,
        index,
        published_ms,
        now_ms,
    ) in zip(*columns, strict=True):
        properties = dict(pairs)
        if due_ms is not None:
            properties[env.DUE] = str(due_ms)
        message = ParkedMessage(
            ledger,
            entry,
            index,
            published_ms,
            key or "",
            ordering_key or "",
            event_ms or 0,
            properties,
            value,
        )
        yield source, message, now_ms


def _sources(batch: pa.RecordBatch) -> list[SourcePartition]:
    """Return the source of each row; a batch has few, in long runs."""
    topics = batch.column("topic").dictionary_encode()
    codes = topics.indices.to_pylist()
    found = []
    for code in range(len(topics.dictionary)):
        row = codes.index(code)
        family, topic, role, level, partition = (
            batch.column(name)[row].as_py()
            for name in ("level_topic", "topic", "role", "level", "partition")
        )
        found.append(SourcePartition(family, topic, Role(role), level, partition, 0))
    return [found[code] for code in codes]


def _maps(dicts: Sequence[Mapping[str, str]]) -> pa.Array:
    keys: list[str] = []
    values: list[str] = []
    offsets = [0]
    for one in dicts:
        keys.extend(one)
        values.extend(one.values())
        offsets.append(len(keys))
    kind = ARROW_SCHEMA.field("properties").type
    return pa.MapArray.from_arrays(
        pa.array(offsets, pa.int32()),
        pa.array(keys, pa.string()),
        pa.array(values, pa.string()),
        type=kind,
    )


def _moments(values: Sequence[int | None]) -> pa.Array:
    # Not straight into timestamps: pyarrow would load pandas for that.
    milliseconds = pa.array(values, pa.int64()).cast(pa.timestamp("ms", tz="UTC"))
    return milliseconds.cast(_MOMENT)


def _milliseconds(column: pa.Array) -> list[int | None]:
    found: list[int | None] = (
        column.cast(pa.timestamp("ms", tz="UTC"), safe=False).cast(pa.int64()).to_pylist()
    )
    return found
