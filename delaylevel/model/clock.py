"""The source of the present time, and times as whole milliseconds."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from typing import Protocol

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class Clock(Protocol):
    """A source of the present time."""

    def now_ms(self) -> int:
        """Return the present time in milliseconds since the epoch, UTC."""


class SystemClock:
    """The machine's wall clock."""

    def now_ms(self) -> int:
        """Return ``time.time()`` in whole milliseconds."""
        return time.time_ns() // 1_000_000


def duration_ms(value: timedelta) -> int:
    """Return a duration in whole milliseconds, rounded up so that no delay gets shorter."""
    # Integers only: a float would be inexact for long durations.
    micros = (value.days * 86_400 + value.seconds) * 1_000_000 + value.microseconds
    return -((-micros) // 1000)


def instant_ms(value: datetime) -> int:
    """Return an aware datetime as milliseconds since the epoch, rounded up.

    Raises:
        ValueError: the datetime is naive.
    """
    if value.tzinfo is None or value.utcoffset() is None:
        raise ValueError(f"{value.isoformat()} has no time zone")
    return duration_ms(value - _EPOCH)
