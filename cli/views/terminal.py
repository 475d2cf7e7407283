"""The terminal: its width, and the cells that a text takes on it."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
import unicodedata
from typing import Any

_COMMAND = re.compile("`[^`]*`")


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
    if cells(text) <= width:
        return text
    tail = text
    while cells(tail) > (width - 1) // 2:
        tail = tail[1:]
    # The space stands for the tail, so that the rest is certainly cut.
    return cut(text.removesuffix(tail) + " ", width - cells(tail)) + tail


def wrapped(text: str, width: int | None, indent: str = "", hanging: str | None = None) -> str:
    """Return prose in lines of at most a number of cells; a longer command keeps its own line."""
    if width is None or cells(indent + text) <= width:
        return indent + text
    # textwrap does not divide at these spaces, so a command in backticks can be copied.
    whole = _COMMAND.sub(lambda found: found[0].replace(" ", "\xa0"), text)
    # It counts characters: a wide one gets a second one.
    whole = "".join(one + "\0" * (_cells_of(one) - 1) for one in whole)
    filled = textwrap.fill(
        whole,
        width,
        initial_indent=indent,
        subsequent_indent=indent if hanging is None else hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled.replace("\xa0", " ").replace("\0", "")


def _cells_of(one: str) -> int:
    if unicodedata.combining(one) or one in "\u200b\u200d\ufe0f":
        return 0
    return 2 if unicodedata.east_asian_width(one) in "WF" else 1
