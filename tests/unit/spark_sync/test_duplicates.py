"""Tests of the detection of duplicate rows; without Spark."""

from __future__ import annotations

import pytest

from support.seeds import examples

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.errors import StepsError
from delaylevel.spark_sync.steps import DuplicateCheck

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
