"""Tests of tables in terminals of any width."""

from __future__ import annotations

from typing import Any

import click
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.cli.views.tables import Column, red_if_any, render, render_one
from delaylevel.cli.views.terminal import cells, cut, printable, wrapped

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


def heads(text: str) -> list[str]:
    return text.splitlines()[0].split()


def test_names_are_cut_first_and_columns_are_left_out_by_rank() -> None:
    whole = render([LONG], COLUMNS)
    assert "…" not in whole
    assert heads(render([LONG], COLUMNS, width=120)) == ["TOPIC", "DUE", "REASON", "COUNT"]
    assert heads(render([LONG], COLUMNS, width=80)) == ["TOPIC", "DUE", "REASON", "COUNT"]
    assert heads(render([LONG], COLUMNS, width=60)) == ["TOPIC", "REASON", "COUNT"]
    assert heads(render([LONG], COLUMNS, width=45)) == ["TOPIC", "REASON"]
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
