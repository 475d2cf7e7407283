"""A clock that stands still until a test moves it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone

from delaylevel.errors import InvalidInputError
from delaylevel.model.clock import SystemClock, duration_ms


class ManualClock:
    """A :class:`~delaylevel.model.clock.Clock` that stands still until :meth:`advance` moves it.

    Args:
        start_ms: where it stands at first, in ms since the epoch; by default the machine's own
            time now, so that due times that an application computes from it make sense.
    """

    def __init__(self, start_ms: int | None = None) -> None:
        self._now_ms = SystemClock().now_ms() if start_ms is None else start_ms
        self._watchers: list[Callable[[], None]] = []

    def now_ms(self) -> int:
        """Return where the clock stands, in ms since the epoch, UTC."""
        return self._now_ms

    def now(self) -> datetime:
        """Return where the clock stands, as an aware datetime in UTC."""
        return datetime.fromtimestamp(self._now_ms / 1000, timezone.utc)

    def advance(self, delta: timedelta) -> None:
        """Move the clock on.

        Args:
            delta: by how much; parts below a millisecond are rounded up.

        Raises:
            InvalidInputError: it is negative: time does not go back.
        """
        if delta < timedelta(0):
            raise InvalidInputError(f"a clock cannot go back ({delta!r})")
        self.move_to(self._now_ms + duration_ms(delta))

    def move_to(self, now_ms: int) -> None:
        """Move the clock on to a time in ms since the epoch; an earlier one changes nothing."""
        if now_ms <= self._now_ms:
            return
        self._now_ms = now_ms
        for watcher in tuple(self._watchers):
            watcher()

    def watch(self, watcher: Callable[[], None]) -> None:
        """Have a function called whenever the clock has moved."""
        self._watchers.append(watcher)
