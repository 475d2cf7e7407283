"""The terminal: its width, and the cells that a text takes on it."""

from __future__ import annotations

import os
import re
import shutil
import unicodedata
from collections.abc import Iterator
from typing import Any

# Words of prose; commands in backticks stay in one piece, so that they can be copied.
_WORD = re.compile(r"`[^`]*`\S*|\S+")


def width_of(stream: Any) -> int | None:
    """Return the columns of a stream's terminal; None if the stream is no terminal."""
    if not stream.isatty():
        return None
    try:
        # Some pseudo terminals have no size until somebody sets it.
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (AttributeError, ValueError, OSError):
        return shutil.get_terminal_size().columns


def printable(text: str) -> str:
    """Return a text in one line, with control characters written as escapes.

    Keys and payloads come from others: they must not move the cursor.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else " " if one == "\n" else repr(one)[1:-1] for one in text
    )


def cells(text: str) -> int:
    """Return the number of cells that a text takes."""
    return len(text) if text.isascii() else sum(map(_cells_of, text))


def cut(text: str, width: int) -> str:
    """Return a text cut to a number of cells; ``…`` marks the cut."""
    if cells(text) <= width:
        return text
    room, kept = max(0, width - 1), ""
    for one in text:
        room -= _cells_of(one)
        if room < 0:
            break
        kept += one
    return kept + ("…" if width else "")


def cut_in_the_middle(text: str, width: int) -> str:
    """Return a text of which the middle is left out if it is longer than a number of cells."""
    if cells(text) <= width or width < 3:
        return cut(text, width)
    end = len(text)
    while cells(text[end - 1 :]) <= (width - 1) // 2:
        end -= 1
    tail = text[end:]
    return cut(text[:end] + " ", width - cells(tail)) + tail


def padded(text: str, width: int, right: bool = False) -> str:
    """Return a text with spaces up to a number of cells, in front of it if it is on the right."""
    space = " " * (width - cells(text))
    return space + text if right else text + space


def wrapped(text: str, width: int | None, indent: str = "", hanging: str | None = None) -> str:
    """Return prose in lines of at most a number of cells; a longer command keeps its own line."""
    if width is None or cells(indent + text) <= width:
        return indent + text
    return "\n".join(_lines(text, width, indent, indent if hanging is None else hanging))


def _lines(text: str, width: int, indent: str, hanging: str) -> Iterator[str]:
    line, empty = indent, True
    for word in _WORD.findall(text):
        if not empty and cells(line) + 1 + cells(word) > width:
            yield line
            line, empty = hanging, True
        line += word if empty else f" {word}"
        empty = False
    yield line


def _cells_of(one: str) -> int:
    if unicodedata.combining(one) or one in "\u200b\u200d\ufe0f":
        return 0
    return 2 if unicodedata.east_asian_width(one) in "WF" else 1
