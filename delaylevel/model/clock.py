"""Where the time comes from: the wall clock, or one that a test moves by hand."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from typing import Protocol

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class Clock(Protocol):
    """Anything with a ``now_ms()``: milliseconds since the epoch, UTC."""

    def now_ms(self) -> int:
        """Return the present time in milliseconds since the epoch, UTC."""
        ...


class SystemClock:
    """The machine's wall clock."""

    def now_ms(self) -> int:
        """Return ``time.time()`` in whole milliseconds."""
        return time.time_ns() // 1_000_000


def duration_ms(value: timedelta) -> int:
    """Convert a duration to whole milliseconds, without going through a float.

    Args:
        value: any timedelta; parts below a millisecond are rounded up, so that
            a delay is never shortened.
    """
    micros = (value.days * 86_400 + value.seconds) * 1_000_000 + value.microseconds
    return -((-micros) // 1000)


def instant_ms(value: datetime) -> int:
    """Convert an aware datetime to milliseconds since the epoch, rounded up.

    Raises:
        ValueError: the datetime is naive.
    """
    if value.tzinfo is None or value.utcoffset() is None:
        raise ValueError(f"{value.isoformat()} has no time zone")
    return duration_ms(value - _EPOCH)


def format_duration(ms: int) -> str:
    """Write a duration as people do: ``3d``, ``1h30m``, ``2s``, ``250ms``.

    Args:
        ms: the duration in milliseconds; may be negative.
    """
    if ms < 0:
        return "-" + format_duration(-ms)
    if ms == 0:
        return "0s"
    parts: list[str] = []
    for name, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, ms = divmod(ms, size)
        if count:
            parts.append(f"{count}{name}")
    return "".join(parts)


def format_instant(ms: int) -> str:
    """Write an instant as ISO-8601 in UTC with milliseconds, e.g. ``2026-03-01T09:00:00.000Z``.

    Args:
        ms: milliseconds since the epoch; beyond the year 9999 the number itself is written.
    """
    try:
        moment = _EPOCH + timedelta(milliseconds=ms)
    except OverflowError:
        return f"{ms}ms"
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"
