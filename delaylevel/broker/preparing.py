"""Preparation of a server before its first start: fetched, and its classes archived."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from delaylevel.errors import BrokerError

from .class_archive import archive_path
from .distribution import PULSAR_VERSION, Report, fetch, java, locked
from .embedded import EmbeddedBroker

# The JVM writes some 90 MB when it ends: 6 s on two idle processors.
_WRITE_S = 120


def prepare(report: Report = lambda message: None, version: str = PULSAR_VERSION) -> Path:
    """Fetch a server, and archive its classes, so that its later starts take less time.

    The archive is made once for each build of Java, by one start in a temporary directory. Without
    it, a server starts as well.

    Args:
        report: function that receives lines about the progress.
        version: the full version of the server.

    Returns:
        The directory of the server.

    Raises:
        InvalidInputError: this is not a version of a server that can be started here.
        PrerequisiteError: Java or Maven is missing, or Maven cannot fetch the server.
    """
    home = fetch(report, version)
    archive = archive_path(home, java())
    if archive.is_file():
        return home
    with locked(home.with_name(f"{home.name}.lock")):
        if not archive.is_file():
            report("Preparing it for quick starts (some 15 s, once) ...")
            try:
                _write(archive, version)
            except (BrokerError, OSError) as error:
                report(f"It was not prepared, and starts more slowly: {error}")
    return home


def _write(archive: Path, version: str) -> None:
    part = archive.with_suffix(".part")
    part.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="delaylevel-") as scratch:
        broker = EmbeddedBroker(
            "classes",
            directory=Path(scratch) / "broker",
            follow_parent=True,
            version=version,
            archive_to=part,
        )
        try:
            broker.start()
            started = time.monotonic()
            broker.stop(timeout_seconds=_WRITE_S)
            if time.monotonic() - started >= _WRITE_S:
                raise BrokerError(f"Java took more than {_WRITE_S} s to archive the classes")
            if not part.is_file():
                raise BrokerError("Java did not archive the classes")
            part.replace(archive)
        finally:
            broker.stop()
            part.unlink(missing_ok=True)
