"""The due time of a message, from deliver_at or deliver_after, and its expiry."""

from __future__ import annotations

from datetime import datetime, timedelta

from delaylevel.errors import InvalidDelayError

from .clock import duration_ms, instant_ms
from .formatting import format_instant
from .level_topic import LevelTopicDescription

_NO_DELAY = timedelta(0)
# In 1973: an earlier time was given in seconds by mistake.
_EARLIEST_DUE_MS = 100_000_000_000
# 9999-12-31T23:59:59.999Z: a later time was given in micro- or nanoseconds by mistake.
LATEST_DUE_MS = 253_402_300_799_999


def due_time_ms(
    deliver_at: int | datetime | None, deliver_after: timedelta | None, now_ms: int
) -> int | None:
    """Return the due time of a message, also a past one; None without a delay, or for 0."""
    return _time_ms("deliver", deliver_at, deliver_after, now_ms)


def named_due_ms(deliver_at: int | datetime) -> int:
    """Return the due time that names a message, whatever the time is now."""
    found = _at_ms("deliver_at", deliver_at)
    _check_unit(found, "deliver_at", deliver_at)
    return found


def expiry_ms(
    expires_at: int | datetime | None, expires_after: timedelta | None, due_ms: int | None
) -> int:
    """Return the time from which a message is not released any more, ms; 0 for never."""
    if expires_at is None and expires_after is None:
        return 0
    given = f"expires_at ({expires_at!r})" if expires_at is not None else "expires_after"
    if due_ms is None:
        raise _refused(f"{given} is for delayed messages: give deliver_at or deliver_after, too")
    found = _time_ms("expires", expires_at, expires_after, due_ms)
    if found is None or found <= due_ms:
        raise InvalidDelayError(
            f"{given} is not later than the due time ({format_instant(due_ms)}): the message would "
            "never be released; it was not sent"
        )
    return found


def _time_ms(
    verb: str, at: int | datetime | None, after: timedelta | None, begin_ms: int
) -> int | None:
    """Return the time that the arguments ``<verb>_at`` and ``<verb>_after`` name; None for none."""
    if at is not None and after is not None:
        raise _refused(
            f"{verb}_at ({at!r}) and {verb}_after ({after!r}) are both given: give one of them"
        )
    if after is not None:
        name = f"{verb}_after"
        if not isinstance(after, timedelta):
            raise _refused(
                f"{name} is a timedelta, not {type(after).__name__} ({after!r}): write "
                "timedelta(seconds=…)"
            )
        if after < _NO_DELAY:
            raise _refused(f"{name} is negative ({after!r}): a delay is zero or more")
        found = begin_ms + duration_ms(after)
        _check_range(found, name, after)
        return found if after else None
    if at is None:
        return None
    name = f"{verb}_at"
    found = _at_ms(name, at)
    # The clock of a test, and that of some machines after their start, begins in 1970.
    if found and begin_ms >= _EARLIEST_DUE_MS:
        _check_unit(found, name, at)
    return found or None


def _at_ms(name: str, at: int | datetime) -> int:
    """Return a point in time in ms since the epoch."""
    if isinstance(at, datetime):
        if at.tzinfo is None or at.utcoffset() is None:
            raise _refused(
                f"{name} is a naive datetime ({at.isoformat()}): give it a time zone, "
                "e.g. tzinfo=timezone.utc"
            )
        found = instant_ms(at)
    elif isinstance(at, int) and not isinstance(at, bool):
        found = at
    else:
        raise _refused(
            f"{name} is milliseconds since the epoch or an aware datetime, not "
            f"{type(at).__name__} ({at!r})"
        )
    _check_range(found, name, at)
    return found


def _check_unit(found: int, name: str, given: object) -> None:
    if found < _EARLIEST_DUE_MS:
        raise _refused(
            f"{name}={given!r} is {format_instant(found)} when read as milliseconds: "
            "multiply seconds by 1000"
        )


def _check_range(due_ms: int, name: str, given: object) -> None:
    if not 0 <= due_ms <= LATEST_DUE_MS:
        raise _refused(f"{name}={given!r} is before 1970 or beyond the year 9999, in milliseconds")


def _refused(why: str) -> InvalidDelayError:
    return InvalidDelayError(f"{why}; the message was not sent")


#: Expiry of a message that never expires, whatever the default of its level topic.
NEVER_MS = LATEST_DUE_MS
#: Begin of the reason of an expired message.
EXPIRED = "expired at "


def expires_at_ms(description: LevelTopicDescription, due_ms: int, own_ms: int) -> int:
    """Return the expiry of a message, ms since the epoch, if its producer gave ``own_ms``."""
    if own_ms or not description.expire_after_ms:
        return own_ms
    return due_ms + description.expire_after_ms


def moved_expiry_ms(own_ms: int, due_ms: int, new_due_ms: int, now_ms: int) -> int:
    """Return the expiry of a message that gets another due time, ms; 0 for that of the level topic.

    It is as long after the due time as before.
    """
    if new_due_ms <= now_ms or own_ms == NEVER_MS:
        return NEVER_MS  # like any message that is due when it is sent
    return min(new_due_ms + own_ms - due_ms, NEVER_MS) if own_ms else 0


def reason_if_expired(
    description: LevelTopicDescription, due_ms: int, own_ms: int, now_ms: int
) -> str | None:
    """Return the reason of a message that has expired; None if it has not."""
    at_ms = expires_at_ms(description, due_ms, own_ms)
    # It is not released before it is due, even if it is handed on earlier.
    return expired_reason(at_ms) if 0 < at_ms <= max(now_ms, due_ms) else None


def expired_reason(at_ms: int) -> str:
    """Return the reason of a message that expired at this time, ms since the epoch."""
    return EXPIRED + format_instant(at_ms)


def is_expired(reason: str) -> bool:
    """Return True if this is the reason of an expired message."""
    return reason.startswith(EXPIRED)
