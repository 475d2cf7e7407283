"""Printing: results on stdout as a table or JSON, everything else on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import click

from .tables import Column, render, render_one
from .terminal import width_of, wrapped

#: Time between two lines about what takes long.
LINE_EVERY_S = 10.0


def emit(
    rows: Iterable[Mapping[str, Any]],
    columns: Sequence[Column],
    output: str = "table",
    *,
    empty: str = "Nothing to show.",
    legend: str = "",
) -> None:
    """Print rows on stdout, those before an error too; a legend and what is cut are for terminals.

    For a table without rows, print ``empty`` on stderr instead.
    """
    if output == "jsonl":
        for row in rows:
            click.echo(json.dumps(row))
        return
    listed: list[Mapping[str, Any]] = []
    try:
        for row in rows:
            listed.append(row)
    except BaseException:
        if listed:
            emit(listed, columns, output, legend=legend)
        raise
    if output == "json":
        click.echo(json.dumps(listed, indent=2))
    elif not listed:
        note(empty)
    else:
        _print(render(listed, columns, width_of(sys.stdout)), legend)


def emit_one(
    item: Mapping[str, Any], columns: Sequence[Column], output: str = "table", *, legend: str = ""
) -> None:
    """Print one item on stdout; see `emit`."""
    if output in ("json", "jsonl"):
        click.echo(json.dumps(item, indent=2 if output == "json" else None))
    else:
        _print(render_one(item, columns, width_of(sys.stdout)), legend)


def _print(text: str, legend: str) -> None:
    click.echo(text)
    if legend and sys.stdout.isatty():  # for people who read it there
        note(legend)


def note(message: str) -> None:
    """Print a message on stderr, out of the way of the result and whatever the log's level."""
    width = width_of(sys.stderr)
    with contextlib.suppress(OSError):  # nothing ends because its log cannot be written
        click.echo("\n".join(wrapped(line, width) for line in message.splitlines()), err=True)


class Progress:
    """The progress of a task with many messages: a line now and then."""

    def __init__(self, label: str = "Reading") -> None:
        self._label = label
        self._done = 0
        self._line_s = time.monotonic()

    def update(self, messages: int) -> None:
        """Add a number of messages that are done."""
        self._done += messages
        now_s = time.monotonic()
        if now_s - self._line_s >= LINE_EVERY_S:
            self._line_s = now_s
            note(f"{self._label}: {self._done:,} messages so far.")


def finish(
    rows: Iterable[tuple[Mapping[str, Any], bool]],
    columns: Sequence[Column],
    output: str,
    *,
    others: int = 0,
    empty: str,
) -> None:
    """Print rows of messages, each with true if it is done; exit code 1 unless all are.

    Of ``others``, which have no row, none is done.
    """
    done, of = 0, others

    def counted() -> Iterator[Mapping[str, Any]]:
        nonlocal done, of
        for row, is_done in rows:
            done += is_done
            of += 1
            yield row

    emit(counted(), columns, output, empty=empty)
    if 0 < of != done:
        note(f"{done:,} of {of:,} messages are done; OUTCOME and REASON say what became of others.")
    elif not of and output in ("json", "jsonl"):
        note(empty)
    if not of or done != of:
        click.get_current_context().exit(1)
