"""One broker for all processes that run tests.

The process that distributes the tests owns the broker, because each of the others may end first.
It starts the broker when one of them asks.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.errors import DelayLevelError

_POLL_S = 0.1
_START_S = 240.0
_WANTED, _STARTED, _FAILED = "wanted", "started", "failed"


class SharedBroker:
    """The broker of all processes, in the one that owns it.

    It is made in ``directory``, by which the other processes find it, and not started at first.
    """

    def __init__(self, make: Callable[[Path], EmbeddedBroker]) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="delaylevel-tests-"))
        self._broker = make(self.directory / "broker")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._start_when_wanted, daemon=True)
        self._thread.start()

    def remove(self) -> None:
        """Stop the broker, and delete its data."""
        self._over.set()
        self._thread.join()
        self._broker.remove()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _start_when_wanted(self) -> None:
        while not (self.directory / _WANTED).exists():
            if self._over.wait(_POLL_S):
                return
        try:
            self._broker.start()
        except DelayLevelError:
            (self.directory / _FAILED).touch()
        else:
            (self.directory / _STARTED).touch()


def await_shared(directory: Path, make: Callable[[Path], EmbeddedBroker]) -> EmbeddedBroker | None:
    """Return the broker that the owner of a directory starts, or None if it cannot."""
    (directory / _WANTED).touch()
    limit_s = time.monotonic() + _START_S
    while not (directory / _STARTED).exists():
        if (directory / _FAILED).exists() or time.monotonic() > limit_s:
            return None
        time.sleep(_POLL_S)
    return make(directory / "broker")
