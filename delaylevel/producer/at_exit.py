"""The end of a process that has not closed its producers.

A callback of the client that comes while Python shuts down aborts the process, or delays its end by
ten seconds. So the exit first waits a moment for what is on its way. If that does not arrive,
it closes the producers: the client then calls back at once. At last, it waits another moment:
when the outcome of a message is known, the client's thread has not left its callback yet.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

from delaylevel.cluster.background import after_fork

from .calls import Done, ignore

_PATIENCE_S = 1.0
_POLL_S = 0.001
# Leaving a callback takes microseconds, but the thread must get a processor.
_LEAVE_S = 0.02


class OutstandingWork(Protocol):
    """Messages that the client may still call back for, or that are not given to it yet."""

    def is_outstanding(self) -> bool:
        """Return True while there are such messages."""
        ...


class UnclosedProducer(Protocol):
    """A producer that the application may not close."""

    def closes(self) -> list[Callable[[Done], None]]:
        """Return functions that start to close the client's producers."""
        ...


class Exit:
    """All that must be finished before Python shuts down; nothing is kept alive for it."""

    def __init__(self) -> None:
        self._works: weakref.WeakSet[OutstandingWork] = weakref.WeakSet()
        self._producers: weakref.WeakSet[UnclosedProducer] = weakref.WeakSet()
        self._callbacks = False

    def expect_callbacks(self) -> None:
        """Let the exit give the client's threads time to leave their callbacks."""
        self._callbacks = True

    def wait_for(self, work: OutstandingWork) -> None:
        """Let the exit wait until this is not outstanding."""
        self._works.add(work)

    def close(self, producer: UnclosedProducer) -> None:
        """Let the exit close this producer if waiting does not help."""
        self._producers.add(producer)

    def finish(self) -> None:
        """Wait for outstanding work, and close producers if it takes too long."""
        if not self._finished(self._works):
            for producer in list(self._producers):
                for close in producer.closes():
                    close(ignore)
            self._finished(self._works)
        if self._callbacks:
            time.sleep(_LEAVE_S)

    def _finished(self, works: Iterable[OutstandingWork]) -> bool:
        until_s = time.monotonic() + _PATIENCE_S
        outstanding = list(works)
        while outstanding := [work for work in outstanding if work.is_outstanding()]:
            if time.monotonic() > until_s:
                return False
            time.sleep(_POLL_S)
        return True


at_exit = Exit()
# Functions registered later are called earlier: background threads may still call the client.
atexit.register(at_exit.finish)
# The parent's messages are not those of a child.
after_fork(at_exit.__init__)  # type: ignore[misc]
