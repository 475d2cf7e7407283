"""The installed packages that the job's Python workers need, as one archive for executors.

Executors need only a Python of the driver's minor version, on the same kind of machine: Spark
unpacks the archive into the executor's folder, and the Python path contains that folder.
"""

from __future__ import annotations

import hashlib
import platform
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from delaylevel import __version__, installed

# The name of the folder into which Spark unpacks the archive.
FOLDER = "delaylevel-packages"
# The requirements of `delaylevel[spark]` without Spark itself, which executors have.
ROOTS: tuple[str, ...] = (
    "pulsar-client",
    "pydantic",
    "click",
    "certifi",
    "urllib3",
    "platformdirs",
    "pyarrow",
)
if sys.version_info < (3, 11):  # later ones have tomllib
    ROOTS += ("tomli",)
_FROM_SPARK = frozenset({"pyspark", "py4j"})
_OWN_PARTS = ("delaylevel", "delaylevel.functions", "delaylevel.spark_sync", "delaylevel.cli")


def pack(folder: Path, extra: Iterable[str] = ()) -> Path:
    """Return the archive of this environment's packages; create it if it does not exist yet.

    Args:
        folder: the folder of archives; it is created. Archives of other versions stay.
        extra: names of further installed distributions, e.g. for a user's steps.

    Returns:
        The path of a zip file whose name contains a digest of its contents.

    Raises:
        ConfigError: a distribution is not installed.
    """
    files = dict(installed.project_files(_OWN_PARTS))
    for name in distributions((*ROOTS, *extra)):
        files.update(installed.distribution_files(name))
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
    """Return distributions and their installed requirements, without Spark's, sorted."""
    return installed.distributions(roots, without=_FROM_SPARK)


def _write(archive: Path, files: dict[str, Path]) -> None:
    """Write a temporary file and rename it: another process may write the same archive."""
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        part = Path(folder, archive.name)
        with zipfile.ZipFile(
            part, "w", zipfile.ZIP_DEFLATED, compresslevel=1, strict_timestamps=False
        ) as target:
            for inside in sorted(files):
                target.write(files[inside], inside)
        part.replace(archive)
