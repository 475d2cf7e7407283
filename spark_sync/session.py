"""The Spark session in which the job runs well, on this machine or on a cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import SparkSession

from delaylevel.cluster.connection import Connection

from .cluster import TOKEN_VARIABLE, cluster_conf, enter_environment, is_local, python_environment
from .settings import SyncSettings

_LOG4J = Path(__file__).with_name("log4j2.properties").resolve()


def spark_session(connection: Connection, settings: SyncSettings) -> SparkSession:
    """Make a Spark session in which the job runs well.

    Args:
        connection: its token goes to Python workers by the environment, never by a setting.
        settings: master, executors, and further Spark settings.

    Raises:
        ConfigError: what executors need is not here.
    """
    conf = {**settings.spark_conf}
    if is_local(settings.master):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        conf.setdefault("spark.driver.host", "127.0.0.1")
        conf.setdefault("spark.driver.bindAddress", "127.0.0.1")
    else:
        os.environ.update(python_environment(settings.executors))
        conf.update(cluster_conf(settings.executors, conf))
    if connection.token is not None:
        os.environ[TOKEN_VARIABLE] = connection.token.get_secret_value()
    builder = (
        SparkSession.Builder()
        .appName("delaylevel-sync")
        .master(settings.master)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        # A second copy of a running task would send its messages a second time.
        .config("spark.speculation", "false")
        .config("spark.sql.session.timeZone", "UTC")
        # Without it Spark refuses a batch read with pushFilters.
        .config("spark.sql.python.filterPushdown.enabled", "true")
        .config("spark.sql.shuffle.partitions", "2")
        # Ten thousand rows at once are ten megabytes, which no cache holds.
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "2000")
        .config("spark.sql.streaming.stopTimeout", "30s")
        .config("spark.sql.streaming.noDataProgressEventInterval", "10000")
        .config("spark.driver.extraJavaOptions", f"-Dlog4j2.configurationFile={_LOG4J.as_uri()}")
    )
    for name, value in conf.items():
        builder = builder.config(name, value)
    # At INFO it logs every event that Spark hands over.
    logging.getLogger("py4j").setLevel(max(logging.WARNING, logging.getLogger("py4j").level))
    with _interrupt_kept():
        spark = builder.getOrCreate()
    enter_environment(spark, connection)
    return spark


@contextlib.contextmanager
def _interrupt_kept() -> Iterator[None]:
    """Keep a program's own answer to Ctrl-C: a Spark context sets another one, that aborts."""
    ours = signal.getsignal(signal.SIGINT)
    yield
    if ours is not signal.default_int_handler and callable(ours):
        with contextlib.suppress(ValueError):  # not in the main thread, where nothing was set
            signal.signal(signal.SIGINT, ours)
