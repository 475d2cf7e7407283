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


def after_fork(function: Callable[[], object]) -> None:
    """Call a function in each process that is forked from this one, where processes can fork."""
    register = getattr(os, "register_at_fork", None)  # Windows has none
    if register is not None:
        register(after_in_child=function)


atexit.register(_wait)
after_fork(_running.clear)  # a fork copies no threads
