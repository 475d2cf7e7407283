"""Tests of tables, JSON, and the formats of times and durations."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.cli.options import DURATION, TIME, parse_time_ms
from delaylevel.cli.views.live import progress
from delaylevel.cli.views.output import emit
from delaylevel.cli.views.tables import Column, render, render_one
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


def test_the_wide_format_shows_more_columns() -> None:
    assert render(ROWS, COLUMNS, "wide").splitlines()[0].split()[-1] == "LATENESS"
    assert render(ROWS, COLUMNS, "wide").splitlines()[1].endswith("1m05s")


def test_json_keeps_keys_and_milliseconds() -> None:
    assert json.loads(render(ROWS, COLUMNS, "json")) == ROWS
    assert [json.loads(line) for line in render(ROWS, COLUMNS, "jsonl").splitlines()] == ROWS
    assert json.loads(render_one(ROWS[0], COLUMNS, "json")) == ROWS[0]


def test_one_item_has_a_line_for_each_column() -> None:
    assert render_one(ROWS[0], COLUMNS).splitlines() == [
        "NAME      orders-delay-level",
        "BACKLOG   12,345",
        "DUE       1970-01-01T00:00:00Z",
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


def test_progress_needs_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("sending", 3) as bar:
        bar.update(3)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_a_time_beyond_the_calendar_is_shown_as_ms() -> None:
    assert format_instant(10**18) == f"{10**18} ms"


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


@pytest.mark.parametrize("text", ["", "5", "-2h", "2 hours", "h", "1h x", "9" * 30 + "d"])
def test_a_wrong_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no duration|longer than"):
        parse_duration(text)
    with pytest.raises(click.BadParameter):
        DURATION.convert(text, None, None)


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


def test_relative_times_use_the_clock_of_this_machine() -> None:
    before = datetime.now(timezone.utc) + timedelta(hours=2)
    given_ms = TIME.convert("+2h", None, None)
    after = datetime.now(timezone.utc) + timedelta(hours=2)
    assert int(before.timestamp() * 1000) <= given_ms <= int(after.timestamp() * 1000) + 1
