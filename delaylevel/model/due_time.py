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
    """Return the due time of a message; None if no delay was requested.

    Args:
        deliver_at: due time in milliseconds since the epoch (as in ``pulsar.Producer``) or as an
            aware datetime; 0 and None for no delay. A past time is valid: the message is due now.
        deliver_after: delay from now; zero and None for no delay.
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


def expiry_ms(
    expires_at: int | datetime | None, expires_after: timedelta | None, due_ms: int | None
) -> int:
    """Return the time from which a message is not released any more, ms; 0 for never.

    Args:
        expires_at: that time in milliseconds since the epoch, or as an aware datetime.
        expires_after: the time from due time to expiry, instead of ``expires_at``.
    """
    if expires_at is None and expires_after is None:
        return 0
    given = f"expires_at ({expires_at!r})" if expires_at is not None else "expires_after"
    if expires_at is not None and expires_after is not None:
        raise InvalidDelayError(
            f"expires_at ({expires_at!r}) and expires_after ({expires_after!r}) are both given: "
            "give one of them; the message was not sent"
        )
    if due_ms is None:
        raise InvalidDelayError(
            f"{given} is for delayed messages: give deliver_at or deliver_after, too; the message "
            "was not sent"
        )
    if expires_after is not None:
        found = _from_delay(expires_after, due_ms, "expires_after")
    else:
        found = _from_instant(expires_at, "expires_at")  # type: ignore[arg-type]
    if found is None or found <= due_ms:
        raise InvalidDelayError(
            f"{given} is not later than the due time ({format_instant(due_ms)}): the message would "
            "never be released; it was not sent"
        )
    return found


def _from_delay(value: timedelta, now_ms: int, name: str = "deliver_after") -> int | None:
    if not isinstance(value, timedelta):
        raise InvalidDelayError(
            f"{name} is a timedelta, not {type(value).__name__} "
            f"({value!r}): write timedelta(seconds=…); the message was not sent"
        )
    if value < _NO_DELAY:
        raise InvalidDelayError(
            f"{name} is negative ({value!r}): a delay is zero or more; the message was not sent"
        )
    due = now_ms + duration_ms(value)
    _check_range(due, name, value)
    return due if value else None


def _from_instant(value: int | datetime, name: str = "deliver_at") -> int | None:
    if isinstance(value, datetime):
        if value.tzinfo is None or value.utcoffset() is None:
            raise InvalidDelayError(
                f"{name} is a naive datetime ({value.isoformat()}): give it a time zone, "
                "e.g. tzinfo=timezone.utc; the message was not sent"
            )
        due = instant_ms(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        due = value
    else:
        raise InvalidDelayError(
            f"{name} is milliseconds since the epoch or an aware datetime, not "
            f"{type(value).__name__} ({value!r}); the message was not sent"
        )
    if due == 0:
        return None
    _check_range(due, name, value)
    if due < _EARLIEST_DUE_MS:
        raise InvalidDelayError(
            f"{name}={value!r} is {format_instant(due)} when read as milliseconds: "
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


#: Expiry of a message that never expires, whatever the default of its level topic.
NEVER_MS = LATEST_DUE_MS
#: Begin of the reason of an expired message.
EXPIRED = "expired at "


def expires_at_ms(description: LevelTopicDescription, due_ms: int, own_ms: int) -> int:
    """Return the time from which a message is not released any more, ms; 0 for never.

    Args:
        own_ms: expiry that its producer gave, ms since the epoch; 0 for none.
    """
    if own_ms or not description.expire_after_ms:
        return own_ms
    return due_ms + description.expire_after_ms


def moved_expiry_ms(own_ms: int, due_ms: int, new_due_ms: int, now_ms: int) -> int:
    """Return the expiry of a message that gets another due time, ms; 0 for that of the level topic.

    It is as long after the due time as before. Like any message that is due when it is sent, one
    that is due now does not expire.

    Args:
        own_ms: expiry that its producer gave, ms since the epoch; 0 for none.
    """
    if new_due_ms <= now_ms or own_ms == NEVER_MS:
        return NEVER_MS
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
