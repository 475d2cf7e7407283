"""A clock that only moves when a test moves it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from delaylevel.errors import InvalidInputError
from delaylevel.model.clock import SystemClock, duration_ms, instant


def check_duration(delta: timedelta) -> None:
    """Raise InvalidInputError for a duration that ``deliver_after`` would not take, either."""
    if not isinstance(delta, timedelta) or delta < timedelta(0):
        raise InvalidInputError(
            f"time advances by a timedelta that is not negative, not by {delta!r}: write "
            "timedelta(seconds=…)"
        )


class ManualClock:
    """A :class:`~delaylevel.model.clock.Clock` that only moves in :meth:`advance` and :meth:`step`.

    Once it has moved, it differs from the system clock: ``datetime.now(timezone.utc)`` plus an hour
    may be past for it, so that the message is sent at once. Use :meth:`now` in its place, or
    ``deliver_after``.

    Args:
        start_ms: initial time, ms since the epoch; by default the current time, so that it agrees
            with due times that an application computes from the system clock.
    """

    def __init__(self, start_ms: int | None = None) -> None:
        self._now_ms = SystemClock().now_ms() if start_ms is None else start_ms
        self._passed_ms = 0
        self._watchers: list[Callable[[], None]] = []

    def now_ms(self) -> int:
        """Return the time, ms since the epoch, UTC."""
        return self._now_ms

    def monotonic_s(self) -> float:
        """Return the time that has passed, in seconds, without the steps."""
        return self._passed_ms / 1000

    def now(self) -> datetime:
        """Return the time as an aware datetime in UTC."""
        return instant(self._now_ms)

    def advance(self, delta: timedelta) -> None:
        """Move the clock forward.

        Args:
            delta: duration, rounded up to a millisecond.

        Raises:
            InvalidInputError: the duration is negative, or no timedelta.
        """
        check_duration(delta)
        self.move_to(self._now_ms + duration_ms(delta))

    def move_to(self, now_ms: int) -> None:
        """Move the clock to a time, ms since the epoch; ignore an earlier time."""
        if now_ms <= self._now_ms:
            return
        self._passed_ms += now_ms - self._now_ms
        self._set(now_ms)

    def step(self, delta: timedelta) -> None:
        """Set the wall clock forward or back while no time passes.

        Args:
            delta: correction, rounded up to a millisecond; negative to set the clock back.
        """
        self._set(self._now_ms + duration_ms(delta))

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call a function after every move of the clock."""
        self._watchers.append(watcher)

    def _set(self, now_ms: int) -> None:
        self._now_ms = now_ms
        for watcher in tuple(self._watchers):
            watcher()
