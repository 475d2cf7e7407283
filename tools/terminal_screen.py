"""A program in an emulated terminal, its screen as text, and a picture of it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any
from xml.sax.saxutils import escape

import pyte

# Colours of a dark terminal, each with a contrast of at least 4.5 to the background.
GROUND, TEXT, TITLE = "#10151c", "#d5dbe3", "#9aa5b1"
COLOURS = {
    "red": "#ff7b72",
    "green": "#56d364",
    "brown": "#e3b341",  # yellow, as pyte calls it
    "blue": "#79c0ff",
    "magenta": "#d2a8ff",
    "cyan": "#76e3ea",
}
_FONTS = "'DejaVu Sans Mono', Menlo, Consolas, 'Liberation Mono', monospace"
_EIGHTHS = "▏▎▍▌▋▊▉█"
# Sizes of a picture in pixels.
_CELL, _ROW, _MARGIN, _BAR = 8, 18, 14, 28


class WrapScreen(pyte.Screen):
    """A screen that remembers the rows whose text continued in the next row."""

    def __init__(self, columns: int, lines: int) -> None:
        self.continued: list[str] = []
        super().__init__(columns, lines)

    def draw(self, data: str) -> None:
        """Draw text, one character at a time."""
        for one in data:
            if self.cursor.x == self.columns and pyte.modes.DECAWM in self.mode:
                self.continued.append(self.display[self.cursor.y])
            super().draw(one)


def _accept_interrupts() -> None:
    # A program that a script runs in the background inherits that Ctrl-C is ignored.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A program in an emulated terminal, for a ``with`` block that ends it.

    Args:
        command: the program and its arguments.
        columns, lines: size of the terminal.
        environment: variables of the program in addition to those of this process.
        folder: its working directory.
    """

    def __init__(
        self,
        command: Sequence[str],
        columns: int = 80,
        lines: int = 24,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.screen = WrapScreen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self._lock = threading.Lock()
        self._master, slave = pty.openpty()
        self._set_size(columns, lines)
        hidden = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
        inherited = {name: value for name, value in os.environ.items() if name not in hidden}
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_accept_interrupts,
            cwd=folder,
            env={**inherited, "TERM": "xterm-256color", **(environment or {})},
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(5)
        os.close(self._master)

    @property
    def rows(self) -> list[str]:
        """The rows of the screen, without the empty ones at its end."""
        with self._lock:
            rows = [row.rstrip() for row in self.screen.display]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    @property
    def continued(self) -> list[str]:
        """The rows whose text continued in the next row."""
        with self._lock:
            return list(self.screen.continued)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Wait for the end of the program, and return its exit code."""
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        return code

    def wait_for(self, condition: Callable[[Sequence[str]], object], timeout_s: float = 60) -> None:
        """Wait until a condition on the rows holds.

        Raises:
            TimeoutError: it did not hold in time, or before the program ended.
        """
        deadline = time.monotonic() + timeout_s
        while not condition(self.rows):
            ended = self.process.poll() is not None and not self._reader.is_alive()
            if (ended and not condition(self.rows)) or time.monotonic() > deadline:
                raise TimeoutError("the screen shows\n" + "\n".join(self.rows))
            time.sleep(0.02)

    def resize(self, columns: int, lines: int) -> None:
        """Give the terminal another size."""
        with self._lock:
            self.screen.resize(lines, columns)
            self._set_size(columns, lines)

    def picture(self, title: str) -> str:
        """Return the screen as SVG, with a title for its frame and for screen readers."""
        with self._lock:
            return picture_of(self.screen, title)

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def _read(self) -> None:
        while True:
            try:
                if not select.select([self._master], [], [], 60)[0]:
                    continue
                data = os.read(self._master, 1 << 16)
            except (OSError, ValueError):  # the program has ended
                return
            if not data:
                return
            with self._lock:
                self._stream.feed(data)


def picture_of(screen: Any, title: str) -> str:
    """Return a screen as SVG.

    Every word has a place of its own, and bars are rectangles: columns are aligned in any font.
    """
    width = screen.columns * _CELL + 2 * _MARGIN
    height = screen.lines * _ROW + 2 * _MARGIN + _BAR
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>text {{ font: 13px {_FONTS}; fill: {TEXT}; }}</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="{GROUND}"/>',
        f'<text x="{_MARGIN}" y="{_BAR - 6}" style="fill: {TITLE}">{escape(title)}</text>',
    ]
    for y in range(screen.lines):
        row = [screen.buffer[y][x] for x in range(screen.columns)]
        x = 0
        for (colour, kind), run in groupby(row, key=lambda cell: (cell.fg, _kind_of(cell.data))):
            text = "".join(cell.data for cell in run)
            if kind == "bar":
                lines.append(_bar(text, x, y, COLOURS.get(colour, TEXT)))
            elif kind == "word":
                lines.append(_word(text, x, y, COLOURS.get(colour)))
            x += len(text)
    return "\n".join([*lines, "</svg>", ""])


def _kind_of(one: str) -> str:
    return "space" if one == " " else "bar" if one in _EIGHTHS else "word"


def _bar(text: str, x: int, y: int, colour: str) -> str:
    length = sum(_CELL * (_EIGHTHS.index(one) + 1) / 8 for one in text)
    top = _BAR + _MARGIN + y * _ROW
    return (
        f'<rect x="{_MARGIN + x * _CELL}" y="{top + 2}" width="{length:g}" '
        f'height="{_ROW - 4}" fill="{colour}"/>'
    )


def _word(text: str, x: int, y: int, colour: str | None) -> str:
    fill = "" if colour is None else f' style="fill: {colour}"'
    return (
        f'<text x="{_MARGIN + x * _CELL}" y="{_BAR + _MARGIN + y * _ROW + 13}" '
        f'textLength="{len(text) * _CELL}"{fill}>{escape(text)}</text>'
    )
