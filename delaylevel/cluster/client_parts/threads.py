"""Python's state of the client's threads, kept from one callback to the next.

The client calls back in threads that Python did not start. For each call, Python makes a state for
the thread, and deletes it at the end. That takes longer than a short callback: with a function that
counts, ``send_async`` reaches 27,000 messages per second instead of 69,000. A thread whose state is
in use otherwise keeps it. So a callback for a stored message takes a reference to the state of its
thread, and the callback of the closing gives it back.

A stored message is always reported by the thread that reads from the producer's connection. An
opening is not: if the answer comes before the calling thread has asked for it, the calling thread
calls back (on a busy machine, for one opening in twenty). A closing may be reported by the calling
thread for the same reason, or because the connection was lost. Then the state stays until the
process ends: some KiB, at most once for each thread. Python's own daemon threads keep their states
in the same way, also at the end of the process.

Source: ``PyGILState_Ensure`` and ``PyGILState_Release`` in the C API of Python, which nest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from ctypes import pythonapi
from typing import Any
from weakref import WeakKeyDictionary

import pulsar

_ensure: Any = pythonapi.PyGILState_Ensure
_release: Any = pythonapi.PyGILState_Release

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
        producer: an open producer; nothing is done if a thread keeps its state for it.
    """
    if producer in _references:
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


def in_kept_state(producer: Any, callback: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a callback that keeps the state of its thread if its message is stored.

    Args:
        producer: the client's own producer, to which the message is given.
        callback: the callback of the message, which is called in any case.
    """

    def called_back(result: Any, message_id: Any) -> None:
        if result == pulsar.Result.Ok:
            keep_state(producer)
        callback(result, message_id)

    return called_back
