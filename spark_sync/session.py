"""A Spark session with the settings of the job, its Java process, and its executors' Python.

The executors of a cluster need Spark and a Python of the driver's minor version with the packages.
The token travels in the environment of Python workers, inside the tasks that Spark sends them. It
is on no command line and in no Spark setting, so neither the UI nor a checkpoint shows it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from delaylevel.cluster.connection.settings import ENVIRONMENT_PREFIX, Connection
from delaylevel.errors import ConfigError

from .options import SyncSettings

_LOG4J = Path(__file__).with_name("log4j2.properties").resolve()
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_TOKEN_VARIABLE = ENVIRONMENT_PREFIX + "TOKEN"
_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
# At DEBUG, these loggers write the environment of Python workers, which contains the token.
_LOGGERS_OF_ENVIRONMENTS = (
    "org.apache.spark.sql.DataSourceRegistration",
    "org.apache.spark.sql.UDTFRegistration",
    "org.apache.spark.sql.classic.UDFRegistration",
)
_LIGHT_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # A second copy of a running task would publish its messages a second time.
    "spark.speculation": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    # Spark's default of 10,000 rows is about 10 MB, more than a CPU cache holds.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "2000",
    "spark.sql.streaming.stopTimeout": "30s",
    "spark.sql.streaming.noDataProgressEventInterval": "10000",
    _JAVA_OPTIONS: f"-Dlog4j2.configurationFile={_LOG4J.as_uri()}",
}


def spark_session(
    connection: Connection, settings: SyncSettings, *, steps: bool = False
) -> SparkSession:
    """Create a Spark session with the settings of the job.

    Args:
        steps: True if the rows of messages go through Spark.
    """
    conf = {**settings.spark_conf}
    if settings.master == "local" or settings.master.startswith("local["):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        conf.setdefault("spark.driver.host", "127.0.0.1")
        conf.setdefault("spark.driver.bindAddress", "127.0.0.1")
        if not steps:
            # Spark only counts empty rows. Its compiler and its collector would take more time from
            # the Python processes on the same cores than they save.
            conf.setdefault(_JAVA_OPTIONS, f"{_DEFAULTS[_JAVA_OPTIONS]} {_LIGHT_JAVA}")
    else:
        environment, found = python_of_executors(settings.executor_python, conf)
        os.environ.update(environment)
        conf.update(found)
    if connection.token is not None:
        os.environ[_TOKEN_VARIABLE] = connection.token.get_secret_value()
    values = {
        "spark.app.name": "delaylevel-sync",
        "spark.master": settings.master,
        **_DEFAULTS,
        **conf,
    }
    builder = SparkSession.Builder()
    for name, value in values.items():
        builder = builder.config(name, value)
    # PySpark logs every error that it raises, as JSON.
    logging.getLogger("SQLQueryContextLogger").disabled = True
    # At INFO, Py4J logs every event that Spark delivers.
    logging.getLogger("py4j").setLevel(max(logging.WARNING, logging.getLogger("py4j").level))
    with _keep_interrupt_handler():
        spark = builder.getOrCreate()
    enter_environment(spark, connection)
    return spark


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
        environment[_TOKEN_VARIABLE] = connection.token.get_secret_value()


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


def python_of_executors(
    python: str | None, conf: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the environment of the driver and Spark's settings by which each finds its Python.

    Args:
        python: name or path of the executors' Python; ``python3.X`` of this version by default.
        conf: the other settings of Spark.
    """
    # Spark starts the Python processes of the source on the driver's machine by the same name as on
    # executors. That name must lead to this Python here, and to theirs there.
    default = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    name = Path(python).name if python else default
    here = Path(sys.executable).parent
    if not (here / name).exists():
        raise ConfigError(
            f"there is no {name} next to this Python ({sys.executable}): the executors' Python "
            f"must have a name that this one has too, such as {default}"
        )
    path = os.environ.get("PATH", _SYSTEM_PATH)
    if path.split(":")[0] != str(here):
        path = f"{here}:{path}"
    driver = {"PATH": path, "PYSPARK_PYTHON": name, "PYSPARK_DRIVER_PYTHON": sys.executable}
    variable = "spark.executorEnv.PATH"
    if python is None or os.sep not in python:
        return driver, {}
    return driver, {variable: f"{os.path.dirname(python)}:{conf.get(variable, _SYSTEM_PATH)}"}


@contextlib.contextmanager
def _keep_interrupt_handler() -> Iterator[None]:
    """Restore the program's handler of Ctrl-C: a Spark context installs one that aborts."""
    ours = signal.getsignal(signal.SIGINT)
    yield
    if ours is not signal.default_int_handler and callable(ours):
        with contextlib.suppress(ValueError):  # not the main thread: Spark has installed nothing
            signal.signal(signal.SIGINT, ours)
