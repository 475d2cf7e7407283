"""Programs in emulated terminals, and what a person sees and types there."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyte

_HISTORY = 10_000
# The shell reports the exit code of each command in a sequence that terminals do not show.
_END = re.compile(rb"\x1b\]133;D;(\d+)\x07")
_PROMPT_COMMAND = r"printf '\033]133;D;%s\007' $?"
_SEQUENCE = re.compile(r"\x1b\][^\x07]*\x07|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[=>()][AB0]?")


def _begin() -> None:
    # A program that a script runs in the background inherits that Ctrl-C is ignored.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C reaches what runs in this terminal


class Terminal:
    """A program in an emulated terminal, for a ``with`` block that ends it."""

    def __init__(
        self,
        command: Sequence[str],
        columns: int = 80,
        lines: int = 24,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.screen = pyte.HistoryScreen(columns, lines, history=_HISTORY)
        self._stream = pyte.ByteStream(self.screen)
        self._raw = bytearray()
        self._lock = threading.Lock()
        self._master, slave = pty.openpty()
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)
        hidden = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
        inherited = {name: value for name, value in os.environ.items() if name not in hidden}
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_begin,
            env={**inherited, "TERM": "xterm-256color", **(environment or {})},
            cwd=folder,
        )
        os.close(slave)
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(signal.SIGINT)

    def end(self, signal_number: signal.Signals) -> None:
        """End the program by a signal, and close the terminal."""
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._closing.set()
        self._reader.join()
        os.close(self._master)

    @property
    def rows(self) -> list[str]:
        """The rows of the screen, without the empty ones at its end."""
        with self._lock:
            rows = [row.rstrip() for row in self.screen.display]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    def wait(self, timeout_s: float = 60.0) -> int:
        """Wait for the end of the program, and return its exit code."""
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        return code

    def wait_for(
        self, condition: Callable[[list[str]], object], timeout_s: float = 60, what: str = ""
    ) -> None:
        """Wait until a condition on the rows holds; fail if it does not in time, or at the end."""
        deadline = time.monotonic() + timeout_s
        while not condition(self.rows):
            ended = self.process.poll() is not None and not self._reader.is_alive()
            if (ended and not condition(self.rows)) or time.monotonic() > deadline:
                raise AssertionError(f"waited for {what}; the screen:\n" + "\n".join(self.rows))
            time.sleep(0.02)

    def _read(self) -> None:
        while not self._closing.is_set():
            if not select.select([self._master], [], [], 0.1)[0]:
                continue
            try:
                data = os.read(self._master, 1 << 16)
            except OSError:  # the program has ended
                return
            with self._lock:
                self._raw += data
                self._stream.feed(data)


class Shell(Terminal):
    """A terminal with a shell (``bash``), in which a person types commands.

    Args:
        folder: the folder in which the shell starts.
        environ: the environment of the shell.
        columns, rows: the size.
    """

    def __init__(
        self, folder: Path, environ: Mapping[str, str], columns: int = 80, rows: int = 24
    ) -> None:
        self._typed = 0  # place in the output at which the last command was typed
        self._first = 0  # its row, counted from the first one that was ever on the screen
        # Nothing of this process's environment: the shell begins with what `env` gives it.
        given = {name: value for name, value in environ.items() if name not in ("COLUMNS", "LINES")}
        own = {"TERM": "xterm-256color", "PS1": "$ ", "PROMPT_COMMAND": _PROMPT_COMMAND}
        words = [f"{name}={value}" for name, value in {**given, **own}.items()]
        bash = ["env", "-i", *words, "bash", "--norc", "--noprofile", "-i"]
        super().__init__(bash, columns, rows, folder=folder)
        self.wait_for(lambda _: self.exit_code is not None, 30, "a prompt")

    @property
    def exit_code(self) -> int | None:
        """The exit code of the last command; None while it runs."""
        with self._lock:
            found = _END.findall(self._raw, self._typed)
        return int(found[-1]) if found else None

    @property
    def lines(self) -> list[str]:
        """The rows since the last command was typed, also those that have left the screen."""
        with self._lock:
            gone = self.screen.history.top
            rows = ["".join(row[x].data for x in range(self.screen.columns)) for row in gone]
            return [row.rstrip() for row in [*rows, *self.screen.display][self._first :]]

    @property
    def text(self) -> str:
        """Everything that was ever written, without control sequences."""
        with self._lock:
            return _SEQUENCE.sub("", self._raw.decode(errors="replace"))

    def type(self, line: str) -> None:
        """Type a line and the return key."""
        with self._lock:
            self._typed = len(self._raw)
            self._first = len(self.screen.history.top) + self.screen.cursor.y
        self._write(line.encode() + b"\r")

    def interrupt(self) -> None:
        """Type Ctrl-C."""
        self._write(b"\x03")

    def close(self) -> None:
        """End the shell and everything that it has started."""
        self.end(signal.SIGHUP)

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._master, data) :]
