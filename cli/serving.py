"""A command that runs until it is stopped: its HTTP service, and the signals that end it."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from .output import note

if TYPE_CHECKING:
    from delaylevel.prometheus import Collector


def serve_metrics(
    stack: contextlib.ExitStack, collector: Collector, port: int, address: str
) -> None:
    """Serve metrics, probes and the status page until the stack is closed; print the addresses."""
    from delaylevel.prometheus import serve
    from delaylevel.web.reports import TOKEN_VARIABLE
    from delaylevel.web.server import is_loopback

    port = stack.enter_context(serve(collector, port, address))
    note(f"Metrics at http://{address}:{port}/metrics")
    if is_loopback(address) or os.environ.get(TOKEN_VARIABLE):
        note(f"Status page at http://{address}:{port}/")
    else:
        note(f"Status page and live queries need {TOKEN_VARIABLE} in the environment.")


def stop_on_signals(stop: Callable[[], None]) -> None:
    """Call a function when this process is asked to end, by SIGTERM or Ctrl-C.

    Args:
        stop: function that is called in a thread of its own, once for each signal.
    """
    # A handler runs between two instructions of the main thread, which may just then hold the lock
    # of the event that `stop` sets. `SimpleQueue.put` is the one call that is safe in that place.
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()

    def wait() -> None:
        while True:
            signals.get()
            threading.Thread(target=stop, daemon=True).start()

    threading.Thread(target=wait, name="delaylevel-signals", daemon=True).start()

    def signalled(signum: int, frame: FrameType | None) -> None:
        signals.put(signum)

    signal.signal(signal.SIGTERM, signalled)
    signal.signal(signal.SIGINT, signalled)
