"""Private brokers on this machine: the state that each one stores, and whether it runs.

:class:`delaylevel.broker.EmbeddedBroker` starts and stops them. This part is below it, because a
connection without an address falls back to a private broker that runs.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from platformdirs.unix import Unix

log = logging.getLogger(__name__)

#: Names of instances.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# The XDG layout on every system: Pulsar's start script fails on the blank in "Application Support",
# the standard directory on macOS.
DIRECTORIES = Unix("delaylevel")

_FILE = "instance.json"
# With the data, which only this version of the server and later ones can read.
_VERSION_FILE = "data/pulsar-version"
_EXEC_SECONDS = 1.0
_EXEC_POLL_SECONDS = 0.002


@dataclass(frozen=True)
class BrokerStatus:
    """Status of an instance.

    Attributes:
        name: the name of the instance.
        directory: the directory with its data.
        running: True if its process is alive.
        pid: the process ID; None if it is not running.
        service_url, admin_url: its addresses, the same at every start if possible.
        functions: True if it has the functions worker.
        started_ms: time of the last start, ms since the epoch.
        version: version of its server; None if it has never been started.
    """

    name: str
    directory: Path
    running: bool
    pid: int | None
    service_url: str
    admin_url: str
    functions: bool
    started_ms: int | None
    version: str | None = None


@dataclass(frozen=True)
class SavedInstance:
    """Settings of the last start of an instance; a port of 0 has not been chosen yet."""

    pid: int = 0
    service_port: int = 0
    web_port: int = 0
    functions: bool = False
    conf: dict[str, str] = field(default_factory=dict)
    heap_mb: int = 400
    started_ms: int = 0
    bookie_port: int = 0  # it never changes: the stored data names the storage node by it

    @property
    def service_url(self) -> str:
        """URL for clients."""
        return f"pulsar://127.0.0.1:{self.service_port}"

    @property
    def admin_url(self) -> str:
        """URL of the admin REST interface."""
        return f"http://127.0.0.1:{self.web_port}"


def load_instance(directory: Path) -> SavedInstance | None:
    """Return the saved state; None if there is none or it is invalid."""
    try:
        return SavedInstance(**json.loads((directory / _FILE).read_text("utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s is invalid and ignored: %s", directory / _FILE, error)
        return None


def save_instance(directory: Path, saved: SavedInstance) -> None:
    """Replace the saved state atomically, readable only by this user: it may contain secrets."""
    scratch = directory / f"{_FILE}.new"
    scratch.touch(mode=0o600)
    scratch.write_text(json.dumps(asdict(saved), indent=2), encoding="utf-8")
    scratch.replace(directory / _FILE)


def load_version(directory: Path) -> str | None:
    """Return the version of the server that wrote the data; None if there are no data."""
    try:
        return (directory / _VERSION_FILE).read_text("utf-8").strip()
    except FileNotFoundError:
        return None


def save_version(directory: Path, version: str) -> None:
    """Replace the version of the server atomically."""
    path = directory / _VERSION_FILE
    path.parent.mkdir(exist_ok=True)
    scratch = path.with_suffix(".new")
    scratch.write_text(f"{version}\n", encoding="utf-8")
    scratch.replace(path)


def status_of(name: str, directory: Path) -> BrokerStatus:
    """Return the status of an instance; check the process, as a state file may be out of date."""
    saved = load_instance(directory)
    running = saved is not None and is_ours(saved.pid, marker(directory))
    return BrokerStatus(
        name=name,
        directory=directory,
        running=running,
        pid=saved.pid if saved and running else None,
        service_url=saved.service_url if saved else "",
        admin_url=saved.admin_url if saved else "",
        functions=saved is not None and saved.functions,
        started_ms=saved.started_ms if saved else None,
        version=load_version(directory),
    )


def instances_directory() -> Path:
    """Return the directory with the data of instances: ``$XDG_STATE_HOME/delaylevel/brokers``."""
    return Path(DIRECTORIES.user_state_dir) / "brokers"


def instances() -> list[BrokerStatus]:
    """Return the status of the instances in this user's state directory, sorted by name."""
    folders = sorted(path.parent for path in instances_directory().glob(f"*/{_FILE}"))
    return [status_of(path.name, path.absolute()) for path in folders if NAME.fullmatch(path.name)]


def running_instance() -> BrokerStatus | None:
    """Return the running instance ``default`` or, without it, the only one; otherwise None."""
    running = {status.name: status for status in instances() if status.running}
    if len(running) == 1:
        return next(iter(running.values()))
    return running.get("default")


def marker(directory: Path) -> str:
    """Return text that only an instance's processes have in their command lines: script and JVM."""
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
