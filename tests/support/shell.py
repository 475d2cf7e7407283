"""A terminal with a shell, for tests of everything that a person sees and types."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pyte

# The shell reports the exit code of each command in a sequence that terminals do not show.
_END = re.compile(rb"\x1b\]133;D;(\d+)\x07")
_PROMPT_COMMAND = r"printf '\033]133;D;%s\007' $?"
_SEQUENCE = re.compile(r"\x1b\][^\x07]*\x07|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[=>()][AB0]?")
_HISTORY = 10_000
_POLL_S = 0.05


class NotSeenError(AssertionError):
    """Something that a person waits for did not appear on the screen."""


class Shell:
    """A terminal emulator in which a shell (``bash``) runs.

    Args:
        folder: the folder in which the shell starts.
        environ: the environment of the shell.
        columns, rows: the size.
    """

    def __init__(
        self, folder: Path, environ: Mapping[str, str], columns: int = 80, rows: int = 24
    ) -> None:
        self._screen = pyte.HistoryScreen(columns, rows, history=_HISTORY)
        self._stream = pyte.ByteStream(self._screen)
        self._lock = threading.Lock()
        self._raw = bytearray()
        self._typed = 0  # place in the output at which the last command was typed
        self._first = 0  # its row, counted from the first one that was ever on the screen
        pid, self._fd = pty.fork()
        if pid == 0:
            os.chdir(folder)
            size = {"COLUMNS", "LINES"}
            kept = {name: value for name, value in environ.items() if name not in size}
            own = {"TERM": "xterm-256color", "PS1": "$ ", "PROMPT_COMMAND": _PROMPT_COMMAND}
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], {**kept, **own})
        self._pid = pid
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.wait(lambda: self.exit_code is not None, "a prompt", 30)

    @property
    def exit_code(self) -> int | None:
        """The exit code of the last command; None while it runs."""
        with self._lock:
            found = _END.findall(self._raw, self._typed)
        return int(found[-1]) if found else None

    @property
    def display(self) -> list[str]:
        """The rows on the screen."""
        with self._lock:
            return [row.rstrip() for row in self._screen.display]

    @property
    def lines(self) -> list[str]:
        """The rows since the last command was typed, also those that have left the screen."""
        with self._lock:
            gone = self._screen.history.top
            rows = ["".join(row[x].data for x in range(self._screen.columns)) for row in gone]
            return [row.rstrip() for row in [*rows, *self._screen.display][self._first :]]

    @property
    def text(self) -> str:
        """Everything that was ever written, without control sequences."""
        with self._lock:
            return _SEQUENCE.sub("", self._raw.decode(errors="replace"))

    def type(self, line: str) -> None:
        """Type a line and the return key."""
        with self._lock:
            self._typed = len(self._raw)
            self._first = len(self._screen.history.top) + self._screen.cursor.y
        self._write(line.encode() + b"\r")

    def interrupt(self) -> None:
        """Type Ctrl-C."""
        self._write(b"\x03")

    def wait(self, condition: Callable[[], object], what: str, patience_s: float) -> None:
        """Wait until a condition is met.

        Raises:
            NotSeenError: it was not met in time.
        """
        deadline = time.monotonic() + patience_s
        while not condition():
            if time.monotonic() > deadline:
                screen = "\n".join(self.display)
                raise NotSeenError(f"waited {patience_s:.0f} s for {what}; the screen:\n{screen}")
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End the shell and everything that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGHUP)
        self._closing.set()
        self._reader.join()
        os.close(self._fd)
        os.waitpid(self._pid, 0)

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._fd, data) :]

    def _read(self) -> None:
        while not self._closing.is_set():
            if not select.select([self._fd], [], [], 0.1)[0]:
                continue
            try:
                data = os.read(self._fd, 1 << 16)
            except OSError:
                return
            with self._lock:
                self._raw += data
                self._stream.feed(data)
