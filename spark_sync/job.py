"""The sync job: the source, the sink, and a query that joins them for as long as it is wanted."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from delaylevel import topics
from delaylevel.admin import Admin
from delaylevel.claim import describe_owner
from delaylevel.config import Connection
from delaylevel.delivery import Delivery
from delaylevel.description import LevelTopicDescription, Mover
from delaylevel.errors import (
    AlreadyRunningError,
    BrokerError,
    ConfigError,
    DataLossError,
    InvalidInputError,
    LevelTopicError,
)
from delaylevel.reading import source_partitions

from .deduplication import require_deduplication
from .options import connection_options
from .rows import SCHEMA
from .source import CLAIM_PATIENCE_S, FORMAT, DelayLevelDataSource

log = logging.getLogger(__name__)

_LOG4J = Path(__file__).with_name("log4j2.properties").resolve()
_SHORTEST_TRIGGER_MS = 200
_LONGEST_TRIGGER_MS = 5000
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0

# Raised inside Spark's Python processes; in the driver they arrive as text.
_FATAL = (AlreadyRunningError, DataLossError, LevelTopicError, ConfigError, InvalidInputError)


@dataclass(frozen=True)
class SyncSettings:
    """How the job runs.

    Attributes:
        level_topics: the level topics (or their business topics) that it moves.
        checkpoint: the folder of the query's checkpoint, a path or any Hadoop file system's URI.
        once: move what is ripe now, and end; otherwise go on until it is stopped.
        trigger_ms: how often to look; by default a fifth of the shortest lead, 0.2 to 5 s.
        master: Spark's master; two local cores by default.
        delivery: at least once, in batches; or effectively once, by the broker's deduplication.
        options: further options of the source, e.g. ``startingOffsets``.
        spark_conf: further Spark settings.
    """

    level_topics: tuple[str, ...]
    checkpoint: str
    once: bool = False
    trigger_ms: int | None = None
    master: str = "local[2]"
    delivery: Delivery = Delivery.AT_LEAST_ONCE
    options: Mapping[str, str] = field(default_factory=dict)
    spark_conf: Mapping[str, str] = field(default_factory=dict)


class SparkSyncJob:
    """Moves what is near-due in level topics, with Spark Structured Streaming.

    Args:
        connection: where the cluster is.
        settings: how the job runs.
        spark: a session to run in; it is not stopped here. Without it the job makes its own.

    Raises:
        LevelTopicError: one of the topics is not a level topic, or is moved by a Function.
        AlreadyRunningError: another mover is at work; the text says which.
    """

    def __init__(
        self, connection: Connection, settings: SyncSettings, spark: SparkSession | None = None
    ) -> None:
        self._connection = connection
        self._settings = settings
        self._given = spark
        self._stop = threading.Event()
        self._ready = threading.Event()
        with Admin.from_connection(connection) as admin:
            self.descriptions = tuple(_describe(admin, name) for name in settings.level_topics)
            _check_unclaimed(admin, self.descriptions)
            if settings.delivery is Delivery.EFFECTIVELY_ONCE:
                for description in self.descriptions:
                    require_deduplication(admin, description)

    @property
    def trigger_ms(self) -> int:
        """How often the job looks for what is ripe, in ms."""
        if self._settings.trigger_ms is not None:
            return self._settings.trigger_ms
        lead_ms = min(item.levels.smallest_lead_ms for item in self.descriptions)
        return max(_SHORTEST_TRIGGER_MS, min(_LONGEST_TRIGGER_MS, lead_ms // 5))

    def run(self, on_progress: Callable[[Any], None] | None = None) -> None:
        """Run until the job is stopped, or, with ``once``, until what is ripe has been moved.

        A query that fails because the broker is away for a while is started again from its
        checkpoint, after a growing pause.

        Args:
            on_progress: called with each ``StreamingQueryProgress`` that is new.

        Raises:
            AlreadyRunningError, LevelTopicError: the job cannot go on.
            BrokerError: with ``once``, the query failed; what is unfinished is unacknowledged.
        """
        with self._session() as spark:
            spark.dataSource.register(DelayLevelDataSource)
            pause_s = _FIRST_PAUSE_S
            while not self._stop.is_set():
                started = time.monotonic()
                try:
                    self._run_query(spark, on_progress)
                    return
                except StreamingQueryException as error:
                    _raise_if_fatal(error)
                    if self._settings.once:
                        raise BrokerError(f"the query failed: {_first_cause(error)}") from error
                    if time.monotonic() - started > 2 * _LONGEST_PAUSE_S:
                        pause_s = _FIRST_PAUSE_S
                    log.warning(
                        "the query failed (%s); it starts again from its checkpoint in %.0f s",
                        _first_cause(error),
                        pause_s,
                    )
                    self._stop.wait(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the job has its claim and Spark is warm; return whether it is."""
        return self._ready.wait(timeout_s)

    def stop(self) -> None:
        """Ask the job to end after the batch that runs now; may be called from a signal handler."""
        self._stop.set()

    def dataframe(self, spark: SparkSession) -> DataFrame:
        """Return the streaming DataFrame of what is near-due, for steps of a user's own."""
        return (
            spark.readStream.format(FORMAT)
            .options(**self._common_options(), **self._settings.options)
            .load()
        )

    def _common_options(self) -> dict[str, str]:
        names = ",".join(item.topic for item in self.descriptions)
        return {
            "levelTopics": names,
            "delivery": self._settings.delivery.value,
            **connection_options(self._connection),
        }

    def _run_query(self, spark: SparkSession, on_progress: Callable[[Any], None] | None) -> None:
        # Spark looks a Python data source up in the session that is active in this thread, which
        # a session that was made in another thread becomes by making a DataFrame.
        spark.createDataFrame([], SCHEMA)
        writer = (
            self.dataframe(spark)
            .writeStream.format(FORMAT)
            .options(**self._common_options())
            .option("checkpointLocation", self._settings.checkpoint)
            .queryName("delaylevel-sync")
        )
        if self._settings.once:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=f"{self.trigger_ms} milliseconds")
        query = writer.start()
        seen = -1
        try:
            while not query.awaitTermination(0.25):
                progress = query.lastProgress
                if progress is not None and progress.batchId != seen:
                    seen = progress.batchId
                    self._ready.set()
                    if on_progress is not None:
                        on_progress(progress)
                if self._stop.is_set() and not query.status["isTriggerActive"]:
                    return
        finally:
            query.stop()

    @contextlib.contextmanager
    def _session(self) -> Iterator[SparkSession]:
        if self._given is not None:
            yield self._given
            return
        spark = spark_session(self._connection, self._settings)
        try:
            yield spark
        finally:
            spark.stop()


