"""The private broker of this user: the state that it stores, and whether it runs.

:class:`delaylevel.broker.EmbeddedBroker` starts and stops it. This part is below it, because a
connection without an address falls back to a private broker that runs.
"""

from __future__ import annotations

import json
import logging
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path

from platformdirs.unix import Unix

log = logging.getLogger(__name__)

# The XDG layout on every system: Pulsar's start script fails on the blank in "Application Support",
# the standard directory on macOS.
DIRECTORIES = Unix("delaylevel")

_FILE = "instance.json"
_EXEC_SECONDS = 1.0
_EXEC_POLL_SECONDS = 0.002


@dataclass(frozen=True)
class BrokerStatus:
    """Status of a private broker, and what it keeps from one start to the next.

    Attributes:
        directory: the directory with its data.
        pid: the process ID; None if it is not running.
        service_port, web_port: its loopback ports, the same at every start if possible; 0 before
            the first one.
        bookie_port: the port of its storage node, which never changes, as the data name the node
            by it.
        functions: True if it has the functions worker.
        started_ms: time of the last start, ms since the epoch; 0 without one.
        version: version of its server; empty before the first start.
    """

    directory: Path
    pid: int | None = None
    service_port: int = 0
    web_port: int = 0
    bookie_port: int = 0
    functions: bool = False
    started_ms: int = 0
    version: str = ""

    @property
    def running(self) -> bool:
        """True if its process is alive."""
        return self.pid is not None

    @property
    def service_url(self) -> str:
        """URL for clients."""
        return f"pulsar://127.0.0.1:{self.service_port}"

    @property
    def admin_url(self) -> str:
        """URL of the admin REST interface."""
        return f"http://127.0.0.1:{self.web_port}"


def status_of(directory: Path) -> BrokerStatus:
    """Return the status of a broker; check the process, as a state file may be out of date."""
    path, found = directory / _FILE, BrokerStatus(directory)
    try:
        found = BrokerStatus(directory, **json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s is invalid and ignored: %s", path, error)
    running = found.pid is not None and is_ours(found.pid, marker(directory))
    return found if running else replace(found, pid=None)


def save_status(status: BrokerStatus) -> None:
    """Replace the saved status atomically."""
    values = {name: value for name, value in vars(status).items() if name != "directory"}
    scratch = status.directory / f"{_FILE}.new"
    scratch.write_text(json.dumps(values, indent=2), encoding="utf-8")
    scratch.replace(status.directory / _FILE)


def usual_directory() -> Path:
    """Return the directory of the broker of this user: ``$XDG_STATE_HOME/delaylevel/broker``."""
    return (Path(DIRECTORIES.user_state_dir) / "broker").absolute()


def marker(directory: Path) -> str:
    """Return text that only the broker's process has in its command line, the script or the JVM."""
    return f" --metadata-dir {directory / 'data' / 'metadata'} "


def command_line(pid: int) -> str:
    """Return the command line of a process; empty if there is no process or it is a zombie."""
    # Small images have no `ps`, and macOS has no /proc.
    if not Path("/proc/self/stat").exists():
        return _command_line_from_ps(pid)
    limit = time.monotonic() + _EXEC_SECONDS
    while True:
        try:
            raw = Path(f"/proc/{pid}/cmdline").read_bytes()
            state = process_state(Path(f"/proc/{pid}/stat"))
        except OSError:
            return ""
        if raw or state in (b"Z", b"X"):
            return raw.replace(b"\0", b" ").decode(errors="replace")
        # Alive without a command line: within exec(), or ending. If it counted as gone now, stop()
        # could leave a broker running.
        if time.monotonic() > limit:
            return ""
        time.sleep(_EXEC_POLL_SECONDS)


def _command_line_from_ps(pid: int) -> str:
    answer = subprocess.run(
        ["ps", "-ww", "-p", str(pid), "-o", "command="],
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout.rstrip("\n") + " "


def is_ours(pid: int, marker: str) -> bool:
    """Return whether the process is alive and has the marker in its command line."""
    return marker in command_line(pid)


def process_state(stat: Path) -> bytes:
    """Return the state in a ``stat`` file of /proc, after a name that may contain anything."""
    return stat.read_bytes().rpartition(b")")[2].split()[0]
