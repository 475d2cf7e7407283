"""Failures of single messages, and a row for each of several messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from delaylevel.cli.views.output import emit, note
from delaylevel.cli.views.tables import Column
from delaylevel.cli.views.terminal import Tone

_TONES: dict[str, Tone] = {
    "failed": "red",
    "unconfirmed": "red",
    "both": "red",
    "too late": "yellow",
    "unknown": "yellow",
    "still dead": "yellow",
    "not tried": "yellow",
    "not found": "yellow",
}


def outcome_tone(outcome: Any, _: Any) -> Tone | None:
    """Return the colour of an outcome that needs attention."""
    return _TONES.get(outcome)


def failure_view(error: BaseException) -> dict[str, Any]:
    """Return outcome and reason of a call that failed to store something, for a row."""
    # It imports the Pulsar client, and every command imports this module.
    from delaylevel.changes import Failure

    failure = Failure.of(error)
    return {"outcome": failure.outcome, "reason": failure.reason}


def finish(
    rows: Iterable[Mapping[str, Any]],
    columns: Sequence[Column],
    output: str,
    *,
    done: int,
    of: int,
    empty: str,
) -> None:
    """Print a row for each message; end with exit code 1 unless all of them are done.

    Args:
        done: number of messages for which the command did what was asked.
    """
    emit(rows, columns, output, empty=empty)
    if 0 < of != done:
        note(f"{done:,} of {of:,} messages are done; OUTCOME and REASON say what became of others.")
    if not of or done != of:
        click.get_current_context().exit(1)