def spark_session(connection: Connection, settings: SyncSettings) -> SparkSession:
    """Make a Spark session in which the job runs well.

    Args:
        connection: its token goes to Python workers by the environment, never by a setting.
        settings: master and further Spark settings.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if connection.token is not None:
        os.environ["DELAYLEVEL_TOKEN"] = connection.token.get_secret_value()
    builder = (
        SparkSession.Builder()
        .appName("delaylevel-sync")
        .master(settings.master)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        # A second copy of a running task would send its messages a second time.
        .config("spark.speculation", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.streaming.stopTimeout", "30s")
        .config("spark.sql.streaming.noDataProgressEventInterval", "10000")
        .config("spark.driver.extraJavaOptions", f"-Dlog4j2.configurationFile={_LOG4J.as_uri()}")
    )
    if settings.master.startswith("local"):
        builder = builder.config("spark.driver.host", "127.0.0.1").config(
            "spark.driver.bindAddress", "127.0.0.1"
        )
    for name, value in settings.spark_conf.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def default_checkpoint(
    state_dir: Path, connection: Connection, level_topics: tuple[str, ...]
) -> str:
    """Return the checkpoint folder for a set of level topics of one cluster."""
    identity = "\n".join([connection.service_url, *sorted(level_topics)])
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return str(state_dir / "checkpoints" / digest)


def _describe(admin: Admin, name: str) -> LevelTopicDescription:
    description = topics.describe(admin, name)
    if description.mover is not Mover.SPARK:
        raise LevelTopicError(
            f"level topic {description.topic} is moved by a {description.mover.value}, "
            "not by Spark: deploy the Function, or create a level topic with --mover spark"
        )
    return description


def _check_unclaimed(admin: Admin, descriptions: tuple[LevelTopicDescription, ...]) -> None:
    """Say who is at work before Spark is started; the claim itself is made in the query.

    A mover that has just been killed is still seen for some seconds.
    """
    deadline = time.monotonic() + CLAIM_PATIENCE_S
    for description in descriptions:
        first = source_partitions(description)[0]
        while owner := describe_owner(admin, first):
            if time.monotonic() > deadline:
                raise AlreadyRunningError(
                    f"another mover is at work on level topic {description.topic}: {owner}. Stop "
                    "it first; one mover at a time serves a level topic"
                )
            time.sleep(0.5)


def _raise_if_fatal(error: StreamingQueryException) -> None:
    text = str(error)
    for kind in _FATAL:
        marker = f"delaylevel.errors.{kind.__name__}: "
        if marker in text:
            raise kind(text.split(marker, 1)[1].split("\n", 1)[0]) from error


def _first_cause(error: BaseException) -> str:
    """Return the line of a Spark error that says what happened in Python, or its first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith(("delaylevel.", "_pulsar.")):
            return line
    return lines[0] if lines else type(error).__name__
