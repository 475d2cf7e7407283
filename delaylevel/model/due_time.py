"""The due time of a message, from the application's deliver_at or deliver_after."""

from __future__ import annotations

from datetime import datetime, timedelta

from delaylevel.errors import InvalidDelayError

from .clock import duration_ms, instant_ms
from .formatting import format_instant

_NO_DELAY = timedelta(0)
# In 1973: an earlier time was given in seconds by mistake.
_EARLIEST_DUE_MS = 100_000_000_000
# 9999-12-31T23:59:59.999Z: a later time was given in micro- or nanoseconds by mistake.
LATEST_DUE_MS = 253_402_300_799_999


def due_time_ms(
    deliver_at: int | datetime | None, deliver_after: timedelta | None, now_ms: int
) -> int | None:
    """Return the due time of a message; None if no delay was requested.

    Args:
        deliver_at: due time in milliseconds since the epoch (as in ``pulsar.Producer``) or as an
            aware datetime; 0 and None for no delay. A past time is valid: the message is due now.
        deliver_after: delay from now; zero and None for no delay.
        now_ms: the present time, milliseconds since the epoch, UTC.

    Raises:
        InvalidDelayError: both are given, or the value is negative, naive, of another type, or so
            far off that its unit must be wrong.
    """
    if deliver_at is not None and deliver_after is not None:
        raise InvalidDelayError(
            f"deliver_at ({deliver_at!r}) and deliver_after ({deliver_after!r}) are both given: "
            "give one of them; the message was not sent"
        )
    if deliver_after is not None:
        return _from_delay(deliver_after, now_ms)
    if deliver_at is not None:
        return _from_instant(deliver_at)
    return None


def _from_delay(deliver_after: timedelta, now_ms: int) -> int | None:
    if not isinstance(deliver_after, timedelta):
        raise InvalidDelayError(
            f"deliver_after is a timedelta, not {type(deliver_after).__name__} "
            f"({deliver_after!r}): write timedelta(seconds=…); the message was not sent"
        )
    if deliver_after < _NO_DELAY:
        raise InvalidDelayError(
            f"deliver_after is negative ({deliver_after!r}): a delay is zero or more; "
            "the message was not sent"
        )
    due = now_ms + duration_ms(deliver_after)
    _check_range(due, "deliver_after", deliver_after)
    return due if deliver_after else None


def _from_instant(deliver_at: int | datetime) -> int | None:
    if isinstance(deliver_at, datetime):
        if deliver_at.tzinfo is None or deliver_at.utcoffset() is None:
            raise InvalidDelayError(
                f"deliver_at is a naive datetime ({deliver_at.isoformat()}): give it a time zone, "
                "e.g. tzinfo=timezone.utc; the message was not sent"
            )
        due = instant_ms(deliver_at)
    elif isinstance(deliver_at, int) and not isinstance(deliver_at, bool):
        due = deliver_at
    else:
        raise InvalidDelayError(
            f"deliver_at is milliseconds since the epoch or an aware datetime, not "
            f"{type(deliver_at).__name__} ({deliver_at!r}); the message was not sent"
        )
    if due == 0:
        return None
    _check_range(due, "deliver_at", deliver_at)
    if due < _EARLIEST_DUE_MS:
        raise InvalidDelayError(
            f"deliver_at={deliver_at!r} is {format_instant(due)} when read as milliseconds: "
            "multiply seconds by 1000; the message was not sent"
        )
    return due


def _check_range(due_ms: int, name: str, given: object) -> None:
    if due_ms < 0:
        raise InvalidDelayError(f"{name}={given!r} is before 1970; the message was not sent")
    if due_ms > LATEST_DUE_MS:
        raise InvalidDelayError(
            f"{name}={given!r} is beyond the year 9999, as if given in micro- or nanoseconds: give "
            "milliseconds; the message was not sent"
        )
