"""Lines at the end of a terminal's output that are drawn again in place.

While a region is open, everything that is written to stdout and stderr of the same terminal goes
through it: the log, warnings, and what commands print. Complete lines are written above the region,
which is then drawn again. The two never share a row.

The cursor rests on the first cell of the region, not behind it. If the terminal gets another width,
it moves text and cursor together, so the next drawing starts at the right row however many rows the
old one takes by then. It erases everything below. Lines that are too long are cut, because a line
that continues in the next row would take two.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from delaylevel.model.formatting import format_duration

from . import logs
from .output import note
from .terminal import cut, size_of

if TYPE_CHECKING:
    from delaylevel.web.reports import ProbeCheck


_ERASE = "\r\x1b[J"
# Without wrapping, no character that takes more cells than expected can add a row.
_BEGIN, _END = "\x1b[?25l\x1b[?7l", "\x1b[?7h"
_SHOW_CURSOR = "\x1b[?25h"
_BAR = 24


class LiveRegion:
    """A region at the end of a terminal's output; without a terminal, it shows nothing."""

    def __init__(self, stream: Any | None) -> None:
        self.live = stream is not None
        self.stream = stream
        self._lock = threading.RLock()
        self._text = ""

    @property
    def size(self) -> tuple[int, int]:
        """The columns and lines that a text may take; one line stays free for the log."""
        found = size_of(self.stream)
        return found.columns, max(1, found.lines - 1)

    def show(self, text: str) -> None:
        """Draw a text in place of the last one."""
        if self.live:
            with self._lock:
                self._text = text
                self._put(self._drawn())

    def above(self, text: str) -> None:
        """Write complete lines above the region."""
        with self._lock:
            self._put(_ERASE + text + self._drawn() if self.live else text)

    def close(self, keep: bool = False) -> None:
        """Remove the region, or leave its last text where it is."""
        if not self.live:
            return
        with self._lock:
            last = "\n".join(self._lines()) + "\n" if keep and self._text else ""
            self._put(f"{_ERASE}{_BEGIN}{last}{_END}{_SHOW_CURSOR}")
            self.live = False
            self._text = ""

    def _lines(self) -> list[str]:
        if not self._text:
            return []
        columns, height = self.size
        return [cut(line, columns) for line in self._text.splitlines()[:height]]

    def _drawn(self) -> str:
        lines = self._lines()
        up = f"\x1b[{len(lines) - 1}A" if len(lines) > 1 else ""
        return f"{_ERASE}{_BEGIN}" + "\n".join(lines) + f"{_END}{up}\r"

    def _put(self, text: str) -> None:
        assert self.stream is not None
        with contextlib.suppress(OSError):  # the terminal is gone
            self.stream.write(text)
            self.stream.flush()


class _Above:
    """A stream whose complete lines appear above a region."""

    def __init__(self, stream: Any, region: LiveRegion) -> None:
        self._stream = stream
        self._region = region
        self._rest = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        """Write the complete lines, and keep the rest until its line ends."""
        if not self._region.live:  # somebody has kept this stream
            self.end(text)
            return len(text)
        with self._lock:
            lines, end, self._rest = (self._rest + text).rpartition("\n")
            if end:
                self._region.above(lines + end)
        return len(text)

    def writelines(self, lines: Iterator[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Keep the form of a stream; lines are written at once."""

    def end(self, text: str = "") -> None:
        """Write the rest and a text as they are."""
        with self._lock:
            rest, self._rest = self._rest + text, ""
        if rest:
            self._stream.write(rest)
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def live_region(*, keep: bool = False) -> Iterator[LiveRegion]:
    """Open a region on the terminal of stderr for a ``with`` block; ``keep`` leaves its last text.

    It is not drawn if stderr is no terminal, if the log is JSON, or inside of another region.
    """
    stream = sys.stderr
    inside = isinstance(sys.stdout, _Above) or isinstance(sys.stderr, _Above)
    if inside or not stream.isatty() or logs.is_json():
        yield LiveRegion(None)
        return
    at_first = sys.stdout, sys.stderr
    region = LiveRegion(stream)
    out, err = (_Above(one, region) if _share_terminal(one, stream) else None for one in at_first)
    sys.stdout, sys.stderr = out or at_first[0], err or at_first[1]
    try:
        yield region
    finally:
        region.close(keep)
        # Another library may have replaced them in the meantime.
        if sys.stdout is out:
            sys.stdout = at_first[0]
        if sys.stderr is err:
            sys.stderr = at_first[1]
        for guard in (out, err):
            if guard is not None:
                guard.end()


def _share_terminal(one: Any, other: Any) -> bool:
    """Return True if two streams are the same terminal."""
    if one is other:
        return True
    try:
        return one.isatty() and os.ttyname(one.fileno()) == os.ttyname(other.fileno())
    except (OSError, ValueError):
        return False


class ProgressLine:
    """The progress of a long task in one line: a bar if the number of steps is known."""

    EVERY_S = 0.1

    def __init__(self, region: LiveRegion, label: str, length: int | None) -> None:
        self._region = region
        self._label = label
        self._length = length
        self._done = 0
        self._start_s = self._drawn_s = time.monotonic()

    def update(self, steps: int) -> None:
        """Add a number of finished steps."""
        self._done += steps
        now_s = time.monotonic()
        if self._region.live and now_s - self._drawn_s >= self.EVERY_S:
            self._drawn_s = now_s
            self._region.show(self._line(now_s - self._start_s))

    def _line(self, passed_s: float) -> str:
        if not self._length:
            return f"{self._label}   {self._done:,}"
        share = min(1.0, self._done / self._length)
        full = round(share * _BAR)
        line = f"{self._label}   {'█' * full}{'░' * (_BAR - full)}   {share:4.0%}"
        if not 0 < share < 1:
            return line
        left_ms = passed_s / share * (1 - share) * 1000
        return f"{line}   {format_duration(max(1000, round(left_ms, -3)))} left"


@contextlib.contextmanager
def progress(label: str, length: int | None) -> Iterator[ProgressLine]:
    """Show the progress of a long task on stderr for a ``with`` block, if stderr is a terminal."""
    with live_region() as region:
        yield ProgressLine(region, label, length)


def is_live() -> bool:
    """Return True if stderr is a terminal that may be drawn on."""
    return sys.stderr.isatty() and not logs.is_json()


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
