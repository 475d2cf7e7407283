"""Conversion between messages and the rows of the Spark source and sink."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from delaylevel.inspection.columns import LATEST_MS, in_chunks, schema_of, to_record_batch
from delaylevel.model import envelope as env
from delaylevel.model.level_topic import Role
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import SourcePartition

ROWS_PER_BATCH = 2000
BYTES_PER_BATCH = 8 * 1024 * 1024

# The columns of a streaming or batch read. A user's steps may change only `due`.
ARROW_SCHEMA = schema_of(
    (
        "due",
        "target",
        "id",
        "key",
        "ordering_key",
        "event_time",
        "properties",
        "value",
        "size",
        "place",
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
#: The columns that are needed to forward a message: a user's steps may leave out the others.
REQUIRED = tuple(
    name for name in ARROW_SCHEMA.names if name not in ("id", "size", "place", "routed_at")
)

# The columns that become a message, in the order of its fields.
_MESSAGE = tuple(name.replace("_ms", "_time") for name in ParkedMessage._fields)
# The event time of a message, in a row with the latest one that a column can have.
_EVENT_TIME = env.PREFIX + "event-time"
_MS = pa.timestamp("ms", tz="UTC")
# Values of these fields where the column is null.
_ABSENT = {"key": "", "ordering_key": "", "event_time": 0}


def to_batches(
    source: SourcePartition,
    messages: Iterable[ParkedMessage],
    place: str,
    now_ms: int,
    schema: StructType = SCHEMA,
) -> Iterator[pa.RecordBatch]:
    """Yield the messages of one partition as record batches of these columns of ``SCHEMA``."""
    # Spark compares the schema of each batch with this one, field by field.
    wanted = to_arrow_schema(schema, timezone="UTC")
    for chunk in in_chunks(map(_with_event_time, messages), ROWS_PER_BATCH, BYTES_PER_BATCH):
        yield to_record_batch(chunk, source, wanted, {"routed_at": now_ms, "place": place})


def _with_event_time(message: ParkedMessage) -> ParkedMessage:
    # With its event time among its properties if the column has the latest one.
    if message.event_ms < LATEST_MS:
        return message
    properties = {**message.properties, _EVENT_TIME: str(message.event_ms)}
    return message._replace(properties=properties)


def from_batch(batch: pa.RecordBatch) -> Iterator[tuple[SourcePartition, ParkedMessage]]:
    """Yield (source, message); a changed ``due`` replaces the envelope's."""
    missing = [name for name in REQUIRED if name not in batch.schema.names]
    if missing:
        raise ValueError(
            f"the rows lack {', '.join(missing)}: keep every column of the source, and change only "
            "due"
        )
    fields = [values_of(batch, name) for name in _MESSAGE]
    for name, absent in _ABSENT.items():
        index = _MESSAGE.index(name)
        fields[index] = [absent if one is None else one for one in fields[index]]
    messages = map(ParkedMessage._make, zip(*fields, strict=True))
    due = values_of(batch, "due")
    for source, message, due_ms in zip(_sources(batch), messages, due, strict=True):
        if due_ms is not None:
            message.properties[env.DUE] = str(due_ms)
        if message.event_ms == LATEST_MS:
            event_ms = int(message.properties.pop(_EVENT_TIME, LATEST_MS))
            message = message._replace(event_ms=event_ms)
        yield source, message


def _sources(batch: pa.RecordBatch) -> list[SourcePartition]:
    """Return the source of each row; a batch has few sources."""
    topics = batch.column("topic").dictionary_encode()
    codes = topics.indices.to_pylist()
    found = []
    for code in range(len(topics.dictionary)):
        row = codes.index(code)
        level_topic, topic, role, level, partition = (
            batch.column(name)[row].as_py()
            for name in ("level_topic", "topic", "role", "level", "partition")
        )
        found.append(SourcePartition(level_topic, topic, Role(role), level, partition, 0))
    return [found[code] for code in codes]


def values_of(batch: pa.RecordBatch, name: str) -> list[Any]:
    """Return a column as Python values: times in ms, rounded up, and properties as dicts."""
    column = batch.column(name)
    if pa.types.is_timestamp(column.type):
        try:
            column = column.cast(_MS)
        except pa.ArrowInvalid:  # some have microseconds: nothing may be due too early
            column = pc.ceil_temporal(column, unit="millisecond").cast(_MS)
        column = column.cast(pa.int64())
    values: list[Any] = column.to_pylist()
    if pa.types.is_map(column.type):
        return [None if one is None else dict(one) for one in values]
    return values
