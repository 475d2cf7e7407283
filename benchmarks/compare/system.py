"""The interface of a system, and its processes."""

from __future__ import annotations

import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from delaylevel.broker import process
from delaylevel.cluster.connection.local_brokers import DIRECTORIES

#: The business topic, or its counterpart.
TOPIC = "orders"
#: Java options that all servers in Java share. Only the size of their heaps is restricted.
HEAP_MB = 600


class Server:
    """Process of a system that ends with this process; its command must name the directory."""

    def __init__(self, command: Sequence[str], directory: Path, log_name: str) -> None:
        self.log_file = directory / f"{log_name}.log"
        self._directory = directory
        with self.log_file.open("wb") as log:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=directory,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._watcher = process.follow_parent(self.pid)

    def log(self) -> str:
        """Return what it has written since its start."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, condition: Callable[[], bool], limit_s: float = 300) -> None:
        """Wait until a condition holds; raise an error if the process ends or the time is over."""
        deadline = time.monotonic() + limit_s
        while not condition():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server is not ready; its log ends:\n{self.log()[-3000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill the process between two of its writes, as the embedded broker is killed."""
        process.kill(self.pid, str(self._directory))
        self._end()

    def stop(self) -> None:
        """Stop the process."""
        process.end(self.pid, str(self._directory), timeout_seconds=10)
        self._end()

    def _end(self) -> None:
        self._process.wait()
        self._watcher.kill()
        self._watcher.communicate()


class System:
    """A system under comparison. It listens on the loopback interface only."""

    name: str  # on the command line
    title: str  # in tables
    settings: str  # what its durability depends on, and every setting that is not its default
    cancels = True  # it can cancel messages

    def __init__(self) -> None:
        self.servers: list[Server] = []
        self.directory = Path()

    def fetch(self) -> None:
        """Download what is missing, with the usual clients of its ecosystem."""
        raise NotImplementedError

    def version(self) -> str:
        """Return its version."""
        raise NotImplementedError

    def start(self, cancellable: bool) -> None:
        """Start it in its directory, which is empty, and wait until clients can use it."""
        raise NotImplementedError

    def restart(self) -> None:
        """Start it again after :meth:`kill`, and wait until it accepts clients."""
        raise NotImplementedError

    def client(self, action: str) -> list[str]:
        """Return the command of its client that publishes, consumes or cancels."""
        raise NotImplementedError

    def kill(self) -> None:
        """Kill all of its processes (-9)."""
        while self.servers:
            self.servers.pop().kill()

    def stop(self) -> None:
        """Stop all of its processes that run."""
        while self.servers:
            self.servers.pop().stop()

    def pids(self) -> list[int]:
        """Return the IDs of its processes."""
        return [server.pid for server in self.servers]

    def run(
        self, command: Sequence[str], log_name: str, is_ready: Callable[[Server], bool]
    ) -> None:
        """Start a process, and wait until it is ready."""
        server = Server(command, self.directory, log_name)
        self.servers.append(server)
        server.wait_for(lambda: is_ready(server))


def cache(name: str) -> Path:
    """Return the directory for the downloads of a peer."""
    folder = Path(DIRECTORIES.user_cache_dir) / "peers" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def answers(url: str) -> bool:
    """Return whether a GET request succeeds."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def disk(directory: Path) -> int:
    """Return the disk space that a directory occupies, in bytes."""
    found = 0
    for path in directory.rglob("*"):
        try:
            found += path.lstat().st_blocks * 512
        except OSError:  # deleted meanwhile
            continue
    return found
