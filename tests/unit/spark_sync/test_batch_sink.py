"""Tests of rows that become scheduled messages, on the in-memory Pulsar; without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pulsar
import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from delaylevel.errors import (
    ConfigError,
    InvalidInputError,
    LevelTopicError,
    UnconfirmedMessagesError,
)
from delaylevel.spark_sync import source
from delaylevel.spark_sync.options import WriteOptions
from delaylevel.spark_sync.source import DelayLevelDataSource, ScheduleWriter
from delaylevel.testing import MemoryPulsar
from support.openings import Openings, ThreadDoor, openings  # noqa: F401

TYPES = {
    "value": StringType(),
    "due": TimestampType(),
    "target": StringType(),
    "id": StringType(),
    "key": StringType(),
    "event_time": TimestampType(),
    "properties": MapType(StringType(), StringType()),
}
ARROW = {
    "due": pa.timestamp("us", tz="UTC"),
    "event_time": pa.timestamp("us", tz="UTC"),
    "properties": pa.map_(pa.string(), pa.string()),
}


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryPulsar]:
    with MemoryPulsar() as memory:
        for topic in ("orders", "invoices"):
            memory.client().create_producer(topic, enable_delay_level_topic=True).close()
        kind = source.DelayLevelClient
        monkeypatch.setattr(kind, "from_connection", lambda *_, **__: memory.client())
        yield memory


def schema_of(*names: str, **others: Any) -> StructType:
    kinds = {**{name: TYPES[name] for name in names}, **others}
    return StructType([StructField(name, kind) for name, kind in kinds.items()])


def write(rows: list[dict[str, Any]], **options: str) -> None:
    schema = schema_of(*rows[0])
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array([row[name] for row in rows], ARROW.get(name, pa.string()))
            for name in schema.fieldNames()
        ],
        names=schema.fieldNames(),
    )
    ScheduleWriter(WriteOptions.parse(options), schema).write(iter([batch]))


def test_a_row_is_a_message(memory: MemoryPulsar) -> None:
    now = datetime.fromtimestamp(memory.clock.now_ms() / 1000, timezone.utc)
    later = now + timedelta(days=3)
    first = {
        "value": "pay",
        "due": later,
        "target": "orders",
        "id": "invoice-7",
        "key": "k",
        "event_time": now,
        "properties": {"customer": "7"},
    }
    empty: dict[str, Any] = dict.fromkeys(first)
    rows = [first, {**empty, "due": later}, {**empty, "value": "at once"}]
    write(rows, target="invoices", serviceUrl="pulsar://unused:1")
    (pending,) = memory.pending("orders")
    assert (pending.data, pending.key, pending.at) == (b"pay", "k", later)
    assert pending.properties["delaylevel.id"] == "invoice-7"
    assert pending.properties["customer"] == "7"
    assert len(memory.pending("invoices")) == 1
    assert [one.data for one in memory.delivered("invoices")] == [b"at once"]


def test_a_row_that_cannot_be_sent_is_named(memory: MemoryPulsar) -> None:
    due = datetime.fromtimestamp(memory.clock.now_ms() / 1000, timezone.utc) + timedelta(days=90)
    row = {"value": "x", "due": due, "key": "k", "id": "i-7"}
    with pytest.raises(InvalidInputError, match=r"row for orders with due .*'k' and id 'i-7'"):
        write([row], target="orders")
    with pytest.raises(InvalidInputError, match="target is null, and there is no option target"):
        write([{**row, "target": None}])


def test_a_task_fails_if_a_message_is_not_stored(
    monkeypatch: pytest.MonkeyPatch,
    openings: Openings,
) -> None:
    door = ThreadDoor({})
    door.business.results = [pulsar.Result.Ok, pulsar.Result.Timeout, pulsar.Result.Ok]
    client = SimpleNamespace(create_producer=lambda *_, **__: door.producer, close=door.end)
    monkeypatch.setattr(source.DelayLevelClient, "from_connection", lambda *_, **__: client)
    with pytest.raises(UnconfirmedMessagesError, match="Timeout: 1"):
        write([{"value": text, "due": None, "target": "orders"} for text in "abc"])


def test_a_level_topic_must_exist(memory: MemoryPulsar) -> None:
    row = {"value": "x", "due": None}
    with pytest.raises(LevelTopicError, match="levels create"):
        write([row], target="others")


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (schema_of("due", "target"), "lack column value"),
        (schema_of("value", "target"), "lack column due"),
        (schema_of("value", "due"), "lack column target, or option target"),
        (schema_of("value", "due", "target", size=IntegerType()), "column size is unknown"),
        (schema_of("value", "target", due=StringType()), "due is string: cast it to timestamp"),
        (schema_of("due", "target", value=IntegerType()), "cast it to binary or string"),
    ],
)
def test_rows_that_are_no_messages_are_refused(schema: StructType, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ScheduleWriter(WriteOptions.parse({}), schema)


def test_options_of_a_write() -> None:
    found = WriteOptions.parse(
        {"TARGET": "orders", "levelTopic": "l", "adminUrl": "http://a:1", "path": "unused"}
    )
    assert found == WriteOptions((("admin_url", "http://a:1"),), "orders", "l")
    with pytest.raises(ConfigError, match="unknown option 'levelTopics'"):
        WriteOptions.parse({"levelTopics": "orders"})
    schema = schema_of("due", "target", value=BinaryType())
    with pytest.raises(ConfigError, match='mode\\("append"\\)'):
        DelayLevelDataSource({}).writer(schema, overwrite=True)
