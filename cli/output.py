"""What commands print: results on stdout as a table or JSON, everything else on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import click

from delaylevel.model.formatting import format_duration as format_duration
from delaylevel.model.formatting import format_instant

FORMATS = ("table", "wide", "json", "jsonl")
Kind = Literal["text", "number", "time", "duration"]


@dataclass(frozen=True)
class Column:
    """One column: its stable JSON key, and how a table shows it.

    Parameters:
        key: the key in JSON; times and durations are ``int`` milliseconds, the key ends in ``_ms``.
        kind: ``time`` prints ISO-8601 UTC, ``duration`` ``1h05m``; numbers stand to the right.
        head: the table's head; without it, the key in capitals without ``_MS``.
        wide: shown by ``-o wide`` only.
    """

    key: str
    kind: Kind = "text"
    head: str | None = None
    wide: bool = False

    @property
    def title(self) -> str:
        """The head over the column."""
        return self.head or self.key.removesuffix("_ms").replace("_", " ").upper()


def format_time(time_ms: int) -> str:
    """Milliseconds since the epoch as ISO-8601 UTC, e.g. ``2026-11-21T07:45:00.250Z``."""
    return format_instant(time_ms)


def render(
    rows: Iterable[Mapping[str, Any]],
    columns: Sequence[Column],
    output: str = "table",
    *,
    empty: str = "Nothing to show.",
) -> str:
    """Rows as text, without a newline at the end; a pure function.

    Parameters:
        rows: one mapping a row; what no column names is left out of tables and kept in JSON.
        columns: the table's columns, from left to right.
        output: one of ``FORMATS``.
        empty: the table's words for no rows at all.
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
    """One thing as text: a line for each column, or a JSON object; a pure function."""
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
    """Print rows on stdout; where there are none, a table says so on stderr."""
    listed = list(rows)
    if not listed and output in ("table", "wide"):
        note(empty)
        return
    text = render(listed, columns, output)
    if text:
        click.echo(text)


def emit_one(item: Mapping[str, Any], columns: Sequence[Column], output: str = "table") -> None:
    """Print one thing on stdout."""
    click.echo(render_one(item, columns, output))


def note(message: str) -> None:
    """Say something to the person at the terminal, on stderr."""
    click.echo(message, err=True)


def use_color() -> bool:
    """Whether colour may be used on stderr: on a terminal, and NO_COLOR is not set."""
    return not os.environ.get("NO_COLOR") and sys.stderr.isatty()


class Progress(Protocol):
    """What a progress bar is asked to do."""

    def update(self, n_steps: int) -> None:
        """Go on by so many steps."""


class _Silent:
    def update(self, n_steps: int) -> None:
        """Nothing is drawn where nobody watches."""


@contextmanager
def progress(label: str, length: int | None) -> Iterator[Progress]:
    """A bar on stderr while the block runs; nothing at all where stderr is no terminal.

    Parameters:
        label: the words before the bar.
        length: how many steps there are, or None where nobody knows.
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
    """What ``json`` cannot write by itself: numpy's numbers, paths, sets."""
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)
