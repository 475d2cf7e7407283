"""Python's state of the client's threads, kept from one callback to the next.

The client calls back in threads that Python did not start. For each call, Python makes a state for
the thread, and deletes it at the end. That takes longer than a short callback: with a function that
counts, ``send_async`` reaches 27,000 messages per second instead of 69,000. A thread whose state is
in use otherwise keeps it. So the callback of an opening takes a reference to the state of its
thread, and the callback of the closing gives it back. Both are called by the thread that calls back
for the producer's messages.

Python's own daemon threads keep their states in the same way, also at the end of the process. If a
producer is closed by another thread, for example because its connection was lost, the state stays
until the process ends (some KiB, at most once for each thread).

Source: ``PyGILState_Ensure`` and ``PyGILState_Release`` in the C API of Python, which nest.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

try:
    from ctypes import pythonapi

    _ensure: Any = pythonapi.PyGILState_Ensure
    _release: Any = pythonapi.PyGILState_Release
except (ImportError, AttributeError):  # a Python without ctypes: callbacks take longer
    _ensure = _release = None


# PyGILState_LOCKED: what `PyGILState_Ensure` returns in a thread that holds the interpreter.
_LOCKED = 0


class _Reference:
    """The state of one thread, and the number of producers for which the thread keeps it."""

    producers = 0


class _Thread(threading.local):
    """The present thread, for as long as it keeps its state."""

    def __init__(self) -> None:
        self.reference = _Reference()


_thread = _Thread()
_references: WeakKeyDictionary[Any, _Reference] = WeakKeyDictionary()


def keep_state(producer: Any) -> None:
    """Keep Python's state of the present thread until `release_state` is called for a producer.

    Only for callbacks in threads of the client.

    Args:
        producer: a producer that was just opened.
    """
    if _ensure is None or producer in _references:
        return
    reference = _references[producer] = _thread.reference
    reference.producers += 1
    if reference.producers == 1:
        _ensure()


def release_state(producer: Any) -> None:
    """Let Python delete the state of the present thread if it was kept for this producer only.

    Args:
        producer: a producer that was just closed; nothing is done if this thread keeps nothing
            for it.
    """
    reference = _references.get(producer)
    if reference is None or reference is not _thread.reference:
        return
    del _references[producer]
    reference.producers -= 1
    if reference.producers == 0:
        _release(_LOCKED)
