"""The events for which a partition owner waits."""

from __future__ import annotations

import queue
import time
from typing import Any

#: An event without content: there is something to process.
WAKE = object()
# Answers of targets may wait for so long if the owner wakes up anyway.
_PATIENCE_S = 0.02


class EventQueue:
    """Queue of events for one thread; the others put them.

    Most wakes come from targets that have answered. They need not be processed at once, and the
    owner wakes up for the next due time anyway. So such a wake is an event only if the owner would
    wait for longer.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._until_s = 0.0
        self._answered_s = 0.0

    def __bool__(self) -> bool:
        """Return True if there are events."""
        return not self._queue.empty()

    def put(self, event: Any) -> None:
        """Add an event."""
        self._queue.put(event)

    def wake(self) -> None:
        """Let the owner look at once."""
        self._queue.put(WAKE)

    def answered(self) -> None:
        """Let the owner look soon: a target has answered."""
        now_s = time.monotonic()
        # In this order: either `get` sees the time of the answer, or this sees its limit.
        self._answered_s = now_s
        if self._until_s - now_s > _PATIENCE_S:
            self._queue.put(WAKE)

    def take_answered_s(self) -> float | None:
        """Return the monotonic time of the last answer since the last call, in s, or None."""
        answered_s, self._answered_s = self._answered_s, 0.0
        return answered_s or None

    def get(self, until_s: float, patient: bool) -> Any:
        """Return the next event; None if there is none by a monotonic time, in s.

        Args:
            patient: False if answers are events.
        """
        self._until_s = until_s if patient else float("inf")
        now_s = time.monotonic()
        if self._answered_s:
            until_s = min(until_s, now_s + _PATIENCE_S) if patient else now_s
        try:
            return self._queue.get(timeout=until_s - now_s) if until_s > now_s else None
        except queue.Empty:
            return None
        finally:
            self._until_s = 0.0

    def get_nowait(self) -> Any:
        """Return the next event, or None."""
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return None
