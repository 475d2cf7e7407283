"""A program in an emulated terminal, and its screen as text."""

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
from types import TracebackType

import pyte


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
    """A program in an emulated terminal, for a ``with`` block that ends it."""

    def __init__(
        self,
        command: Sequence[str],
        columns: int = 80,
        lines: int = 24,
        environment: Mapping[str, str] | None = None,
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
        """Wait until a condition on the rows holds; raise if it does not in time, or at the end."""
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
