"""Tests of the emulated terminal and of pictures of it."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from support.loading import load

pyte = pytest.importorskip("pyte")
TOOL = load("tools/terminal_screen.py")
SVG = "{http://www.w3.org/2000/svg}"


def picture(text: str, columns: int = 20, lines: int = 3) -> Any:
    screen = TOOL.WrapScreen(columns, lines)
    pyte.Stream(screen).feed(text)
    return ElementTree.fromstring(TOOL.picture_of(screen, "a <title>"))


def test_a_picture_has_words_at_their_cells_and_bars() -> None:
    root = picture("a  <b>\r\n \x1b[31mred\x1b[0m ██▌")
    title, *words = root.findall(f"{SVG}text")
    assert root.findtext(f"{SVG}title") == title.text == "a <title>"
    assert [word.text for word in words] == ["a", "<b>", "red"]
    first, second, red = words
    cell = float(second.attrib["textLength"]) / 3
    assert float(second.attrib["x"]) - float(first.attrib["x"]) == 3 * cell
    assert red.attrib["style"] == f"fill: {TOOL.COLOURS['red']}"
    assert float(red.attrib["y"]) > float(first.attrib["y"]) == float(second.attrib["y"])
    ground, bar = root.findall(f"{SVG}rect")
    assert float(bar.attrib["width"]) == 2.5 * cell
    assert ground.attrib["width"] == root.attrib["width"]


def test_its_size_depends_only_on_the_terminal() -> None:
    one, other = picture("text"), picture("more\r\ntext")
    assert one.attrib == other.attrib
    assert picture("text", 40).attrib["width"] > one.attrib["width"]


def test_a_row_that_continues_in_the_next_is_noticed() -> None:
    for text, continued in (("x" * 20, []), ("x" * 21, ["x" * 20]), ("\x1b[?7l" + "x" * 30, [])):
        screen = TOOL.WrapScreen(20, 3)
        pyte.Stream(screen).feed(text)
        assert screen.continued == continued


def test_a_program_sees_a_terminal_of_the_given_size() -> None:
    program = (
        "import os, sys, time\n"
        "print(os.get_terminal_size().columns, sys.stdout.isatty(), flush=True)\n"
        "time.sleep(30)\n"
    )
    with TOOL.Terminal([sys.executable, "-c", program], 72, 5) as terminal:
        terminal.wait_for(lambda rows: rows == ["72 True"])
        with pytest.raises(TimeoutError, match="72 True"):
            terminal.wait_for(lambda rows: False, 0.1)
    assert terminal.process.poll() is not None
    with TOOL.Terminal([sys.executable, "-c", "print(1); raise SystemExit(3)"]) as terminal:
        assert terminal.wait(30) == 3
        assert terminal.rows == ["1"]
