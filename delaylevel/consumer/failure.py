"""A failed attempt, and the decision about its message."""

from __future__ import annotations

import traceback
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from delaylevel.model.formatting import parse_delay


class Retry(Exception):  # noqa: N818 (a wish, not an error)
    """A wish of the handler: handle the message again later. It counts as a failed attempt.

    Args:
        after: time until the next attempt, a timedelta or text such as ``"15m"``; the next delay of
            the listener's ``retry`` by default.
        reason: one line for the log and the dead letter.

    Raises:
        InvalidInputError: the time is no duration, or negative.
    """

    def __init__(self, after: timedelta | str | None = None, reason: str = "") -> None:
        super().__init__(reason or "the handler asked for another attempt")
        self.after = None if after is None else parse_delay(after, "after")
        self.reason = reason


class Reject(Exception):  # noqa: N818
    """A wish of the handler: move the message to the dead-letter topic, without another attempt.

    Args:
        reason: one line for the log and the dead letter.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "the handler rejected the message")
        self.reason = reason


# A reason is one line of a log, and a property of a stored message.
_LONGEST_REASON = 1_000
_HERE = str(Path(__file__).parent)


class Failure(NamedTuple):
    """A failed attempt to handle a message.

    Attributes:
        error: the exception; None if there was none.
        reason: one line, at most 1,000 characters, e.g. ``ValueError: text``.
        trace: the traceback of the exception; empty if the message is handled again.
    """

    error: BaseException | None
    reason: str
    trace: str = ""


class Park(NamedTuple):
    """The decision to handle a message again.

    Attributes:
        delay: time until the next attempt.
        failure: the failed attempt.
    """

    delay: timedelta
    failure: Failure


class Bury(NamedTuple):
    """The decision to move a message to the dead-letter topic.

    Attributes:
        failure: the last failed attempt.
    """

    failure: Failure


def reason_of(error: BaseException) -> str:
    """Return an exception in one line of at most 1,000 characters."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # an application's own class of exceptions
        text = "(its text cannot be read)"
    if not isinstance(error, (Retry, Reject)):
        kind = type(error).__name__
        text = f"{kind}: {text}" if text else kind
    return text[:_LONGEST_REASON]


def trace_of(error: BaseException) -> str:
    """Return the traceback of an exception."""
    try:
        return "".join(traceback.format_exception(type(error), error, _outside(error)))
    except Exception:
        return reason_of(error)


def _outside(error: BaseException) -> TracebackType | None:
    """Return the traceback of an exception without the calls of this package that lead to it."""
    found = error.__traceback__
    while found is not None and found.tb_frame.f_code.co_filename.startswith(_HERE):
        found = found.tb_next
    return found or error.__traceback__
