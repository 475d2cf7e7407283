"""Slow work in threads of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

#: Runs slow work: opening and closing producers waits for the broker.
Starter = Callable[[Callable[[], None]], None]


def in_thread(work: Callable[[], None]) -> None:
    """Run work in a new thread that does not keep the process alive."""
    threading.Thread(target=work, name="delaylevel-background", daemon=True).start()
