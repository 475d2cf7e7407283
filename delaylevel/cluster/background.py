"""Slow work in threads of its own."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable

#: Runs slow work: opening and closing producers waits for the broker.
Starter = Callable[[Callable[[], None]], None]

# Opening and closing take milliseconds, unless the broker is away.
_EXIT_S = 2.0
_running: set[threading.Thread] = set()


def in_thread(work: Callable[[], None]) -> None:
    """Run work in a new thread, which delays the end of the process by two seconds at most."""

    def run() -> None:
        try:
            work()
        finally:
            _running.discard(thread)

    thread = threading.Thread(target=run, name="delaylevel-background", daemon=True)
    _running.add(thread)
    try:
        thread.start()
    except RuntimeError:
        _running.discard(thread)
        raise


def _wait() -> None:
    """Wait for the threads; if Python exits while one is inside the client, the process aborts."""
    until_s = time.monotonic() + _EXIT_S
    for thread in list(_running):
        thread.join(max(0.0, until_s - time.monotonic()))


atexit.register(_wait)
os.register_at_fork(after_in_child=_running.clear)  # a fork copies no threads
