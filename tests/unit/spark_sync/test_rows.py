"""Tests of the rows of the Spark source, and of rows that become messages; without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

import pulsar
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema
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
    StepsError,
    UnconfirmedMessagesError,
)
from delaylevel.inspection.columns import LATEST_MS
from delaylevel.model.level_topic import Role
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import SourcePartition
from delaylevel.spark_sync import source
from delaylevel.spark_sync.arrow_rows import ARROW_SCHEMA, SCHEMA, from_batch, to_batches, values_of
from delaylevel.spark_sync.options import WriteOptions
from delaylevel.spark_sync.source import DelayLevelDataSource, ScheduleWriter
from delaylevel.spark_sync.steps import DuplicateCheck
from delaylevel.testing import MemoryPulsar
from support.openings import Openings, ThreadDoor, openings  # noqa: F401
from support.seeds import examples

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


thorough = examples(60)


def rows(*positions: tuple[str, int, int, int]) -> pa.RecordBatch:
    topics, ledgers, entries, batches = zip(*positions, strict=True) if positions else ([],) * 4
    return pa.RecordBatch.from_arrays(
        [
            pa.array(topics, pa.string()),
            pa.array(ledgers, pa.int64()),
            pa.array(entries, pa.int64()),
            pa.array(batches, pa.int32()),
        ],
        names=["topic", "ledger", "entry", "batch"],
    )


def check_all(*batches: pa.RecordBatch) -> None:
    check = DuplicateCheck()
    for batch in batches:
        check.check(batch)


position = st.tuples(
    st.sampled_from("ab"), st.integers(1, 2), st.integers(0, 4), st.sampled_from((-1, 0, 1))
)


@given(st.lists(position, max_size=40, unique=True).map(sorted), st.integers(1, 7))
@thorough
def test_no_distinct_row_is_refused_and_no_duplicate_accepted(
    positions: list[tuple[str, int, int, int]], size: int
) -> None:
    check_all(*(rows(*positions[i : i + size]) for i in range(0, len(positions), size)))
    if positions:
        twice = sorted([*positions, positions[len(positions) // 2]])
        with pytest.raises(StepsError, match="came twice"):
            check_all(*(rows(*twice[i : i + size]) for i in range(0, len(twice), size)))


def test_the_row_that_came_twice_is_named() -> None:
    check_all(rows())
    with pytest.raises(StepsError, match="message at 7:3:0 of b came twice"):
        check_all(rows(("b", 7, 3, 0)), rows(("a", 7, 3, 0), ("b", 7, 3, 0)))


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
        (
            schema_of("value", "due", "target", size=IntegerType()),
            "column size is int: cast it, or leave it out",
        ),
        (
            schema_of("value", "target", due=StringType()),
            r"due is string: cast it, .* due \(timestamp\)",
        ),
        (
            schema_of("due", "target", value=IntegerType()),
            r"columns are value \(binary or string\)",
        ),
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


def test_times_are_rounded_up() -> None:
    times = pa.array([2000, 1001, None], pa.timestamp("us", tz="UTC"))
    assert values_of(pa.RecordBatch.from_arrays([times], ["due"]), "due") == [2, 2, None]
