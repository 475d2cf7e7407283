"""What an embedded broker instance remembers in its directory from one process to the next."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

log = logging.getLogger(__name__)

_FILE = "instance.json"


@dataclass(frozen=True)
class Saved:
    """The last start of an instance; a port of 0 has not been chosen yet.

    What is stored names the storage node (bookie) by its port, so that one never changes.
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
        """Where clients connect."""
        return f"pulsar://127.0.0.1:{self.service_port}"

    @property
    def admin_url(self) -> str:
        """Where the admin REST interface is."""
        return f"http://127.0.0.1:{self.web_port}"


def load(directory: Path) -> Saved | None:
    """What was saved last; None where nothing was, or where it is of no use."""
    try:
        return Saved(**json.loads((directory / _FILE).read_text("utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s is of no use and ignored: %s", directory / _FILE, error)
        return None


def save(directory: Path, saved: Saved) -> None:
    """Replace what was saved, in one step; settings may be secret, so only this user reads it."""
    scratch = directory / f"{_FILE}.new"
    scratch.touch(mode=0o600)
    scratch.write_text(json.dumps(asdict(saved), indent=2), encoding="utf-8")
    scratch.replace(directory / _FILE)
