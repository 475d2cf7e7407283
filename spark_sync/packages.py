"""The installed packages that the job's Python workers need, as one archive for executors.

Executors need a Python of the driver's minor version, on the same kind of machine, and nothing
else: the archive is unpacked by Spark into the executor's folder and put on the Python path.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from delaylevel import __version__
from delaylevel import installed as _installed

# What executors call the folder that Spark unpacks the archive into.
FOLDER = "delaylevel-packages"
# What `pip install 'delaylevel[spark]'` brings, but Spark itself: executors have their own.
ROOTS = ("pulsar-client", "pydantic", "click", "urllib3", "platformdirs", "pyarrow")
_SPARKS_OWN = frozenset({"pyspark", "py4j"})
_OWN_PARTS = ("delaylevel", "delaylevel.functions", "delaylevel.spark_sync", "delaylevel.cli")


def pack(folder: Path, extra: Iterable[str] = ()) -> Path:
    """Return the archive of this environment's packages, made only if it is not there yet.

    Args:
        folder: where archives are kept; it is made. Archives of other versions stay.
        extra: further installed distributions, e.g. for a user's own steps.

    Returns:
        A zip file, named after what is in it.

    Raises:
        ConfigError: a distribution is not installed.
    """
    files = dict(_own_files())
    names = distributions((*ROOTS, *extra))
    for name in names:
        files.update(_installed.distribution_files(name))
    digest = hashlib.sha256()
    digest.update(f"{sys.version_info[:2]} {platform.machine()} {sys.platform}".encode())
    for inside in sorted(files):
        stat = files[inside].stat()
        digest.update(f"{inside}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    minor = f"py{sys.version_info[0]}{sys.version_info[1]}"
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / f"{FOLDER}-{__version__}-{minor}-{digest.hexdigest()[:12]}.zip"
    if not archive.exists():
        _write(archive, files)
    return archive


def distributions(roots: Iterable[str]) -> tuple[str, ...]:
    """Return distributions and all that they require here, without Spark's own, sorted.

    Args:
        roots: names of installed distributions.

    Raises:
        ConfigError: one of ``roots`` is not installed.
    """
    return _installed.distributions(roots, without=_SPARKS_OWN)


def _own_files() -> Iterator[tuple[str, Path]]:
    return _installed.project_files(_OWN_PARTS)


def _write(archive: Path, files: dict[str, Path]) -> None:
    """Write it aside and move it into place: another process may be making the same."""
    handle, name = tempfile.mkstemp(dir=archive.parent, suffix=".part")
    try:
        with (
            os.fdopen(handle, "wb") as stream,
            zipfile.ZipFile(
                stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1, strict_timestamps=False
            ) as target,
        ):
            for inside in sorted(files):
                target.write(files[inside], inside)
        os.replace(name, archive)
    except BaseException:
        os.unlink(name)
        raise
