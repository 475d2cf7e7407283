"""The processes of a run: they are started again when they end, and can be killed and suspended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cluster.rest.http import Rest
from delaylevel.errors import DelayLevelError
from delaylevel.functions import deployment
from delaylevel.model.level_topic import LevelTopicDescription

_AGAIN_S = 1.0
_STOP_S = 60.0
# A worker that has just started may not know its functions yet.
_WORKER_S = 120.0


class Victim:
    """Processes that faults kill and suspend; the first one is the part itself."""

    name: str

    def tree(self) -> list[psutil.Process]:
        """Return the process and everything that it has started."""
        raise NotImplementedError

    @property
    def pid(self) -> int | None:
        """ID of the process; None if it does not run."""
        return next((each.pid for each in self.tree()), None)

    def end(self) -> None:
        for each in self.tree():
            with contextlib.suppress(psutil.Error):
                each.kill()


class Part(Victim):
    """A process that has to run as long as it is wanted, with a folder of its own."""

    def __init__(self, name: str, arguments: Sequence[str], folder: Path) -> None:
        self.name = name
        self.is_program = arguments[0] == "cli"
        self.has_clock = arguments[0] in ("cli", "producer")
        self.wanted = True
        self.folder = folder / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = self.folder / "output.log"
        self._started_s = 0.0
        self._command = [sys.executable, "-m", "torture.part", name, *arguments]
        self._environment = _environment(folder)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.RLock()

    @property
    def pid(self) -> int | None:
        with self._lock:
            process = self._process
            return None if process is None or process.poll() is not None else process.pid

    def start(self) -> None:
        with self._lock, self.log.open("ab") as output:
            output.write(f"--- started at {time.strftime('%H:%M:%S')}\n".encode())
            output.flush()
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment,
                cwd=self.folder,
                start_new_session=True,
            )
            self._started_s = time.monotonic()

    def look(self) -> None:
        """Start the process again if it has ended; wait a moment between two starts."""
        with self._lock:
            early = time.monotonic() - self._started_s < _AGAIN_S
            if self.wanted and self.pid is None and not early:
                self.start()

    def tree(self) -> list[psutil.Process]:
        pid = self.pid
        if pid is not None:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                return [process, *process.children(recursive=True)]
        return []

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
            if self.pid is None:
                self.start()

    def end(self) -> None:
        with self._lock:
            self.wanted = False
            tree, process = self.tree(), self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        for each in tree:  # some have a session of their own
            with contextlib.suppress(psutil.Error):
                each.kill()
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


class MovingFunction(Victim):
    """The Function of one level topic, with one instance, which the broker's worker runs.

    The worker gives it the broker's own address, so that only its admin calls go through a proxy.
    It starts an instance again that died, half a minute later; but none after its own restart:
    there, docs/functions.md asks for `pulsar-admin functions restart`.
    """

    name = "function"

    def __init__(
        self, broker: EmbeddedBroker, description: LevelTopicDescription, admin_url: str
    ) -> None:
        self._broker = broker
        self._function = deployment.function_name(description)
        self._rest = Rest(broker.connection.admin_url)
        options = deployment.FunctionOptions(admin_url=admin_url)
        deployment.deploy(broker.connection, description, options)

    def restart(self) -> None:
        """Stop and start the instance, as `pulsar-admin functions restart` does."""
        deadline_s = time.monotonic() + _WORKER_S
        while True:
            try:
                self._rest.request("POST", f"functions/{self._function}/restart", api="v3")
                return
            except DelayLevelError:
                if time.monotonic() > deadline_s:
                    raise
            time.sleep(0.5)

    def tree(self) -> list[psutil.Process]:
        """Return the instance, the youngest first: a dead broker leaves an earlier one behind."""
        found = []
        _tenant, namespace, name = self._function.split("/")
        marks = f'"name":"{name}"', f'"namespace":"{namespace}"', str(self._broker.directory)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.cmdline())
                if all(mark in words for mark in ("python_instance_main.py", *marks)):
                    found.append(process)
        return sorted(found, key=lambda each: each.create_time(), reverse=True)
