"""One process of a run: it is started again when it ends, and can be killed and suspended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

_AGAIN_S = 1.0
_STOP_S = 60.0


class Part:
    """A process that has to run until the end.

    Args:
        name: unique name.
        arguments: arguments of ``python -m torture.part``.
        folder: folder for its log and its files.

    Attributes:
        name: as the argument.
        is_program: True for a process of the product.
        has_clock: True if its clock can be stepped.
        environment: its environment variables.
        ended: number of times that it ended without being asked to.
        wanted: True while it has to run.
    """

    def __init__(self, name: str, arguments: Sequence[str], folder: Path) -> None:
        self.name = name
        self.is_program = arguments[0] == "cli"
        self.has_clock = arguments[0] in ("cli", "producer")
        self.ended = 0
        self.wanted = True
        self.folder = folder / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.started_s = 0.0
        self._arguments = arguments
        self.environment = _environment(folder)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.RLock()
        self._killed = False

    @property
    def log(self) -> Path:
        """Path of its output."""
        return self.folder / "output.log"

    @property
    def pid(self) -> int | None:
        """ID of the process; None if it does not run."""
        with self._lock:
            process = self._process
            return None if process is None or process.poll() is not None else process.pid

    def start(self) -> None:
        """Start the process."""
        with self._lock, self.log.open("ab") as output:
            output.write(f"--- started at {time.strftime('%H:%M:%S')}\n".encode())
            output.flush()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "torture.part", self.name, *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.environment,
                cwd=self.folder,
                start_new_session=True,
            )
            self.started_s = time.monotonic()

    def look(self) -> None:
        """Start the process again if it has ended; wait a moment between two starts."""
        with self._lock:
            if not self.wanted or self.pid is not None:
                return
            if time.monotonic() - self.started_s < _AGAIN_S:
                return
            if not self._killed:
                self.ended += 1
            self._killed = False
            self.start()

    def tree(self) -> list[psutil.Process]:
        """Return the process and everything that it has started."""
        pid = self.pid
        if pid is None:
            return []
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            return [process, *process.children(recursive=True)]
        return []

    def kill(self, choose: Callable[[list[psutil.Process]], psutil.Process | None]) -> bool:
        """Kill one process of the tree; return False if there is none."""
        with self._lock:
            found = choose(self.tree())
            if found is None:
                return False
            self._killed = True
            with contextlib.suppress(psutil.Error):
                found.kill()
            if self._process is not None and found.pid == self._process.pid:
                self._process.wait()
            return True

    def stop(self) -> None:
        """End the process by SIGTERM, and do not start it again."""
        with self._lock:
            self.wanted = False
            process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.end()

    def resume(self) -> None:
        """Let the process run again, after `stop`."""
        with self._lock:
            self.wanted = True
            self._killed = True  # its end is no surprise
            if self.pid is None:
                self.start()

    def end(self) -> None:
        """Kill the process and everything that it has started."""
        with self._lock:
            self.wanted = False
            tree = self.tree()
            process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for each in tree:
            with contextlib.suppress(psutil.Error):
                each.kill()
        if process is not None:
            process.wait()


def _environment(folder: Path) -> dict[str, str]:
    """Return an environment without the settings of the person who runs this."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("DELAYLEVEL_")}
    return {
        **kept,
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "PYTHONUNBUFFERED": "1",
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_SUBMIT_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "XDG_CONFIG_HOME": str(folder / "home" / "config"),
        "XDG_STATE_HOME": str(folder / "home" / "state"),
    }


class Supervisor:
    """Thread that starts processes again when they end."""

    def __init__(self) -> None:
        self.parts: dict[str, Part] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    def add(self, part: Part) -> Part:
        """Start a process, and watch it from now on."""
        part.start()
        self.parts[part.name] = part
        return part

    def _run(self) -> None:
        while not self._end.wait(0.2):
            for part in list(self.parts.values()):
                part.look()

    def close(self) -> None:
        """Kill everything."""
        self._end.set()
        self._thread.join()
        for part in self.parts.values():
            part.wanted = False
        for part in self.parts.values():
            part.end()
