"""Clients of the systems: programs that publish, consume or cancel, and report in lines of text.

The options of a program are ``name=value`` arguments:

| option | actions | meaning |
|---|---|---|
| ``plan`` | publish, cancel | file of the due times in ms since the epoch |
| ``out`` | all | file for the outcome |
| ``sure`` | publish | ``yes``: repeat what is not confirmed, and write the confirmed numbers |
| ``named`` | publish | ``yes``: messages will be cancelled |
| ``numbers`` | cancel | file of the numbers of the messages to cancel |
| ``handles`` | publish, cancel | file for what the system needs to cancel the messages |
| ``limit_s`` | publish | longest time to publish, in seconds |

All numbers in files are 64-bit integers, the lowest byte first. The outcome of ``publish`` with
``sure`` is one byte for each message, 1 if it was confirmed. The outcome of ``consume`` are three
numbers for each arrival: number of the message, due time in ms, time of the arrival in µs. The
outcome of ``cancel`` is one byte for each number, 1 if the system reported success.

A program prints ``ready`` once it works, ``progress N`` now and then, and at last ``result`` with
a JSON object. A consumer runs until SIGTERM, and writes its arrivals at least once a second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

#: Messages without a confirmation that each publisher allows.
IN_FLIGHT = 5000
#: Calls at a time to cancel messages.
CALLS = 16


class Client:
    """Process of a client, with what it has printed."""

    def __init__(self, command: list[str], options: Mapping[str, Any], log_file: Path) -> None:
        self.progress = 0
        self._ready, self._log_file = threading.Event(), log_file
        self._result: dict[str, Any] | None = None
        arguments = [f"{name}={value}" for name, value in options.items()]
        path = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        with log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
            )
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def wait_ready(self, limit_s: float = 60) -> None:
        """Wait until the program works."""
        self._wait(self._ready.is_set, limit_s)

    def wait_progress(self, number: int, limit_s: float) -> None:
        """Wait until the program has reported this number, or its result."""
        self._wait(lambda: self.progress >= number or self._result is not None, limit_s)

    def result(self, limit_s: float) -> dict[str, Any]:
        """Wait for the result of the program, and return it."""
        self._wait(lambda: self._result is not None, limit_s)
        assert self._result is not None
        self._process.wait()
        return self._result

    def stop(self) -> None:
        """End the program."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._thread.join()

    def _wait(self, condition: Callable[[], bool], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            ended = self._process.poll() is not None and not self._thread.is_alive()
            if (ended and not condition()) or time.monotonic() > deadline:
                text = self._log_file.read_text(encoding="utf-8", errors="replace")
                raise RuntimeError(f"a client failed or is too slow; its log ends:\n{text[-3000:]}")
            time.sleep(0.01)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, _, rest = line.strip().partition(" ")
            if word == "ready":
                self._ready.set()
            elif word == "progress":
                self.progress = int(rest)
            elif word == "result":
                self._result = json.loads(rest)


class Arrivals:
    """Writer of a consumer's outcome, to a file in which earlier arrivals stay."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "ab")  # noqa: SIM115 - open while the program runs
        self._rows = array("q")
        self._written_s = time.monotonic()

    def add(self, stamp: bytes) -> None:
        """Note the arrival of a message that begins with this stamp."""
        self._rows.extend((int(stamp[:12]), int(stamp[12:25]), time.time_ns() // 1000))
        if len(self._rows) > 3000:
            self.write()

    def write(self) -> None:
        """Write what was noted."""
        self._file.write(self._rows.tobytes())
        self._file.flush()
        del self._rows[:]
        self._written_s = time.monotonic()

    def write_if_old(self) -> None:
        """Write what was noted if the last time is a while ago."""
        if time.monotonic() - self._written_s > 0.2:
            self.write()


def say(word: str, rest: object = "") -> None:
    """Print a line for the process that runs the program."""
    print(word, rest, flush=True)


def options() -> tuple[str, dict[str, str]]:
    """Return the action and the options of this program."""
    return sys.argv[1], dict(each.split("=", 1) for each in sys.argv[2:])


def numbers(path: str) -> list[int]:
    """Return the numbers in a file."""
    found = array("q")
    found.frombytes(Path(path).read_bytes())
    return found.tolist()


class Progress:
    """Thread that reports a count, while a program is busy or blocked."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count, self._done = count, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop reporting."""
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(0.02):
            say("progress", self._count())
