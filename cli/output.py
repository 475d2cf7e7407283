"""Printing: results on stdout as a table or JSON, everything else on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import click

from delaylevel.model.formatting import format_duration, format_instant

FORMATS = ("table", "wide", "json", "jsonl")
Kind = Literal["text", "number", "time", "duration"]


@dataclass(frozen=True)
class Column:
    """A column: its stable JSON key, and its form in a table.

    Args:
        key: the key in JSON; a time or duration is an ``int`` in ms, and its key ends in ``_ms``.
        kind: the form of the values; ``time`` prints ISO-8601 UTC, ``duration`` prints ``1h05m``,
            and numbers and durations are aligned to the right.
        head: the column header; by default the key in capitals, without ``_MS``.
        wide: True for a column that only ``-o wide`` shows.
    """

    key: str
    kind: Kind = "text"
    head: str | None = None
    wide: bool = False

    @property
    def title(self) -> str:
        """The column header."""
        return self.head or self.key.removesuffix("_ms").replace("_", " ").upper()


def format_time(time_ms: int) -> str:
    """Return ms since the epoch as ISO-8601 UTC, e.g. ``2026-11-21T07:45:00.250Z``."""
    return format_instant(time_ms)


def render(
    rows: Iterable[Mapping[str, Any]],
    columns: Sequence[Column],
    output: str = "table",
    *,
    empty: str = "Nothing to show.",
) -> str:
    """Return rows as text, without a newline at the end.

    Args:
        rows: the rows, one mapping each; a table leaves out keys without a column, JSON keeps them.
        columns: the columns of the table, from left to right.
        output: one of ``FORMATS``.
        empty: the text for a table without rows.
    """
    listed = list(rows)
    if output == "json":
        return json.dumps(listed, indent=2, default=_plain)
    if output == "jsonl":
        return "\n".join(json.dumps(row, default=_plain) for row in listed)
    if not listed:
        return empty
    shown = [column for column in columns if output == "wide" or not column.wide]
    cells = [[column.title for column in shown]]
    cells += [[_cell(row.get(column.key), column.kind) for column in shown] for row in listed]
    widths = [max(len(line[i]) for line in cells) for i in range(len(shown))]
    right = [column.kind in ("number", "duration") for column in shown]
    return "\n".join(
        "   ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in cells
    )


def render_one(item: Mapping[str, Any], columns: Sequence[Column], output: str = "table") -> str:
    """Return one item as text: a line for each column, or a JSON object."""
    if output == "json":
        return json.dumps(item, indent=2, default=_plain)
    if output == "jsonl":
        return json.dumps(item, default=_plain)
    shown = [column for column in columns if output == "wide" or not column.wide]
    width = max((len(column.title) for column in shown), default=0)
    return "\n".join(
        f"{column.title.ljust(width)}   {_cell(item.get(column.key), column.kind)}".rstrip()
        for column in shown
    )


def emit(
    rows: Iterable[Mapping[str, Any]],
    columns: Sequence[Column],
    output: str = "table",
    *,
    empty: str = "Nothing to show.",
) -> None:
    """Print rows on stdout. For a table without rows, print ``empty`` on stderr instead."""
    listed = list(rows)
    if not listed and output in ("table", "wide"):
        note(empty)
        return
    text = render(listed, columns, output)
    if text:
        click.echo(text)


def emit_one(item: Mapping[str, Any], columns: Sequence[Column], output: str = "table") -> None:
    """Print one item on stdout."""
    click.echo(render_one(item, columns, output))


def note(message: str) -> None:
    """Print a message on stderr, out of the way of the result."""
    click.echo(message, err=True)


class Progress(Protocol):
    """A progress bar, as far as commands use it."""

    def update(self, n_steps: int) -> None:
        """Advance by a number of steps."""


class _Silent:
    def update(self, n_steps: int) -> None:
        """Draw nothing: stderr is not a terminal."""


@contextmanager
def progress(label: str, length: int | None) -> Iterator[Progress]:
    """Draw a bar on stderr while the block runs, if stderr is a terminal.

    Args:
        label: the text in front of the bar.
        length: the number of steps, or None if it is unknown; then no bar is drawn.
    """
    if length is None or not sys.stderr.isatty():
        yield _Silent()
        return
    with click.progressbar(length=length, label=label, file=sys.stderr) as bar:
        yield bar


def _cell(value: Any, kind: Kind) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if kind == "time" and isinstance(value, (int, float)):
        return format_time(int(value))
    if kind == "duration" and isinstance(value, (int, float)):
        return format_duration(value)
    if kind == "number" and isinstance(value, float):
        return f"{value:,.1f}"
    if kind == "number" and isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return ", ".join(str(entry) for entry in value) or "-"
    return str(value).replace("\n", " ")


def _plain(value: Any) -> Any:
    """Return a JSON form of numpy numbers, sets and paths."""
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)
