"""Conversion of messages to the rows of the Spark source, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from delaylevel.model import envelope as env
from delaylevel.model.columns import in_chunks, schema_of, to_record_batch
from delaylevel.model.level_topic import Role
from delaylevel.model.message import ParkedMessage
from delaylevel.model.source_partition import SourcePartition

ROWS_PER_BATCH = 2000
BYTES_PER_BATCH = 8 * 1024 * 1024

# The columns that a user's own step gets; of these it may change only `due`.
ARROW_SCHEMA = schema_of(
    (
        "due",
        "target",
        "key",
        "ordering_key",
        "event_time",
        "properties",
        "value",
        "level_topic",
        "topic",
        "role",
        "level",
        "partition",
        "ledger",
        "entry",
        "batch",
        "publish_time",
        "routed_at",
    )
)
SCHEMA = from_arrow_schema(ARROW_SCHEMA)
# The columns of a batch read.
PENDING_SCHEMA = from_arrow_schema(schema_of((*ARROW_SCHEMA.names, "size", "id")))

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
    source: SourcePartition,
    messages: Iterable[ParkedMessage],
    now_ms: int,
    schema: StructType = SCHEMA,
) -> Iterator[pa.RecordBatch]:
    """Yield the messages of one partition as Arrow record batches.

    Args:
        source: the partition.
        messages: messages that were read from it.
        now_ms: the present time by which all of them are routed, ms since the epoch.
        schema: columns of ``PENDING_SCHEMA``, with any nullability.
    """
    # Spark compares the schema of what a reader yields with this one, field by field.
    wanted = to_arrow_schema(schema, timezone="UTC")
    for chunk in in_chunks(messages, ROWS_PER_BATCH, BYTES_PER_BATCH):
        yield to_record_batch(chunk, source, wanted, {"routed_at": now_ms})


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
    """Return the source of each row; a batch has few sources, in long runs."""
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


def _milliseconds(column: pa.Array) -> list[int | None]:
    found: list[int | None] = (
        column.cast(pa.timestamp("ms", tz="UTC"), safe=False).cast(pa.int64()).to_pylist()
    )
    return found
