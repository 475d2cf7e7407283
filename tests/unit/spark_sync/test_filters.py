"""Tests of bounds from Spark's filters, and of duplicate rows; neither needs Spark."""

from __future__ import annotations

import operator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from support.seeds import examples

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from delaylevel.errors import StepsError
from delaylevel.model.level_topic import Role
from delaylevel.model.position import SourcePartition
from delaylevel.spark_sync.batch_source import due_window, may_match
from delaylevel.spark_sync.steps import DuplicateCheck
from delaylevel.topics.scan import ALWAYS

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
DUE = ("due",)
TOPIC = "persistent://public/default/orders-delay-level-partition-3"
SOURCE = SourcePartition(TOPIC.removesuffix("-partition-3"), TOPIC, Role.LEVEL, 1, 3, 0)

thorough = examples(60)


def moment(microseconds: int) -> datetime:
    return EPOCH + timedelta(microseconds=microseconds)


MEANING: dict[Any, Any] = {
    EqualTo: operator.eq,
    EqualNullSafe: operator.eq,
    GreaterThan: operator.gt,
    GreaterThanOrEqual: operator.ge,
    LessThan: operator.lt,
    LessThanOrEqual: operator.le,
}
filters = st.lists(st.tuples(st.sampled_from(list(MEANING)), st.integers(-3000, 9000)), max_size=4)


@given(filters, st.integers(-3, 9))
@thorough
def test_the_window_is_exact_for_comparisons_of_due(
    pushed: list[tuple[Any, int]], due_ms: int
) -> None:
    window = due_window([kind(DUE, moment(at)) for kind, at in pushed])
    assert (due_ms in window) == all(MEANING[kind](due_ms * 1000, at) for kind, at in pushed)


@given(st.lists(st.integers(-3000, 9000), min_size=1, max_size=5), st.integers(-3, 9))
@thorough
def test_a_list_of_due_times_is_within_the_window(listed: list[int], due_ms: int) -> None:
    window = due_window([In(DUE, tuple(moment(at) for at in listed))])
    assert due_ms in window or due_ms * 1000 not in listed


@pytest.mark.parametrize(
    "item",
    [
        IsNotNull(DUE),
        IsNull(DUE),
        Not(EqualTo(DUE, moment(0))),
        EqualNullSafe(DUE, None),
        EqualTo(DUE, datetime(2030, 1, 1)),
        EqualTo(DUE, "2030-01-01"),
        In(DUE, ()),
        In(DUE, (moment(0), None)),
        GreaterThan(("publish_time",), moment(0)),
        GreaterThan(("due", "inner"), moment(0)),
    ],
)
def test_other_filters_do_not_bound_the_due_time(item: Any) -> None:
    assert due_window([item]) == ALWAYS


def test_a_bound_after_the_latest_datetime_is_valid() -> None:
    latest = datetime.max.replace(tzinfo=timezone.utc)
    assert due_window([GreaterThan(DUE, latest)]).from_ms == 253_402_300_800_000


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (EqualTo(("topic",), TOPIC), True),
        (EqualTo(("topic",), TOPIC[:-1] + "4"), False),
        (EqualTo(("level_topic",), TOPIC), False),
        (EqualTo(("role",), "level"), True),
        (EqualTo(("role",), "held"), False),
        (EqualNullSafe(("level",), 2), False),
        (GreaterThan(("partition",), 3), False),
        (GreaterThanOrEqual(("partition",), 3), True),
        (LessThan(("partition",), 3), False),
        (LessThanOrEqual(("partition",), 3), True),
        (In(("partition",), (1, 3)), True),
        (In(("partition",), (1, 2)), False),
        (In(("partition",), (1, None)), True),
        (EqualTo(("partition",), "4"), True),
        (EqualNullSafe(("level",), None), True),
        (Not(EqualTo(("level",), 1)), True),
        (StringStartsWith(("topic",), "x"), True),
        (EqualTo(("key",), "x"), True),
    ],
)
def test_filters_exclude_partitions(item: Any, expected: bool) -> None:
    assert may_match([item], SOURCE) is expected
    assert may_match([IsNotNull(DUE), item], SOURCE) is expected


# -- duplicate rows


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


@given(st.lists(st.lists(position, max_size=12, unique=True), max_size=4), st.booleans())
@thorough
def test_duplicates_in_order_are_refused(
    parts: list[list[tuple[str, int, int, int]]], again: bool
) -> None:
    """Refuse exactly the duplicates among rows in the order of positions."""
    positions = sorted(set().union(*map(set, parts)))
    check_all(*(rows(*positions[i : i + 5]) for i in range(0, len(positions), 5)))
    if again and positions:
        twice = sorted([*positions, positions[len(positions) // 2]])
        with pytest.raises(StepsError, match="came twice"):
            check_all(*(rows(*twice[i : i + 5]) for i in range(0, len(twice), 5)))


@given(st.lists(position, max_size=40), st.integers(1, 7))
@thorough
def test_distinct_rows_in_any_order_are_never_refused(
    positions: list[tuple[str, int, int, int]], size: int
) -> None:
    different = list(dict.fromkeys(positions))
    check_all(*(rows(*different[i : i + size]) for i in range(0, len(different), size)))


def test_duplicates_out_of_order_are_refused() -> None:
    check_all(rows())
    with pytest.raises(StepsError, match="message at 7:1:-1 of a came twice"):
        check_all(rows(("a", 7, 3, -1), ("a", 7, 1, -1)), rows(("a", 7, 2, -1), ("a", 7, 1, -1)))
    with pytest.raises(StepsError, match="of b"):
        check_all(rows(("b", 7, 3, 0)), rows(("a", 7, 3, 0), ("b", 7, 3, 0)))
