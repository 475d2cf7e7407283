"""The last line of a terminal: progress, or the state of a service, drawn again in place."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from delaylevel.model.formatting import format_duration

from . import logs
from .output import note
from .terminal import cut, size_of

if TYPE_CHECKING:
    from delaylevel.web.reports import ProbeCheck

_ERASE = "\r\x1b[K"


class StatusLine:
    """A line below everything that is printed on a terminal; without a terminal, it shows nothing.

    It stands in for ``sys.stderr``, so that the log, warnings and notes appear above it.
    """

    def __init__(self, stream: Any | None) -> None:
        self.live = stream is not None
        self._stream = stream
        self._lock = threading.RLock()
        self._text = ""
        self._line_is_open = False

    def show(self, text: str) -> None:
        """Draw a text in place of the last one."""
        if self.live:
            with self._lock:
                # One that filled the last cell would continue in the next row.
                self._text = cut(text, size_of(self._stream).columns - 1)
                if not self._line_is_open:
                    self._put(_ERASE + self._text)

    def write(self, text: str) -> int:
        """Write a text above the line; the line comes back when the text has ended its own."""
        with self._lock:
            erase = _ERASE if self._text and not self._line_is_open else ""
            self._line_is_open = not text.endswith("\n") if text else self._line_is_open
            self._put(erase + text + ("" if self._line_is_open else self._text))
        return len(text)

    def close(self) -> None:
        """Remove the line; what somebody writes later goes to the terminal as it is."""
        self.show("")
        self.live = False

    def _put(self, text: str) -> None:
        assert self._stream is not None
        with contextlib.suppress(OSError):  # the terminal is gone
            self._stream.write(text)
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def status_line() -> Iterator[StatusLine]:
    """Open the last line of stderr's terminal for a ``with`` block.

    It is not drawn if stderr is no terminal, if the log is JSON, or inside of another one.
    """
    stream = sys.stderr
    if isinstance(stream, StatusLine) or not stream.isatty() or logs.is_json():
        yield StatusLine(None)
        return
    line = StatusLine(stream)
    sys.stderr = line
    try:
        yield line
    finally:
        line.close()
        # Another library may have replaced it in the meantime.
        if sys.stderr is line:
            sys.stderr = stream


# Number of messages of a read that takes some time.
_LEAST_READ = 20_000


class Progress:
    """The progress of a long task: a share if the number of steps is known, else a count."""

    EVERY_S = 0.1

    def __init__(self, line: StatusLine, label: str, length: int | None) -> None:
        self._line = line
        self._begin(label, length)

    def _begin(self, label: str, length: int | None) -> None:
        self._label = label
        self._length = length
        self._done = 0
        self._start_s = self._drawn_s = time.monotonic()

    def expect(self, messages: int) -> None:
        """Begin a read of about this number of messages; a short read shows no share."""
        known = messages >= _LEAST_READ
        self._begin("Reading" if known else "Read", messages if known else None)

    def close(self) -> None:
        """Remove the line; the result is printed now."""
        self._line.close()

    def update(self, steps: int) -> None:
        """Add a number of finished steps."""
        self._done += steps
        now_s = time.monotonic()
        if now_s - self._drawn_s >= self.EVERY_S:
            self._drawn_s = now_s
            self._line.show(f"{self._label}   {self._text(now_s - self._start_s)}")

    def _text(self, passed_s: float) -> str:
        if not self._length:
            return f"{self._done:,}"
        share = min(1.0, self._done / self._length)
        if not 0 < share < 1:
            return f"{share:4.0%}"
        left_ms = passed_s / share * (1 - share) * 1000
        return f"{share:4.0%}   {format_duration(max(1000, round(left_ms, -3)))} left"


@contextlib.contextmanager
def progress(label: str = "Read", length: int | None = None) -> Iterator[Progress]:
    """Show the progress of a long task on stderr for a ``with`` block, if stderr is a terminal."""
    with status_line() as line:
        yield Progress(line, label, length)


# Time after which the reason for waiting is shown: most starts take less.
_PATIENCE_S = 1.0
_SHOWN_EVERY_S = 0.2
# Time between two lines on a start that takes long, in a log.
_LINE_EVERY_S = 10.0


class Starting:
    """The start of a service: a line, then the reason for waiting, then a line.

    The reason is in the last line of a terminal, or in a line of the log now and then. Enter it
    when the service starts, and leave it when the service ends, also if that is before it is ready.

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
        line: StatusLine,
        parts: str,
        waiting: Callable[[], str],
        serving: Callable[[], Sequence[str]] | None,
    ) -> None:
        self._line = line
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
        reason = self._waiting()
        while reason and not self._ended.wait(_SHOWN_EVERY_S):
            self._show(reason)
            reason = self._waiting()
        self._line.show("")
        if reason:
            return
        if self._serving is not None:
            note(f"Ready after {time.monotonic() - self._started_s:.1f} s.")
            for line in self._serving():
                note(line)
        self.ready.set()

    def _show(self, reason: str) -> None:
        now_s = time.monotonic()
        passed_s = now_s - self._started_s
        if self._line.live:
            if passed_s >= _PATIENCE_S:
                self._line.show(f"{passed_s:.0f} s: {reason}")
        elif now_s - self._line_s >= _LINE_EVERY_S:
            self._line_s = now_s
            note(f"Still starting after {passed_s:.0f} s: {reason}.")


def first_unmet(checks: Sequence[ProbeCheck]) -> str:
    """Return the first condition that is not met, and the number of others; empty for none."""
    unmet = [check.text for check in checks if not check.ok]
    more = f" (and {len(unmet) - 1} more)" if len(unmet) > 1 else ""
    return unmet[0] + more if unmet else ""
