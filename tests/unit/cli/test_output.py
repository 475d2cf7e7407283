"""Tests of tables, JSON, and the formats of times and durations."""

from __future__ import annotations

import json
from datetime import timedelta

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.cli.options import DURATION, TIME, parse_time_ms
from delaylevel.cli.views.output import emit
from delaylevel.cli.views.tables import Column, render
from delaylevel.model.formatting import format_instant, parse_duration

COLUMNS = (
    Column("name"),
    Column("backlog", "number"),
    Column("due_ms", "time"),
    Column("lateness_ms", "duration", wide=True),
)
ROWS = [
    {"name": "orders-delay-level", "backlog": 12345, "due_ms": 0, "lateness_ms": 65_000},
    {"name": "b", "backlog": None, "due_ms": None, "lateness_ms": None},
]


def test_a_table_has_no_borders_and_aligned_columns() -> None:
    assert render(ROWS, COLUMNS).splitlines() == [
        "NAME                 BACKLOG   DUE",
        "orders-delay-level    12,345   1970-01-01T00:00:00Z",
        "b                          -   -",
    ]


def test_without_rows_json_is_valid_and_a_table_is_a_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    emit([], COLUMNS, "json")
    assert json.loads(capsys.readouterr().out) == []
    emit([], COLUMNS, "jsonl")
    assert capsys.readouterr().out == ""
    emit([], COLUMNS, "table", empty="No levels.")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "No levels.\n")


@given(st.integers(min_value=100_000_000_000, max_value=4_102_444_800_000))
def test_a_printed_time_can_be_parsed(time_ms: int) -> None:
    assert parse_time_ms(format_instant(time_ms), 0) == time_ms
    assert parse_time_ms(str(time_ms), 0) == time_ms


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", timedelta(seconds=90)),
        ("15m", timedelta(minutes=15)),
        ("2h", timedelta(hours=2)),
        ("3d", timedelta(days=3)),
        ("1h30m", timedelta(minutes=90)),
        ("250ms", timedelta(milliseconds=250)),
        ("1.5h", timedelta(minutes=90)),
        ("2W", timedelta(weeks=2)),
    ],
)
def test_durations_are_parsed(text: str, expected: timedelta) -> None:
    assert parse_duration(text) == expected
    assert DURATION.convert(text, None, None) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("now", 5_000),
        ("+2h", 7_205_000),
        ("-5s", 0),
        ("1970-01-01T00:00:01Z", 1_000),
        ("1970-01-01T02:00:01+02:00", 1_000),
        ("1970-01-01T00:00:01.250z", 1_250),
        ("1763711259250", 1_763_711_259_250),
    ],
)
def test_times_are_parsed(text: str, expected: int) -> None:
    assert parse_time_ms(text, now_ms=5_000) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("2030-01-31T12:00:00", "no time zone"),
        ("2030-01-31", "no time zone"),
        ("1763711259", "seconds"),
        ("tomorrow", "is no time"),
        ("", "is no time"),
        ("+soon", "is no duration"),
    ],
)
def test_a_wrong_time_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_time_ms(text, now_ms=0)
    with pytest.raises(click.BadParameter, match=reason):
        TIME.convert(text, None, None)
