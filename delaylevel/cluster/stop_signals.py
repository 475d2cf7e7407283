"""The signals that end a process."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def stop_on_signals(stop: Callable[[], None]) -> Callable[[], None]:
    """Call a function when this process is asked to end, by SIGTERM or Ctrl-C.

    Args:
        stop: function that is called in a thread of its own, once for each signal.

    Returns:
        A function that installs the earlier handlers again.
    """
    # A handler runs between two instructions of the main thread, which may just then hold the lock
    # of the event that `stop` sets. `SimpleQueue.put` is the one call that is safe in that place.
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()

    def wait() -> None:
        while signals.get():
            threading.Thread(target=stop, daemon=True).start()

    threading.Thread(target=wait, name="delaylevel-signals", daemon=True).start()

    def signalled(signum: int, frame: FrameType | None) -> None:
        signals.put(signum)

    earlier = {each: signal.signal(each, signalled) for each in _SIGNALS}

    def restore() -> None:
        for each, handler in earlier.items():
            # None is a handler that was not installed by Python code.
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
        signals.put(0)

    return restore
