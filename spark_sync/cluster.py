"""The job on a Spark cluster: what its executors get, and how they are told.

An executor needs Spark and a Python of the driver's minor version. The packages are sent as an
archive. The token travels in the environment of Python workers, inside the tasks that Spark sends
them: not on a command line, not in a Spark setting, and so neither in the UI nor in a checkpoint.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from delaylevel.cluster.connection import ENVIRONMENT_PREFIX, Connection
from delaylevel.errors import ConfigError

from .packages import FOLDER, pack

TOKEN_VARIABLE = ENVIRONMENT_PREFIX + "TOKEN"
_PROGRAM = Path(__file__).with_name("submitted.py").resolve()
_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
# Where these log at DEBUG, they write out the environment of Python workers, token and all.
_TALKS_OF_ENVIRONMENTS = (
    "org.apache.spark.sql.DataSourceRegistration",
    "org.apache.spark.sql.UDTFRegistration",
    "org.apache.spark.sql.classic.UDFRegistration",
)


@dataclass(frozen=True)
class Executors:
    """What executors get, and what they have.

    Attributes:
        ship: send the packages; False where executors have them installed.
        packages: further installed distributions to send, e.g. for steps of one's own.
        python: the executors' Python, a name in their PATH or a path. It must be of the driver's
            minor version; ``python3.X`` by default.
        archives: where archives are kept on this machine; the user's cache folder by default.
    """

    ship: bool = True
    packages: tuple[str, ...] = ()
    python: str | None = None
    archives: Path | None = None

    @property
    def python_name(self) -> str:
        """The name that the driver and the executors find a Python of their own by."""
        return Path(self.python).name if self.python else _default_python()


@dataclass(frozen=True)
class SubmitCommand:
    """A ``spark-submit`` command line that runs the job.

    Attributes:
        environment: variables that it needs beside the token.
        arguments: the program and its arguments.
    """

    environment: Mapping[str, str]
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        """Return it as one would write it in a shell."""
        rest = ":" + os.environ.get("PATH", "")
        variables = [
            f'{name}={shlex.quote(value.removesuffix(rest))}:"$PATH"'
            if name == "PATH" and value.endswith(rest)
            else f"{name}={shlex.quote(value)}"
            for name, value in self.environment.items()
        ]
        return " ".join([*variables, shlex.join(self.arguments)])


def is_local(master: str) -> bool:
    """Return whether executors run inside the driver, with its Python and packages."""
    return master == "local" or master.startswith("local[")


def cluster_conf(executors: Executors, conf: Mapping[str, str]) -> dict[str, str]:
    """Return the Spark settings that give executors their packages and their Python.

    Args:
        executors: what they get.
        conf: the user's own settings; archives and a Python path among them are kept.

    Raises:
        ConfigError: a package to send is not installed.
    """
    found: dict[str, str] = {}
    if executors.python and os.sep in executors.python:
        folder = os.path.dirname(executors.python)
        path = conf.get("spark.executorEnv.PATH", _SYSTEM_PATH)
        found["spark.executorEnv.PATH"] = f"{folder}:{path}"
    if executors.ship:
        folder_of_archives = executors.archives or platformdirs.user_cache_path("delaylevel")
        archive = pack(folder_of_archives, executors.packages).resolve()
        # Spark takes an address; one with a blank has to be escaped, and the part behind # is ours.
        ours = f"{archive.as_uri()}#{FOLDER}"
        found["spark.archives"] = _joined(",", conf.get("spark.archives"), ours)
        variable = "spark.executorEnv.PYTHONPATH"
        found[variable] = _joined(":", FOLDER, conf.get(variable))
    return found


def python_environment(executors: Executors) -> dict[str, str]:
    """Return the environment in which the driver finds its own Python by the executors' name.

    Spark starts the Python processes of source and sink on the driver's machine by the same name
    as in executors. So that name must lead here to this Python, and there to theirs.

    Raises:
        ConfigError: this Python has another name.
    """
    name = executors.python_name
    folder = Path(sys.executable).parent
    if not (folder / name).exists():
        raise ConfigError(
            f"there is no {name} beside this Python ({sys.executable}): the executors' Python "
            f"must have a name that this one has too, such as {_default_python()}"
        )
    path = os.environ.get("PATH", _SYSTEM_PATH)
    if path.split(":")[0] != str(folder):
        path = f"{folder}:{path}"
    return {"PATH": path, "PYSPARK_PYTHON": name, "PYSPARK_DRIVER_PYTHON": sys.executable}


def enter_environment(spark: Any, connection: Connection) -> None:
    """Give the Python workers of a session the token, and nothing that is meant for executors only.

    Call it before the data source is registered: what stands in the environment then goes along.

    Args:
        spark: a classic Spark session.
        connection: its token is passed on, if it has one by itself and not in a file.
    """
    environment: dict[str, str] = spark.sparkContext.environment
    # Executors have these from their own settings; on the driver's machine they would mislead.
    for name in ("PATH", "PYTHONPATH"):
        environment.pop(name, None)
    if connection.token is not None:
        _keep_environments_unsaid(spark)
        environment[TOKEN_VARIABLE] = connection.token.get_secret_value()


def _keep_environments_unsaid(spark: Any) -> None:
    """Leave out of a talkative log what holds the environment of Python workers.

    This program's own side of Py4J logs every value that goes to the JVM, at DEBUG as well.
    """
    python = logging.getLogger("py4j")
    if python.isEnabledFor(logging.DEBUG):
        python.setLevel(logging.INFO)
    log4j = spark.sparkContext._jvm.org.apache.logging.log4j
    for name in _TALKS_OF_ENVIRONMENTS:
        if log4j.LogManager.getLogger(name).isDebugEnabled():
            log4j.core.config.Configurator.setLevel(name, log4j.Level.INFO)


def submit_command(
    master: str, executors: Executors, conf: Mapping[str, str], arguments: Sequence[str]
) -> SubmitCommand:
    """Return the ``spark-submit`` command that runs ``delaylevel`` with these arguments.

    Args:
        master: Spark's master.
        executors: what executors get.
        conf: the user's own Spark settings.
        arguments: of the ``delaylevel`` program: ``sync spark TOPIC …``; never a token.
    """
    settings = dict(conf)
    environment: dict[str, str] = {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
    }
    if not is_local(master):
        settings.update(cluster_conf(executors, conf))
        environment = python_environment(executors)
    command = [_spark_submit(), "--master", master]
    for name in sorted(settings):
        command += ["--conf", f"{name}={settings[name]}"]
    return SubmitCommand(environment, (*command, str(_PROGRAM), *arguments))


def _spark_submit() -> str:
    """Return the path of SPARK_HOME's spark-submit, or of the one that PySpark brings."""
    home = os.environ.get("SPARK_HOME")
    if not home:
        import pyspark

        home = str(Path(pyspark.__file__).parent)
    return str(Path(home, "bin", "spark-submit"))


