"""Slow work in the order in which it was given, in one thread at a time."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from delaylevel.cluster.background import Starter, in_thread

log = logging.getLogger(__name__)


class SlowWork:
    """Work that waits for the broker, given by threads that must not wait.

    The thread lives as long as there is work.

    Args:
        start: runner of the thread; a function that calls the work at once runs it in the thread
            that gives it.
    """

    def __init__(self, start: Starter = in_thread) -> None:
        self._start = start
        self._changed = threading.Condition(threading.RLock())
        self._waiting: deque[Callable[[], None]] = deque()
        self._working = False

    def add(self, work: Callable[[], None]) -> None:
        """Run work after all that was given before; an exception of it is logged."""
        with self._changed:
            self._waiting.append(work)
            if self._working:
                return
            self._working = True
        try:
            self._start(self._run)
        except RuntimeError:  # no thread can be started
            with self._changed:
                self._working = False
                self._waiting.remove(work)
                self._changed.notify_all()
            raise

    def wait(self, seconds: float) -> bool:
        """Wait until there is no work; return False if that takes too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._working, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._working = False
                    self._changed.notify_all()
                    return
                work = self._waiting.popleft()
            try:
                work()
            except Exception:
                log.exception("work in the background failed")
