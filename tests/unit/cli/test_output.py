"""Tests of tables in terminals of any width, of JSON and times, and of what takes long."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from delaylevel import PartitionStrategy
from delaylevel.cli import run
from delaylevel.cli.options import TIME, parse_time_ms
from delaylevel.cli.pending import row_view
from delaylevel.cli.run import ServiceProgress, serving_lines, starting
from delaylevel.cli.views import output
from delaylevel.cli.views.output import emit, finish, progress
from delaylevel.cli.views.tables import Column, render
from delaylevel.cli.views.terminal import cells, cut, printable, wrapped
from delaylevel.errors import BrokerError
from delaylevel.inspection.rows import PendingRow
from delaylevel.model.delivery import ForwardReport
from delaylevel.model.formatting import format_instant
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels
from delaylevel.mover.service import MoverStats
from delaylevel.run import LocalService

FULL = "persistent://public/default/"
COLUMNS = (
    Column("topic", "topic"),
    Column("due_ms", "time", rank=2),
    Column("reason"),
    Column("count", "number", rank=1),
)
LONG = {
    "topic": f"{FULL}{'orders-of-a-team-with-a-long-name' * 2}",
    "due_ms": 1_763_711_259_250,
    "reason": "the target refused it because of its size " * 3,
    "count": 1234,
}


def test_names_are_cut_first_and_columns_are_left_out_by_rank() -> None:
    def heads(width: int) -> str:
        return " ".join(render([LONG], COLUMNS, width=width).splitlines()[0].split())

    assert "…" not in render([LONG], COLUMNS)
    assert [heads(width) for width in (120, 80)] == ["TOPIC DUE REASON COUNT"] * 2
    assert [heads(width) for width in (60, 45)] == ["TOPIC REASON COUNT", "TOPIC REASON"]
    short = {**LONG, "topic": f"{FULL}orders", "reason": "too large"}
    assert "…" not in render([short], COLUMNS, width=60)


TEXT = st.text(
    st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs", "Cc", "Mn")), max_size=60
)


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "topic": st.one_of(st.none(), TEXT, TEXT.map(lambda name: FULL + name)),
                "due_ms": st.one_of(st.none(), st.integers(0, 10**15)),
                "reason": TEXT,
                "count": st.integers(0, 10**12),
            }
        ),
        max_size=4,
    ),
    st.integers(1, 200),
)
def test_no_line_is_wider_than_the_terminal(rows: list[dict[str, Any]], width: int) -> None:
    lines = render(rows, COLUMNS, width=width).splitlines()
    assert len(lines) == len(rows) + 1
    assert all(cells(line) <= width for line in lines)
    assert all(line.isprintable() for line in lines)


def test_control_characters_of_others_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[2Jb\tc\nd") == "a\\x1b[2Jb\\tc d"
    assert "\x1b" not in render([{"reason": "\x1b]0;title\x07"}], COLUMNS[2:3])


def test_wide_characters_take_two_cells() -> None:
    assert cells("注文") == 4
    assert cells("e\u0301") == 1
    assert cut("注文注文", 5) == "注文…"
    lines = render([{"topic": "注文", "count": 1}, {"topic": "ab", "count": 2}], COLUMNS[::3])
    assert [cells(line) for line in lines.splitlines()] == [12] * 3


def test_prose_is_wrapped_between_words_and_commands_stay_whole() -> None:
    text = "no mover is running: `delaylevel mover run orders` moves the messages"
    assert wrapped(text, None, "  ") == f"  {text}"
    assert wrapped(text, 36, "- ", "  ").splitlines() == [
        "- no mover is running:",
        "  `delaylevel mover run orders`",
        "  moves the messages",
    ]
    # A command that is too long for the terminal has a line of its own, which can be copied.
    assert "  `delaylevel mover run orders`" in wrapped(text, 20, "  ").splitlines()
    assert wrapped("注文 注文 ab", 9).splitlines() == ["注文 注文", "ab"]


@pytest.mark.parametrize(("value", "shown"), [(b"", ""), (None, "-"), (b"pay", "pay")])
def test_an_empty_payload_is_empty_in_a_table(value: bytes | None, shown: str) -> None:
    fields: dict[str, Any] = {**dict.fromkeys(PendingRow._fields, 0), "value": value}
    row = row_view(PendingRow(**fields), True, "table")
    assert render([row], [Column("payload")]).split("\n") == ["PAYLOAD", shown]


def test_a_table_has_no_borders_and_aligned_columns() -> None:
    columns = (Column("name"), Column("count", "number"), Column("due_ms", "time"))
    rows = [
        {"name": "orders-delay-level", "count": 12345, "due_ms": 0},
        {"name": "b", "count": None, "due_ms": None},
    ]
    assert render(rows, columns).splitlines() == [
        "NAME                 COUNT  DUE",
        "orders-delay-level  12,345  1970-01-01T00:00:00Z",
        "b                        -  -",
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


@pytest.mark.parametrize("output", ["table", "json", "jsonl"])
def test_a_command_that_finds_nothing_fails_and_says_so(output: str) -> None:
    command = click.Command("cancel", callback=lambda: finish([], COLUMNS, output, empty="None."))
    answer = CliRunner().invoke(command)
    assert (answer.exit_code, answer.stderr) == (1, "None.\n")


@pytest.mark.parametrize("output", ["table", "json", "jsonl"])
def test_rows_before_an_error_are_printed(output: str, capsys: pytest.CaptureFixture[str]) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield LONG
        raise BrokerError("no answer")

    with pytest.raises(BrokerError):
        emit(rows(), COLUMNS, output)
    assert LONG["reason"] in capsys.readouterr().out


@given(st.integers(min_value=100_000_000_000, max_value=4_102_444_800_000))
def test_a_printed_time_can_be_parsed(time_ms: int) -> None:
    assert parse_time_ms(format_instant(time_ms), 0) == time_ms
    assert parse_time_ms(str(time_ms), 0) == time_ms


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("now", 5_000),
        ("+2h", 7_205_000),
        ("+1.5h", 5_405_000),
        ("+1h30m", 5_405_000),
        ("+250ms", 5_250),
        ("+2W", 1_209_605_000),
        ("-5s", 0),
        ("1970-01-01T02:00:01+02:00", 1_000),
        ("1970-01-01T00:00:01.250z", 1_250),
    ],
)
def test_times_and_durations_are_parsed(text: str, expected: int) -> None:
    assert parse_time_ms(text, now_ms=5_000) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("2030-01-31T12:00:00", "no time zone"),
        ("2030-01-31", "no time zone"),
        ("1763711259", "seconds"),
        ("tomorrow", "is no time"),
        ("+soon", "is no duration"),
    ],
)
def test_a_wrong_time_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(click.BadParameter, match=reason):
        TIME.convert(text, None, None)


@pytest.mark.parametrize("every_s", [0.0, 1e9])
def test_a_task_that_takes_long_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], every_s: float
) -> None:
    monkeypatch.setattr(output, "LINE_EVERY_S", every_s)
    tell = progress()
    tell(2000)
    tell(500)
    said = ["Reading: 2,000 messages so far.", "Reading: 2,500 messages so far."]
    assert capsys.readouterr().err.splitlines() == (said if every_s == 0 else [])


def test_the_reason_is_shown_until_the_service_is_ready(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "LINE_EVERY_S", 0)
    monkeypatch.setattr(run, "_LOOK_EVERY_S", 0.001)
    reason, asked = "no dispatcher owns partition 0 yet", threading.Semaphore(0)

    def waiting() -> str:
        asked.release()
        return reason

    with starting("orders", waiting, lambda: ["orders", "Ctrl-C ends it."]) as ready:
        for _ in range(3):
            assert asked.acquire(timeout=60)
        assert not ready.is_set()
        reason = ""
        assert ready.wait(60)
    first, *reasons, last, one, two = capsys.readouterr().err.splitlines()
    assert (first, one, two) == ("Starting orders.", "orders", "Ctrl-C ends it.")
    assert last.startswith("Ready after ")
    assert {line.partition(": ")[2] for line in reasons} == {"no dispatcher owns partition 0 yet."}


def test_totals_are_told_if_they_have_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "_TOTALS_EVERY_S", 0.0)
    orders = MoverStats("standby", "delaylevel-run@host:1")
    released: Counter[str] = Counter()
    service = SimpleNamespace(
        movers=SimpleNamespace(stats=lambda: {"orders": orders}),
        dispatcher=SimpleNamespace(released=lambda: released),
        moves=True,
    )
    ready = threading.Event()
    shown = ServiceProgress(cast(LocalService, service), ready)
    shown.show()
    ready.set()
    shown.show()
    shown.show()
    orders = MoverStats("failing")
    shown.show()
    orders = MoverStats("moving", counts=ForwardReport(window=1_200).counts())
    released["orders"] = 600
    shown.show()
    shown.show()
    assert capsys.readouterr().err.splitlines() == [
        "orders: on standby, delaylevel-run@host:1 moves its messages",
        "0 messages moved, 0 released.",
        "orders: moving its messages",
        "1,200 messages moved, 600 released.",
    ]


def test_a_service_tells_what_it_serves_and_what_not() -> None:
    described = LevelTopicDescription(
        "_billing", Levels(PartitionStrategy()), ("orders", "invoices")
    )
    assert serving_lines([described], {"old": "it is missing"}, "It is tried again.") == [
        "_billing for invoices and 1 more",
        "NOT SERVED: old: it is missing. It is tried again.",
    ]
