"""The events for which a partition owner waits."""

from __future__ import annotations

import queue
import time
from typing import Any

#: An event without content: there is something to process.
WAKE = object()


class EventQueue:
    """Queue of events for one thread; the others put them.

    Most wakes come from targets that have answered. They need not be processed at once, and the
    owner wakes up for the next due time anyway. So such a wake is an event only if the owner would
    wait for longer than its patience.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wake_until_s = 0.0  # an answer before this time is an event
        self._answered = False

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
        # In this order: either `get` sees the answer, or this sees its limit.
        self._answered = True
        if time.monotonic() < self._wake_until_s:
            self._queue.put(WAKE)

    def take_answered(self) -> None:
        """Take note that all answers until now are going to be processed."""
        self._answered = False

    def get(self, until_s: float, patience_s: float) -> Any:
        """Return the next event; None if there is none by a monotonic time, in s.

        Args:
            patience_s: time for which answers of targets may wait, in s; 0 if they are events.
        """
        self._wake_until_s = until_s - patience_s if patience_s else float("inf")
        now_s = time.monotonic()
        if self._answered:
            until_s = min(until_s, now_s + patience_s)
        try:
            return self._queue.get(timeout=max(until_s - now_s, 0.0))
        except queue.Empty:
            return None
        finally:
            self._wake_until_s = 0.0

    def get_nowait(self) -> Any:
        """Return the next event, or None."""
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return None
