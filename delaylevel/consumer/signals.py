"""Exceptions that a handler raises to decide about its message."""

from __future__ import annotations

from datetime import timedelta

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
