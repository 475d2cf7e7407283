"""A Spark session with the settings of the job, and its Java process."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import SparkSession

from delaylevel.cluster.connection.settings import Connection

from .cluster import TOKEN_VARIABLE, cluster_conf, enter_environment, is_local, python_environment
from .options import SyncSettings

_LOG4J = Path(__file__).with_name("log4j2.properties").resolve()
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
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
    # A token goes to Python workers in their environment.
    conf = {**settings.spark_conf}
    if is_local(settings.master):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        conf.setdefault("spark.driver.host", "127.0.0.1")
        conf.setdefault("spark.driver.bindAddress", "127.0.0.1")
        if not steps:
            # Spark only counts empty rows. Its compiler and its collector would take more time from
            # the Python processes on the same cores than they save.
            conf.setdefault(_JAVA_OPTIONS, f"{_DEFAULTS[_JAVA_OPTIONS]} {_LIGHT_JAVA}")
    else:
        os.environ.update(python_environment(settings.executors))
        conf.update(cluster_conf(settings.executors, conf))
    if connection.token is not None:
        os.environ[TOKEN_VARIABLE] = connection.token.get_secret_value()
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


@contextlib.contextmanager
def _keep_interrupt_handler() -> Iterator[None]:
    """Restore the program's handler of Ctrl-C: a Spark context installs one that aborts."""
    ours = signal.getsignal(signal.SIGINT)
    yield
    if ours is not signal.default_int_handler and callable(ours):
        with contextlib.suppress(ValueError):  # not the main thread: Spark has installed nothing
            signal.signal(signal.SIGINT, ours)
