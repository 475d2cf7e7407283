"""The expiry of a message: the time from which it is not released any more."""

from __future__ import annotations

from .due_time import LATEST_DUE_MS
from .formatting import format_instant
from .level_topic import LevelTopicDescription

#: Expiry of a message that never expires, whatever the default of its level topic.
NEVER_MS = LATEST_DUE_MS
#: Begin of the reason of an expired message.
EXPIRED = "expired at "


def expires_at_ms(description: LevelTopicDescription, due_ms: int, own_ms: int) -> int:
    """Return the time from which a message is not released any more, ms; 0 for never.

    Args:
        due_ms: due time of the message, ms since the epoch.
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
        due_ms, new_due_ms: its due times, ms since the epoch.
    """
    if new_due_ms <= now_ms or own_ms == NEVER_MS:
        return NEVER_MS
    return min(new_due_ms + own_ms - due_ms, NEVER_MS) if own_ms else 0


def reason_if_expired(
    description: LevelTopicDescription, due_ms: int, own_ms: int, now_ms: int
) -> str | None:
    """Return the reason of a message that has expired; None if it has not.

    Args:
        due_ms, own_ms: as for `expires_at_ms`.
    """
    at_ms = expires_at_ms(description, due_ms, own_ms)
    return expired_reason(at_ms) if 0 < at_ms <= now_ms else None


def expired_reason(at_ms: int) -> str:
    """Return the reason of a message that expired at this time, ms since the epoch."""
    return EXPIRED + format_instant(at_ms)


def is_expired(reason: str) -> bool:
    """Return True if this is the reason of an expired message."""
    return reason.startswith(EXPIRED)
