"""The start of a mover or dispatcher on the screen, until it is ready."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from .live import LiveRegion
from .output import note

if TYPE_CHECKING:
    from delaylevel.web.reports import ProbeCheck

_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_PLAIN_FRAMES = "|/-\\"
_FRAME_S = 0.1
# Time after which the reason for waiting is shown: most starts take less.
_PATIENCE_S = 1.0
# Time between two lines on a start that takes long, in a log.
_LINE_EVERY_S = 10.0


class Starting:
    """The start of a service: a line, then a spinner with the reason for waiting, then a line.

    The spinner is on terminals only. Enter it when the service starts, and leave it when the
    service ends, also if that is before it is ready.

    Args:
        region: region of the spinner.
        parts: the parts that start, such as "mover for orders".
        waiting: function that returns the reason for waiting; empty once the service is ready. It
            is called in another thread.
        serving: function that returns the lines about what the service serves; None to print
            nothing when it is ready.
    """

    def __init__(
        self,
        region: LiveRegion,
        parts: str,
        waiting: Callable[[], str],
        serving: Callable[[], Sequence[str]] | None,
    ) -> None:
        self._region = region
        self._parts = parts
        self._waiting = waiting
        self._serving = serving
        self._started_s = self._line_s = time.monotonic()
        self._ready = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="starting", daemon=True)

    @property
    def over(self) -> bool:
        """True if the service is ready and that was printed."""
        return self._ready.is_set()

    def __enter__(self) -> Starting:
        note(f"Starting {self._parts}.")
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        frames = cycle(_FRAMES if _takes_frames() else _PLAIN_FRAMES)
        reason = self._waiting()
        while reason and not self._ended.wait(_FRAME_S):
            self._show(next(frames), reason)
            reason = self._waiting()
        self._region.show("")
        if reason:
            return
        if self._serving is not None:
            note(f"Ready after {time.monotonic() - self._started_s:.1f} s.")
            for line in self._serving():
                note(line)
        self._ready.set()

    def _show(self, frame: str, reason: str) -> None:
        now_s = time.monotonic()
        passed_s = now_s - self._started_s
        if self._region.live:
            why = f": {reason}" if passed_s >= _PATIENCE_S else ""
            self._region.show(f"{frame} {passed_s:.0f} s{why}")
        elif now_s - self._line_s >= _LINE_EVERY_S:
            self._line_s = now_s
            note(f"Still starting after {passed_s:.0f} s: {reason}.")


def first_unmet(checks: Sequence[ProbeCheck]) -> str:
    """Return the first condition that is not met, and the number of others; empty for none."""
    unmet = [check.text for check in checks if not check.ok]
    more = f" (and {len(unmet) - 1} more)" if len(unmet) > 1 else ""
    return unmet[0] + more if unmet else ""


def _takes_frames() -> bool:
    try:
        _FRAMES.encode(sys.stderr.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
