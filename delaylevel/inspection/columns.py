"""The columns of a pending message as Arrow arrays, shared by inspection and the Spark sources."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from delaylevel.errors import from_extra
from delaylevel.model.envelope import ID, TARGET
from delaylevel.model.level_topic import Role
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import SourcePartition

with from_extra("inspect", "rows of pending messages need"):
    import pyarrow as pa


Values = Callable[[Sequence[ParkedMessage], SourcePartition], Sequence[object]]


class _ColumnDefinition(NamedTuple):
    """The definition of a column."""

    kind: pa.DataType
    values: Values | None  # times in ms; None for a column that is the same for a whole batch
    required: bool = False


_TEXT, _LONG, _INT = pa.string(), pa.int64(), pa.int32()
_TIME = pa.timestamp("us", tz="UTC")
_MOST = (1 << 63) - 1
#: Latest time in a column of times, ms since the epoch. An event time may be any number of 64 bits.
LATEST_MS = _MOST // 1000
_PROPERTIES = pa.map_(_TEXT, pa.field("value", _TEXT, nullable=False))


def _field(name: str) -> Values:
    get = attrgetter(name)
    return lambda messages, _: list(map(get, messages))


def _optional_field(name: str) -> Values:
    """Return null for the values 0 and "", which stand for a missing value."""
    get = attrgetter(name)
    return lambda messages, _: [get(one) or None for one in messages]


def _delay(messages: Sequence[ParkedMessage], _: SourcePartition) -> list[int | None]:
    return [None if (due_ms := one.due_ms) is None else due_ms - one.publish_ms for one in messages]


def _targets(messages: Sequence[ParkedMessage], source: SourcePartition) -> list[str | None]:
    # In the broker's final window, messages wait in the target itself and may not name it.
    own = source.name.without_partition.full if source.role is Role.WINDOW else None
    return [one.properties.get(TARGET) or own for one in messages]


def _ids(messages: Sequence[ParkedMessage], source: SourcePartition) -> list[str]:
    return [one.properties.get(ID) or one.stable_id(source.topic) for one in messages]


_COLUMNS = {
    "due": _ColumnDefinition(_TIME, _field("due_ms")),
    "due_ms": _ColumnDefinition(_LONG, _field("due_ms")),
    "target": _ColumnDefinition(_TEXT, _targets),
    "id": _ColumnDefinition(_TEXT, _ids, True),
    "key": _ColumnDefinition(_TEXT, _optional_field("key")),
    "ordering_key": _ColumnDefinition(_TEXT, _optional_field("ordering_key")),
    "event_time": _ColumnDefinition(_TIME, _optional_field("event_ms")),
    "event_ms": _ColumnDefinition(_LONG, _optional_field("event_ms")),
    "publish_time": _ColumnDefinition(_TIME, _field("publish_ms"), True),
    "publish_ms": _ColumnDefinition(_LONG, _field("publish_ms"), True),
    "delay_ms": _ColumnDefinition(_LONG, _delay),
    "size": _ColumnDefinition(_LONG, _field("size"), True),
    "properties": _ColumnDefinition(_PROPERTIES, _field("properties"), True),
    "value": _ColumnDefinition(pa.binary(), _field("value")),
    "place": _ColumnDefinition(_TEXT, None, True),
    "role": _ColumnDefinition(_TEXT, None, True),
    "level": _ColumnDefinition(_INT, None, True),
    "partition": _ColumnDefinition(_INT, None, True),
    "level_topic": _ColumnDefinition(_TEXT, None, True),
    "topic": _ColumnDefinition(_TEXT, None, True),
    "ledger": _ColumnDefinition(_LONG, _field("ledger"), True),
    "entry": _ColumnDefinition(_LONG, _field("entry"), True),
    "batch": _ColumnDefinition(_INT, _field("batch"), True),
    "routed_at": _ColumnDefinition(_TIME, None, True),
}


def schema_of(names: Iterable[str]) -> pa.Schema:
    """Return the schema of some columns, in the given order."""
    return pa.schema(
        [pa.field(name, _COLUMNS[name].kind, not _COLUMNS[name].required) for name in names]
    )


def to_record_batch(
    messages: Sequence[ParkedMessage],
    source: SourcePartition,
    schema: pa.Schema,
    constants: Mapping[str, object],
) -> pa.RecordBatch:
    """Build a record batch; ``constants`` has `place` and `routed_at` (ms) if the schema has."""
    same = {
        "role": source.role.value,
        "level": source.level,
        "partition": source.partition,
        "level_topic": source.level_topic,
        "topic": source.topic,
        **constants,
    }
    columns = []
    for field in schema:
        values = _COLUMNS[field.name].values
        if values is None:
            one = _array([same[field.name]], field.type)[0]
            columns.append(pa.repeat(one, len(messages)))
        else:
            columns.append(_array(values(messages, source), field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def in_chunks(
    messages: Iterable[ParkedMessage], most_rows: int, most_bytes: int
) -> Iterator[list[ParkedMessage]]:
    """Yield messages in lists that end once they reach a number of rows or bytes of payload."""
    chunk: list[ParkedMessage] = []
    size = 0
    for message in messages:
        chunk.append(message)
        size += message.size
        if len(chunk) >= most_rows or size >= most_bytes:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_map(kind):
        return _map_array(values, kind)
    is_time = pa.types.is_timestamp(kind)
    if not (is_time or pa.types.is_int64(kind)):
        return pa.array(values, kind)
    convert = _times if is_time else pa.array
    # Hardly any batch has a time beyond the column, so look for one only after a failure.
    try:
        return convert(values, kind)
    except (OverflowError, pa.ArrowInvalid):
        most = LATEST_MS if is_time else _MOST
        return convert([each and max(-most, min(each, most)) for each in values], kind)


def _times(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    # Not directly into timestamps: pyarrow would load pandas for that.
    return pa.array(values, _LONG).cast(pa.timestamp("ms", tz=kind.tz)).cast(kind)


def _map_array(dicts: Sequence[Mapping[str, str]], kind: pa.DataType) -> pa.Array:
    keys: list[str] = []
    values: list[str] = []
    offsets = [0]
    for one in dicts:
        keys.extend(one)
        values.extend(one.values())
        offsets.append(len(keys))
    return pa.MapArray.from_arrays(
        pa.array(offsets, pa.int32()), pa.array(keys, _TEXT), pa.array(values, _TEXT), type=kind
    )
