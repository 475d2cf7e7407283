"""The expiry of a message: the time from which it is not released any more."""

from __future__ import annotations

from .formatting import format_instant
from .level_topic import LevelTopicDescription

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
