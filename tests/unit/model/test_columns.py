"""Tests of the columns of a pending message, and of bounded chunks."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pyarrow")

from delaylevel.inspection.columns import (
    LATEST_MS,
    in_chunks,
    nullable_schema_of,
    schema_of,
    to_record_batch,
)
from delaylevel.model.level_topic import Role
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import SourcePartition

FAMILY = "persistent://public/default/orders-delay-level"
LEVEL = SourcePartition(FAMILY, f"{FAMILY}-partition-3", Role.LEVEL, 0, 3, 0)
DUE = 1_800_000_000_123
FULL = {"delaylevel.due": str(DUE), "delaylevel.target": "orders", "delaylevel.id": "mine"}
DAMAGED = {**FULL, "delaylevel.due": "soon"}
MESSAGES = [
    ParkedMessage(7, 0, -1, DUE - 1000, "", "", 0, {}, None),
    ParkedMessage(7, 1, 2, DUE - 2000, "k", "o", 5, FULL, b"body"),
    ParkedMessage(7, 2, -1, DUE, "", "", 0, DAMAGED, b""),
]


@pytest.mark.parametrize("schema_of", [schema_of, nullable_schema_of])
def test_missing_values_are_null(schema_of: Any) -> None:
    own_id = "public/default/orders-delay-level-partition-3:7:0:-1"
    rows: dict[str, list[Any]] = {
        "due_ms": [None, DUE, None],
        "delay_ms": [None, 2000, None],
        "publish_ms": [DUE - 1000, DUE - 2000, DUE],
        "event_ms": [None, 5, None],
        "key": [None, "k", None],
        "ordering_key": [None, "o", None],
        "value": [None, b"body", b""],
        "size": [0, 4, 0],
        "id": [own_id, "mine", "mine"],
        "ledger": [7, 7, 7],
        "entry": [0, 1, 2],
        "batch": [-1, 2, -1],
        "properties": [[], list(FULL.items()), list(DAMAGED.items())],
    }
    found = to_record_batch(MESSAGES, LEVEL, schema_of(rows), {})
    assert found.schema == schema_of(rows)
    assert found.to_pydict() == rows


def test_an_event_time_that_no_column_can_have_becomes_the_latest_one() -> None:
    messages = [MESSAGES[1]._replace(event_ms=each) for each in (5, 0, 1 << 62, (1 << 64) - 1)]
    found = to_record_batch(messages, LEVEL, schema_of(["event_time", "event_ms"]), {})
    times, numbers = found.columns
    assert numbers.to_pylist() == [5, None, 1 << 62, (1 << 63) - 1]
    latest_us = 1000 * LATEST_MS
    assert times.cast(numbers.type).to_pylist() == [5000, None, latest_us, latest_us]


def test_chunks_end_at_a_number_of_rows_or_bytes() -> None:
    one = MESSAGES[1]
    assert [len(chunk) for chunk in in_chunks([one] * 5, 2, 1000)] == [2, 2, 1]
    assert [len(chunk) for chunk in in_chunks([one] * 5, 100, 9)] == [3, 2]
    assert [len(chunk) for chunk in in_chunks([one] * 4, 2, 1000)] == [2, 2]
    assert list(in_chunks([], 2, 1000)) == []