def _default_python() -> str:
    return f"python{sys.version_info[0]}.{sys.version_info[1]}"


def _joined(separator: str, *parts: str | None) -> str:
    return separator.join(part for part in parts if part)


def end_on_sigterm(spark: Any, asked: Callable[[], bool]) -> bool:
    """Let a SIGTERM that reaches Spark's JVM ask the job to end; return whether it will.

    Where ``spark-submit`` has started this program, a process manager's signal goes to the JVM,
    which would take the session away in the middle of a batch.

    Args:
        spark: a classic Spark session.
        asked: called at each signal, in another thread. False lets the JVM end at once.
    """
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return False
    from pyspark.java_gateway import ensure_callback_server_started

    gateway = spark.sparkContext._gateway
    ensure_callback_server_started(gateway)
    gateway.jvm.org.apache.spark.util.SignalUtils.register("TERM", _Handler(asked))
    return True


class _Handler:
    """A Scala function without arguments that calls a Python one."""

    def __init__(self, asked: Callable[[], bool]) -> None:
        self._asked = asked

    def apply(self) -> bool:
        return self._asked()

    class Java:
        implements = ("scala.Function0",)


# What Scala calls a function by that returns an unboxed boolean.
setattr(_Handler, "apply$mcZ$sp", _Handler.apply)
