"""Preparation of a server before its first start: fetched, and its classes archived."""

from __future__ import annotations

import os
import tempfile
import time
from functools import partial
from pathlib import Path

from delaylevel.errors import BrokerError, DelayLevelError

from .class_archive import archive_path
from .distribution import PULSAR_VERSION, Report, fetch, java, make_once
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
    make_once(home, archive.is_file, partial(_try_to_write, archive, report, version))
    return home


def _try_to_write(archive: Path, report: Report, version: str) -> None:
    report("Preparing it for quick starts (some 15 s, once) ...")
    try:
        _write(archive, version)
    except (DelayLevelError, OSError) as error:
        report(f"It was not prepared, and starts more slowly: {error}")


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
            _sync(part)
            part.replace(archive)
        finally:
            broker.stop()
            part.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Wait until a file is on the disk: half an archive would end each JVM that reads it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
