"""Printing: results on stdout as a table or JSON, everything else on stderr."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import click

from delaylevel.model.formatting import format_duration, format_instant

from . import logs

FORMATS = ("table", "wide", "json", "jsonl")
Kind = Literal["text", "number", "time", "duration", "size"]


@dataclass(frozen=True)
class Column:
    """A column: its stable JSON key, and its form in a table.

    Args:
        key: the key in JSON; a time or duration is an ``int`` in ms, and its key ends in ``_ms``.
        kind: the form of the values; ``time`` prints ISO-8601 UTC, ``duration`` prints ``1h05m``,
            ``size`` prints ``2.5 MB``, and numbers and durations are aligned to the right.
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


def render(
    rows: Iterable[Mapping[str, Any]], columns: Sequence[Column], output: str = "table"
) -> str:
    """Return rows as text, without a newline at the end.

    A table leaves out keys without a column; JSON keeps them.
    """
    listed = list(rows)
    if output == "json":
        return json.dumps(listed, indent=2, default=_plain)
    if output == "jsonl":
        return "\n".join(json.dumps(row, default=_plain) for row in listed)
    shown = _shown(columns, output)
    cells = [[column.title for column in shown]]
    cells += [[_cell(row.get(column.key), column.kind) for column in shown] for row in listed]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
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
    if output in ("json", "jsonl"):
        return json.dumps(item, indent=2 if output == "json" else None, default=_plain)
    shown = _shown(columns, output)
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
    if listed or output == "json":
        click.echo(render(listed, columns, output))
    elif output != "jsonl":
        note(empty)


def emit_one(item: Mapping[str, Any], columns: Sequence[Column], output: str = "table") -> None:
    """Print one item on stdout."""
    click.echo(render_one(item, columns, output))


def note(message: str) -> None:
    """Print a message on stderr, out of the way of the result."""
    logs.tell(message)


def is_live() -> bool:
    """Return True if stderr is a terminal that may be drawn on."""
    return sys.stderr.isatty() and not logs.is_json()


def progress(label: str, length: int | None) -> Any:
    """Return a bar that is drawn on stderr while it is open, if stderr is a terminal.

    It is not drawn if the length, a number of steps, is unknown.
    """
    drawn = length is not None and is_live()
    file = sys.stderr if drawn else io.StringIO()
    return click.progressbar(length=length or 0, label=label, file=file)


def _shown(columns: Sequence[Column], output: str) -> list[Column]:
    return [column for column in columns if output == "wide" or not column.wide]


def _cell(value: Any, kind: Kind) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        if kind == "time":
            return format_instant(int(value))
        if kind == "duration":
            return format_duration(value)
        if kind == "size":
            return _size_text(value)
        if kind == "number":
            return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "-"
    return str(value).replace("\n", " ")


def _size_text(size: float) -> str:
    if size < 1000:
        return f"{size:.0f} B"
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 1000:
            return f"{size:,.1f} {unit}"
    return f"{size / 1000:,.1f} TB"


def _plain(value: Any) -> Any:
    """Return a JSON form of numpy numbers, sets and paths."""
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)
