"""Status of an embedded broker instance, and the state that is stored in its directory."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

log = logging.getLogger(__name__)

_FILE = "instance.json"


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
    """

    name: str
    directory: Path
    running: bool
    pid: int | None
    service_url: str
    admin_url: str
    functions: bool
    started_ms: int | None


@dataclass(frozen=True)
class SavedInstance:
    """Settings of the last start of an instance; a port of 0 has not been chosen yet.

    The stored data names the storage node (bookie) by its port, so ``bookie_port`` never changes.
    """

    pid: int
    service_port: int
    web_port: int
    functions: bool
    conf: dict[str, str]
    heap_mb: int
    started_ms: int
    bookie_port: int = 0

    @property
    def service_url(self) -> str:
        """URL for clients."""
        return f"pulsar://127.0.0.1:{self.service_port}"

    @property
    def admin_url(self) -> str:
        """URL of the admin REST interface."""
        return f"http://127.0.0.1:{self.web_port}"


def load(directory: Path) -> SavedInstance | None:
    """Return the saved state; None if there is none or it is invalid."""
    try:
        return SavedInstance(**json.loads((directory / _FILE).read_text("utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s is invalid and ignored: %s", directory / _FILE, error)
        return None


def save(directory: Path, saved: SavedInstance) -> None:
    """Replace the saved state atomically, readable only by this user: it may contain secrets."""
    scratch = directory / f"{_FILE}.new"
    scratch.touch(mode=0o600)
    scratch.write_text(json.dumps(asdict(saved), indent=2), encoding="utf-8")
    scratch.replace(directory / _FILE)
