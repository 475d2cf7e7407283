"""Printing: results on stdout as a table or JSON, everything else on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from . import logs
from .tables import Column, render, render_one
from .terminal import has_colour, width_of, write

FORMATS = ("table", "wide", "json", "jsonl")


def emit(
    rows: Iterable[Mapping[str, Any]],
    columns: Sequence[Column],
    output: str = "table",
    *,
    empty: str = "Nothing to show.",
    legend: str = "",
) -> None:
    """Print rows on stdout. For a table without rows, print ``empty`` on stderr instead.

    On a terminal, a table fits the width, and a legend follows it. In a pipe nothing is cut.
    """
    listed = list(rows)
    if output in ("json", "jsonl"):
        if listed or output == "json":
            click.echo(render(listed, columns, output))
    elif not listed:
        note(empty)
    else:
        width, colour = width_of(sys.stdout), has_colour(sys.stdout)
        write(render(listed, columns, output, width=width, colour=colour))
        explain(legend)


def emit_one(
    item: Mapping[str, Any], columns: Sequence[Column], output: str = "table", *, legend: str = ""
) -> None:
    """Print one item on stdout; see `emit`."""
    if output in ("json", "jsonl"):
        click.echo(render_one(item, columns, output))
    else:
        width, colour = width_of(sys.stdout), has_colour(sys.stdout)
        write(render_one(item, columns, output, width=width, colour=colour))
        explain(legend)


def explain(legend: str) -> None:
    """Print a legend on stderr if the result is on a terminal, for people who read it there."""
    if legend and sys.stdout.isatty():
        note(legend)


def note(message: str) -> None:
    """Print a message on stderr, out of the way of the result."""
    logs.tell(message)
