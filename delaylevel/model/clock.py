"""The source of the present time, and times as whole milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone
from typing import Protocol

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
#: A smaller step of a wall clock, compared with its monotonic clock, is a pause between two reads,
#: or a correction that every host tolerates. A suspended machine looks like a larger one.
STEP_MS = 1000
# Time after which a step forward counts as a correction.
_LASTING_S = 10.0


class Clock(Protocol):
    """A source of the present time."""

    def now_ms(self) -> int:
        """Return the present time in milliseconds since the epoch, UTC."""

    def monotonic_s(self) -> float:
        """Return the monotonic time in seconds, for durations: it never steps."""


class SystemClock:
    """The machine's clocks."""

    def now_ms(self) -> int:
        """Return ``time.time()`` in whole milliseconds."""
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        """Return ``time.monotonic()``."""
        return time.monotonic()


class SteadyClock:
    """A wall clock that follows a step forward only once it has lasted.

    What is released or dropped too early cannot be taken back; what is 10 s late is only late. So
    a clock that is ahead for some seconds changes nothing, unless it is ahead at the start. A step
    back is followed at once. A machine that was suspended looks like a step forward.
    """

    def __init__(self, clock: Clock) -> None:
        self.wall_ms = clock.now_ms  # the present time of that clock itself
        self.monotonic_s = time.monotonic if isinstance(clock, SystemClock) else clock.monotonic_s
        self._offset_ms = clock.now_ms() - 1000 * self.monotonic_s()
        self._ahead_since_s: float | None = None

    def now_ms(self) -> int:
        """Return the present time in milliseconds since the epoch, UTC."""
        # This runs some ten times for each message.
        passed_s, now_ms = self.monotonic_s(), self.wall_ms()
        offset_ms = now_ms - 1000 * passed_s
        since_s = self._ahead_since_s
        if offset_ms - self._offset_ms > STEP_MS:
            if since_s is None:
                self._ahead_since_s = since_s = passed_s
            if passed_s - since_s < _LASTING_S:
                return int(self._offset_ms + 1000 * passed_s)
        self._offset_ms, self._ahead_since_s = offset_ms, None
        return now_ms


def monotonic_s(clock: SteadyClock) -> Callable[[], float]:
    """Return a function for durations, in seconds, that never steps."""
    if clock.monotonic_s is time.monotonic:
        return time.monotonic
    # Any other clock, e.g. one that a test moves, counts whenever it is the faster one.
    real_s, clock_s, now_s = time.monotonic(), clock.monotonic_s(), 0.0

    def elapsed_s() -> float:
        nonlocal real_s, clock_s, now_s
        real, own = time.monotonic(), clock.monotonic_s()
        now_s += max(real - real_s, own - clock_s, 0.0)
        real_s, clock_s = real, own
        return now_s

    return elapsed_s


def earliest(times: Iterable[int | None]) -> int | None:
    """Return the earliest time; None stands for never."""
    return min((time for time in times if time is not None), default=None)


def duration_ms(value: timedelta) -> int:
    """Return a duration in whole milliseconds, rounded up so that no delay gets shorter."""
    # Integers only: a float would be inexact for long durations.
    micros = (value.days * 86_400 + value.seconds) * 1_000_000 + value.microseconds
    return -((-micros) // 1000)


def instant(ms: int) -> datetime:
    """Return milliseconds since the epoch as an aware datetime, UTC."""
    return _EPOCH + timedelta(milliseconds=ms)


def instant_ms(value: datetime) -> int:
    """Return an aware datetime as milliseconds since the epoch, rounded up."""
    if value.tzinfo is None or value.utcoffset() is None:
        raise ValueError(f"{value.isoformat()} has no time zone")
    return duration_ms(value - _EPOCH)
