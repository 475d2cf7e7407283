"""Lines on stderr about what takes long: a task, and the start of a service."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .output import note

if TYPE_CHECKING:
    from delaylevel.web.reports import ProbeCheck

_LINE_EVERY_S = 10.0
_LOOK_EVERY_S = 0.2


class Progress:
    """The progress of a task with many messages: a line now and then."""

    def __init__(self, label: str = "Reading") -> None:
        self._label = label
        self._done = 0
        self._line_s = time.monotonic()

    def update(self, messages: int) -> None:
        """Add a number of messages that are done."""
        self._done += messages
        now_s = time.monotonic()
        if now_s - self._line_s >= _LINE_EVERY_S:
            self._line_s = now_s
            note(f"{self._label}: {self._done:,} messages so far.")


class Starting:
    """The start of a service: a line, then the reason for waiting now and then, then a line.

    Enter it when the service starts, and leave it when the service ends, even if that is before it
    is ready.

    Args:
        waiting: function that returns the reason for waiting; empty once the service is ready. It
            is called in another thread.
        serving: function that returns the lines about what the service serves; None to print
            nothing when it is ready.

    Attributes:
        ready: set once the service is ready and that was printed.
    """

    def __init__(
        self,
        parts: str,
        waiting: Callable[[], str],
        serving: Callable[[], Sequence[str]] | None,
    ) -> None:
        self._parts = parts
        self._waiting = waiting
        self._serving = serving
        self._started_s = self._line_s = time.monotonic()
        self.ready = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="starting", daemon=True)

    def __enter__(self) -> Starting:
        note(f"Starting {self._parts}.")
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while reason := self._waiting():
            now_s = time.monotonic()
            if now_s - self._line_s >= _LINE_EVERY_S:
                self._line_s = now_s
                note(f"Still starting after {now_s - self._started_s:.0f} s: {reason}.")
            if self._ended.wait(_LOOK_EVERY_S):
                return
        if self._serving is not None:
            note(f"Ready after {time.monotonic() - self._started_s:.1f} s.")
            for line in self._serving():
                note(line)
        self.ready.set()


def first_unmet(checks: Sequence[ProbeCheck]) -> str:
    """Return the first condition that is not met, and the number of others; empty for none."""
    unmet = [check.text for check in checks if not check.ok]
    more = f" (and {len(unmet) - 1} more)" if len(unmet) > 1 else ""
    return unmet[0] + more if unmet else ""
