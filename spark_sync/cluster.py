"""Settings of executors on a Spark cluster: packages, Python and token.

An executor needs Spark and a Python of the driver's minor version, on the same kind of machine. The
packages are shipped as an archive, which Spark unpacks into the executor's folder, and the Python
path contains that folder. The token travels in the environment of Python workers, inside the tasks
that Spark sends them. It is on no command line and in no Spark setting, so neither the UI nor a
checkpoint shows it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from delaylevel import __version__, installed
from delaylevel.cluster.connection.settings import ENVIRONMENT_PREFIX, Connection
from delaylevel.errors import ConfigError

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
    "numpy",
    "pyroaring",
    "zstandard",
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


TOKEN_VARIABLE = ENVIRONMENT_PREFIX + "TOKEN"
_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
# At DEBUG, these loggers write the environment of Python workers, which contains the token.
_LOGGERS_OF_ENVIRONMENTS = (
    "org.apache.spark.sql.DataSourceRegistration",
    "org.apache.spark.sql.UDTFRegistration",
    "org.apache.spark.sql.classic.UDFRegistration",
)


@dataclass(frozen=True)
class Executors:
    """Packages and Python of the executors.

    Attributes:
        ship: True to ship the packages; False if executors have them installed.
        packages: names of further installed distributions to ship, e.g. for a user's steps.
        python: the executors' Python, a name in their PATH or a path. It must have the driver's
            minor version; ``python3.X`` by default.
        archives: the folder of archives on this machine; the user's cache folder by default.
    """

    ship: bool = True
    packages: tuple[str, ...] = ()
    python: str | None = None
    archives: Path | None = None

    @property
    def python_name(self) -> str:
        """The name under which both the driver and the executors find their Python."""
        return Path(self.python).name if self.python else _default_python()


def is_local(master: str) -> bool:
    """Return whether executors run inside the driver, with its Python and packages."""
    return master == "local" or master.startswith("local[")


def cluster_conf(executors: Executors, conf: Mapping[str, str]) -> dict[str, str]:
    """Return Spark's settings for the executors' packages and Python; keep those in ``conf``."""
    found: dict[str, str] = {}
    if executors.python and os.sep in executors.python:
        folder = os.path.dirname(executors.python)
        path = conf.get("spark.executorEnv.PATH", _SYSTEM_PATH)
        found["spark.executorEnv.PATH"] = f"{folder}:{path}"
    if executors.ship:
        folder_of_archives = executors.archives or platformdirs.user_cache_path("delaylevel")
        archive = pack(folder_of_archives, executors.packages).resolve()
        # A URI, because a path may contain blanks; the fragment names the folder for unpacking.
        ours = f"{archive.as_uri()}#{FOLDER}"
        found["spark.archives"] = _joined(",", conf.get("spark.archives"), ours)
        variable = "spark.executorEnv.PYTHONPATH"
        found[variable] = _joined(":", FOLDER, conf.get(variable))
    return found


def python_environment(executors: Executors) -> dict[str, str]:
    """Return the environment in which the driver finds its own Python by the executors' name."""
    # Spark starts the Python processes of source and sink on the driver's machine by the same name
    # as on executors. That name must lead to this Python here, and to theirs there.
    name = executors.python_name
    folder = Path(sys.executable).parent
    if not (folder / name).exists():
        raise ConfigError(
            f"there is no {name} next to this Python ({sys.executable}): the executors' Python "
            f"must have a name that this one has too, such as {_default_python()}"
        )
    path = os.environ.get("PATH", _SYSTEM_PATH)
    if path.split(":")[0] != str(folder):
        path = f"{folder}:{path}"
    return {"PATH": path, "PYSPARK_PYTHON": name, "PYSPARK_DRIVER_PYTHON": sys.executable}


def enter_environment(spark: Any, connection: Connection) -> None:
    """Put the token into the environment of a session's Python workers.

    Call this before the data source is registered: Spark copies the environment at that moment. A
    token in a file is read from there instead.
    """
    environment: dict[str, str] = spark.sparkContext.environment
    # These are for executors, which have them from their settings; they are wrong on the driver.
    for name in ("PATH", "PYTHONPATH"):
        environment.pop(name, None)
    if connection.token is not None:
        _hide_environments(spark)
        environment[TOKEN_VARIABLE] = connection.token.get_secret_value()


def _hide_environments(spark: Any) -> None:
    """Keep the environment of Python workers out of logs at DEBUG."""
    # On this side, Py4J logs every value that goes to the JVM.
    py4j = logging.getLogger("py4j")
    if py4j.isEnabledFor(logging.DEBUG):
        py4j.setLevel(logging.INFO)
    log4j = spark.sparkContext._jvm.org.apache.logging.log4j
    for name in _LOGGERS_OF_ENVIRONMENTS:
        if log4j.LogManager.getLogger(name).isDebugEnabled():
            log4j.core.config.Configurator.setLevel(name, log4j.Level.INFO)


def _default_python() -> str:
    return f"python{sys.version_info[0]}.{sys.version_info[1]}"


def _joined(separator: str, *parts: str | None) -> str:
    return separator.join(part for part in parts if part)
