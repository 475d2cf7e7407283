"""Tests of the columns of a pending message, equal in every form, and of bounded chunks."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa

from delaylevel.inspection.columns import in_chunks, nullable_schema_of, schema_of, to_record_batch
from delaylevel.model.level_topic import Role
from delaylevel.model.message import LazyMessage, ParkedMessage
from delaylevel.model.position import SourcePartition

FAMILY = "persistent://public/default/orders-delay-level"
ORDERS = "persistent://public/default/orders"
LEVEL = SourcePartition(FAMILY, f"{FAMILY}-partition-3", Role.LEVEL, 0, 3, 0)
WINDOW = SourcePartition(FAMILY, f"{ORDERS}-partition-0", Role.WINDOW, 1, 0, 0)
DUE = 1_800_000_000_123
FULL = {"delaylevel.due": str(DUE), "delaylevel.target": ORDERS, "delaylevel.id": "mine"}
MESSAGES = [
    ParkedMessage(7, 0, -1, DUE - 1000, "", "", 0, {}, None),
    ParkedMessage(7, 1, 2, DUE - 2000, "k", "o", 5, FULL, b"body"),
    ParkedMessage(7, 2, -1, DUE, "", "", 0, {**FULL, "delaylevel.due": "soon"}, b""),
]


def values(source: SourcePartition, *names: str, **constants: object) -> list[tuple[Any, ...]]:
    batch = to_record_batch(MESSAGES, source, schema_of(names), constants)
    return list(zip(*(column.to_pylist() for column in batch.columns), strict=True))


def test_missing_values_are_null() -> None:
    assert values(LEVEL, "due_ms", "delay_ms", "key", "ordering_key", "event_ms", "value") == [
        (None, None, None, None, None, None),
        (DUE, 2000, "k", "o", 5, b"body"),
        (None, None, None, None, None, b""),
    ]
    assert values(LEVEL, "size", "id", "ledger", "entry", "batch") == [
        (0, "public/default/orders-delay-level-partition-3:7:0:-1", 7, 0, -1),
        (4, "mine", 7, 1, 2),
        (0, "mine", 7, 2, -1),
    ]


def test_times_are_the_same_in_both_forms() -> None:
    names = ("due", "event_time", "publish_time", "routed_at")
    found = to_record_batch(MESSAGES, LEVEL, schema_of(names), {"routed_at": DUE + 1})
    ms = [
        column.cast(pa.timestamp("ms", tz="UTC")).cast(pa.int64()).to_pylist()
        for column in found.columns
    ]
    other = values(LEVEL, "due_ms", "event_ms", "publish_ms")
    assert list(zip(*ms, strict=True)) == [(*row, DUE + 1) for row in other]


@pytest.mark.parametrize("schema", [schema_of, nullable_schema_of])
def test_properties_fit_both_schemas(schema: Any) -> None:
    found = to_record_batch(MESSAGES, LEVEL, schema(["properties"]), {})
    assert found.schema == schema(["properties"])
    assert [dict(one) for one in found.column(0).to_pylist()] == [
        message.properties for message in MESSAGES
    ]


class Fake:
    """A fake message object of the client's native core."""

    def __init__(self, message: ParkedMessage) -> None:
        self._message = message

    def publish_timestamp(self) -> int:
        return self._message.publish_ms

    def partition_key(self) -> str:
        return self._message.key

    def ordering_key(self) -> str:
        return self._message.ordering_key

    def event_timestamp(self) -> int:
        return self._message.event_ms

    def has_null_value(self) -> bool:
        return self._message.value is None

    def data(self) -> bytes:
        return self._message.value or b""

    def length(self) -> int:
        return len(self.data())


def test_a_message_fetched_on_demand_has_the_same_columns() -> None:
    lazy = [
        LazyMessage(Fake(one), one.ledger, one.entry, one.batch, one.due_ms, one.properties)
        for one in MESSAGES
    ]
    names = ("due_ms", "id", "key", "ordering_key", "event_ms", "publish_ms", "size", "value")
    schema = schema_of((*names, "ledger", "entry", "batch", "properties"))
    assert to_record_batch(lazy, LEVEL, schema, {}) == to_record_batch(MESSAGES, LEVEL, schema, {})


def test_chunks_end_at_a_number_of_rows_or_bytes() -> None:
    one = MESSAGES[1]
    assert [len(chunk) for chunk in in_chunks([one] * 5, 2, 1000)] == [2, 2, 1]
    assert [len(chunk) for chunk in in_chunks([one] * 5, 100, 9)] == [3, 2]
    assert [len(chunk) for chunk in in_chunks([one] * 4, 2, 1000)] == [2, 2]
    assert list(in_chunks([], 2, 1000)) == []
