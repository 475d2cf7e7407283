"""A shell in a terminal, in which a person types commands and reads what they print."""

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
from collections.abc import Callable, Mapping
from pathlib import Path

_COLUMNS, _ROWS = 80, 24
# The shell reports the exit code of each command in a sequence that terminals do not show.
_END = re.compile(rb"\x1b\]133;D;(\d+)\x07")
_PROMPT_COMMAND = r"printf '\033]133;D;%s\007' $?"
_SEQUENCE = re.compile(r"\x1b\][^\x07]*\x07|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[=>()][AB0]?")


def _begin() -> None:
    # A program that a script runs in the background inherits that Ctrl-C is ignored.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C reaches what runs in this terminal


class Shell:
    """A terminal with ``bash``, which starts in a folder with nothing but this environment."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._raw = bytearray()
        self._lock = threading.Lock()
        self._typed = 0  # place in the output at which the last command was typed
        self._master, slave = pty.openpty()
        size = struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)
        given = {name: value for name, value in environ.items() if name not in ("COLUMNS", "LINES")}
        own = {"TERM": "xterm-256color", "PS1": "$ ", "PROMPT_COMMAND": _PROMPT_COMMAND}
        self._process = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_begin,
            env={**given, **own},
            cwd=folder,
        )
        os.close(slave)
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.wait_for(lambda: self.exit_code is not None, 30, "a prompt")

    def close(self) -> None:
        """End the shell and everything that it has started, and close the terminal."""
        self._process.send_signal(signal.SIGHUP)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._closing.set()
        self._reader.join()
        os.close(self._master)

    @property
    def exit_code(self) -> int | None:
        """The exit code of the last command; None while it runs."""
        with self._lock:
            found = _END.findall(self._raw, self._typed)
        return int(found[-1]) if found else None

    @property
    def lines(self) -> list[str]:
        """The lines since the last command was typed; of one that was drawn again, the last."""
        found = self._text(self._typed).splitlines()
        return [line.rstrip().rpartition("\r")[2] for line in found]

    @property
    def text(self) -> str:
        """Everything that was ever written, without control sequences."""
        return self._text(0)

    def type(self, line: str) -> None:
        """Type a line and the return key."""
        with self._lock:
            self._typed = len(self._raw)
        self._write(line.encode() + b"\r")

    def interrupt(self) -> None:
        """Type Ctrl-C."""
        self._write(b"\x03")

    def wait_for(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        """Wait until a condition holds; fail if it does not in time, or when the shell ends."""
        deadline = time.monotonic() + seconds
        while not condition():
            ended = self._process.poll() is not None and not self._reader.is_alive()
            if (ended and not condition()) or time.monotonic() > deadline:
                raise AssertionError(f"waited for {what}; the screen:\n" + "\n".join(self.lines))
            time.sleep(0.02)

    def _text(self, first: int) -> str:
        with self._lock:
            return _SEQUENCE.sub("", self._raw[first:].decode(errors="replace"))

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._master, data) :]

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
