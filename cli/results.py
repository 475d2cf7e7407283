"""Results of commands on several messages: a row for each message, whatever becomes of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Any, TypeVar

import click

from delaylevel.cluster.failures import error_name, may_pass
from delaylevel.errors import CancellationFailedError, DelayLevelError

from .hints import with_options
from .output import Column, emit, note
from .terminal import Tone

Item = TypeVar("Item")
Result = TypeVar("Result")

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


@dataclass(frozen=True)
class Failure:
    """The reason for which a message was not changed, or may not have been.

    Attributes:
        outcome: ``failed`` if nothing was changed, ``both`` if a new message was stored and the old
            one was not cancelled, ``unconfirmed`` if nobody knows, or ``not tried`` for messages
            after a failure that is not their own.
        reason: the text of the error.
    """

    outcome: str
    reason: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the failure for the error of a call that stores something."""
        name = error_name(error)
        if isinstance(error, DelayLevelError):
            text = with_options(error)
        else:
            text = f"{name}: {error}" if str(error) else name
        outcome = "failed"
        if may_pass(error):
            outcome = "unconfirmed"
        elif isinstance(error, CancellationFailedError) and error.receipt:
            outcome = "both"
        return cls(outcome, text or name)

    @property
    def view(self) -> dict[str, Any]:
        """The outcome and the reason as a part of a row."""
        return {"outcome": self.outcome, "reason": self.reason}


def for_each(
    items: Sequence[Item], change: Callable[[Item], Result], threads: int = 1
) -> list[Result | Failure]:
    """Change messages, and return the result of each, in their order; no failure ends the command.

    After an interruption, or while the broker does not answer, further messages are not tried.
    """
    ended = Event()
    reason = ""

    def attempt(item: Item) -> Result | Failure:
        nonlocal reason
        if ended.is_set():
            return Failure("not tried", reason)
        try:
            return change(item)
        except Exception as error:
            failure = Failure.of(error)
            if failure.outcome == "unconfirmed":
                reason = "the broker did not confirm another message"
                ended.set()
            return failure

    with ThreadPoolExecutor(max(1, min(threads, len(items))), "delaylevel-change") as pool:
        futures = [pool.submit(attempt, item) for item in items]
        try:
            return [future.result() for future in futures]
        except KeyboardInterrupt:
            reason = "interrupted"
            ended.set()
            note("Interrupted: the messages that are being changed are finished first.")
            return [future.result() for future in futures]


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
        of: number of all messages.
        empty: text for no message at all, which is a failure, too.
    """
    emit(rows, columns, output, empty=empty)
    if 0 < of != done:
        note(f"{done:,} of {of:,} messages are done; OUTCOME and REASON say what became of others.")
    if not of or done != of:
        click.get_current_context().exit(1)
