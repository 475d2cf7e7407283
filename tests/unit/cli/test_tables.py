"""Tests of tables in terminals of any width."""

from __future__ import annotations

from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.cli.views.tables import Column, red_if_any, render, render_one
from delaylevel.cli.views.terminal import cells, cut, cut_in_the_middle, printable, wrapped

FULL = "persistent://public/default/"
OTHER = "persistent://shop/billing/"
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


def heads(text: str) -> list[str]:
    return text.splitlines()[0].split()


def test_a_topic_in_the_default_namespace_has_a_short_name() -> None:
    rows = [{"topic": f"{FULL}orders"}, {"topic": f"{OTHER}orders"}]
    assert render(rows, COLUMNS[:1]).split() == ["TOPIC", "orders", "shop/billing/orders"]
    assert render_one(rows[0], COLUMNS[:1]).split() == ["TOPIC", "orders"]
    assert render_one(rows[1], COLUMNS[:1]).split() == ["TOPIC", "shop/billing/orders"]


def test_a_namespace_that_all_rows_share_is_left_out() -> None:
    columns = (Column("topic", "topic"), Column("targets", "topic"))
    rows: list[dict[str, Any]] = [
        {"topic": f"{OTHER}_a-delay-level", "targets": [f"{OTHER}a", f"{OTHER}b"]},
        {"topic": f"{OTHER}_c-delay-level", "targets": []},
    ]
    assert render(rows, columns).splitlines()[1:] == ["_a-delay-level   a, b", "_c-delay-level   -"]
    rows[1]["targets"] = [f"{FULL}c"]
    assert "shop/billing/_a-delay-level" in render(rows, columns)
    # Other texts, such as `all` for a pause, stay as they are.
    assert "all" in render([{"topic": "all"}], columns)


@pytest.mark.parametrize("output", ["wide", "json", "jsonl"])
def test_other_formats_have_full_names_and_all_columns_in_any_width(output: str) -> None:
    text = render([LONG], COLUMNS, output, width=40)
    assert LONG["topic"] in text
    assert LONG["reason"] in text
    assert "1,234" in text or "1234" in text
    assert "…" not in text


def test_times_are_to_the_second_and_wide_has_milliseconds() -> None:
    assert "2025-11-21T07:47:39Z" in render([LONG], COLUMNS)
    assert "2025-11-21T07:47:39.250Z" in render([LONG], COLUMNS, "wide")
    assert render([{"due_ms": 10**18}], COLUMNS[1:2]).endswith(f"{10**18} ms")


def test_names_are_cut_first_and_columns_are_left_out_by_rank() -> None:
    whole = render([LONG], COLUMNS)
    assert "…" not in whole
    assert heads(render([LONG], COLUMNS, width=120)) == ["TOPIC", "DUE", "REASON", "COUNT"]
    assert heads(render([LONG], COLUMNS, width=80)) == ["TOPIC", "DUE", "REASON", "COUNT"]
    assert heads(render([LONG], COLUMNS, width=60)) == ["TOPIC", "REASON", "COUNT"]
    assert heads(render([LONG], COLUMNS, width=45)) == ["TOPIC", "REASON"]
    short = {**LONG, "topic": f"{FULL}orders", "reason": "too large"}
    assert "…" not in render([short], COLUMNS, width=60)


def test_long_names_that_begin_alike_stay_different() -> None:
    rows = [{**LONG, "topic": f"{LONG['topic']}{number}"} for number in range(2)]
    one, two = (line.split()[0] for line in render(rows, COLUMNS, width=60).splitlines()[1:])
    assert one != two
    assert one.endswith("0")
    assert two.endswith("1")


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


def test_colours_mark_what_is_wrong_and_take_no_room() -> None:
    columns = (Column("topic"), Column("count", "number", tone=red_if_any))
    rows = [{"topic": "a", "count": 0}, {"topic": "b", "count": 12}]
    text = render(rows, columns, width=80, colour=True)
    assert click.unstyle(text) == render(rows, columns, width=80)
    head, fine, wrong = text.splitlines()
    assert "\x1b" not in head + fine
    assert wrong.endswith("\x1b[31m   12\x1b[0m")
    assert "\x1b[31m12" in render_one(rows[1], columns, colour=True)
    assert "\x1b" not in render_one(rows[0], columns, colour=True)


def test_a_long_list_has_a_line_for_each_element() -> None:
    columns = (Column("name"), Column("problems"))
    item = {"name": "orders", "problems": ["no mover is running", "a topic is missing"]}
    assert render_one(item, columns).splitlines()[1] == (
        "PROBLEMS   no mover is running, a topic is missing"
    )
    assert render_one(item, columns, width=30).splitlines() == [
        "NAME       orders",
        "PROBLEMS   no mover is running",
        "           a topic is missing",
    ]
    assert render_one(item, columns, width=24).splitlines()[1:3] == [
        "PROBLEMS   no mover is",
        "           running",
    ]


def test_control_characters_of_others_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[2Jb\tc\nd") == "a\\x1b[2Jb\\tc d"
    assert "\x1b" not in render([{"reason": "\x1b]0;title\x07"}], COLUMNS[2:3])


def test_wide_characters_take_two_cells() -> None:
    assert cells("注文") == 4
    assert cells("e\u0301") == 1
    assert cut("注文注文", 5) == "注文…"
    assert cut("\x1b[31morders\x1b[0m", 4) == "\x1b[31mord…\x1b[0m"
    lines = render([{"topic": "注文", "count": 1}, {"topic": "ab", "count": 2}], COLUMNS[::3])
    assert [cells(line) for line in lines.splitlines()] == [13] * 3


@pytest.mark.parametrize(("width", "kept"), [(9, "abcd…wxyz"), (4, "ab…z"), (2, "a…"), (0, "")])
def test_the_middle_of_a_name_is_left_out(width: int, kept: str) -> None:
    assert cut_in_the_middle("abcdefghijklmnopqrstuvwxyz", width) == kept
    assert cut_in_the_middle("abc", 3) == "abc"


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
