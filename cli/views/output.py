"""Printing: results on stdout as a table or JSON, everything else on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
) -> None:
    """Print rows on stdout, those before an error too; only a terminal gets a table that is cut.

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
        # What a failing command has done already must not be unknown.
        if listed:
            emit(listed, columns, output)
        raise
    if output == "json":
        click.echo(json.dumps(listed, indent=2))
    elif not listed:
        note(empty)
    else:
        click.echo(render(listed, columns, width_of(sys.stdout)))


def emit_one(item: Mapping[str, Any], columns: Sequence[Column], output: str = "table") -> None:
    """Print one item on stdout; see `emit`."""
    if output in ("json", "jsonl"):
        click.echo(json.dumps(item, indent=2 if output == "json" else None))
    else:
        click.echo(render_one(item, columns, width_of(sys.stdout)))


def note_legend(legend: str) -> None:
    """Explain a table on stderr to people who read it on a terminal."""
    if sys.stdout.isatty():
        note(legend)


def note(message: str) -> None:
    """Print a message on stderr, out of the way of the result and whatever the log's level."""
    width = width_of(sys.stderr)
    with contextlib.suppress(OSError):  # nothing ends because its log cannot be written
        click.echo("\n".join(wrapped(line, width) for line in message.splitlines()), err=True)


def progress(label: str = "Reading") -> Callable[[int], None]:
    """Return a function that takes numbers of done messages, and prints a line now and then."""
    done, line_s = 0, time.monotonic()

    def update(messages: int) -> None:
        nonlocal done, line_s
        done += messages
        now_s = time.monotonic()
        if now_s - line_s >= LINE_EVERY_S:
            line_s = now_s
            note(f"{label}: {done:,} messages so far.")

    return update


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
