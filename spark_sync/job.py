"""The sync job: the source, the sink, and a query that joins them for as long as it is wanted."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from delaylevel.cluster.admin import Admin
from delaylevel.cluster.connection import Connection
from delaylevel.cluster.partition_lock import describe_owner
from delaylevel.errors import (
    AlreadyRunningError,
    BrokerError,
    ConfigError,
    DataLossError,
    InvalidInputError,
    LevelTopicError,
    StepsError,
)
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import LevelTopicDescription, Mover
from delaylevel.model.source_partition import source_partitions
from delaylevel.mover.hop import check_delivery
from delaylevel.topics import registry as topics

from . import control
from .arrow_rows import SCHEMA
from .cluster import end_on_sigterm, enter_environment
from .deduplication import require_deduplication
from .driver import CLAIM_PATIENCE_S
from .listener import SyncListener
from .metrics import serve_metrics
from .options import connection_options
from .session import spark_session
from .settings import SyncSettings
from .source import FORMAT, DelayLevelDataSource
from .stats import JobStats, Standing
from .steps import Steps, apply_steps, local_sort_allowed

log = logging.getLogger(__name__)

_SHORTEST_TRIGGER_MS = 200
_LONGEST_TRIGGER_MS = 5000
_LOOK_EVERY_S = 0.25
_SLACK_S = 5.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0

_OUR_ERROR = re.compile(r"(delaylevel|_pulsar)\.\S+")
# The last line of a Python traceback, and not one of Java's.
_NOT_PYTHON = r"(?!(org|java|scala|py4j|at|Caused)\b)"
_PYTHON_ERROR = re.compile(_NOT_PYTHON + r"[A-Za-z_][\w.]*(Error|Exception)\b")

# Raised inside Spark's Python processes; in the driver they arrive as text.
_FATAL = (
    AlreadyRunningError,
    DataLossError,
    LevelTopicError,
    ConfigError,
    StepsError,
    InvalidInputError,
)


class SparkSyncJob:
    """Moves what is near-due in level topics, with Spark Structured Streaming.

    Args:
        connection: where the cluster is.
        settings: how the job runs.
        spark: a session to run in; it is not stopped here. Without it the job makes its own.
        steps: DataFrame steps of the user's own, between source and sink: see docs/spark.md.

    Raises:
        LevelTopicError: one of the topics is not a level topic, or is moved by a Function.
        InvalidInputError: effectively once, for a level topic with a tracker.
        AlreadyRunningError: another mover is at work; the text says which.
    """

    def __init__(
        self,
        connection: Connection,
        settings: SyncSettings,
        spark: SparkSession | None = None,
        steps: Steps | None = None,
    ) -> None:
        self._connection = connection
        self._steps = steps
        self._settings = settings
        self._given = spark
        self._stop = threading.Event()
        self._at_once = threading.Event()
        self._ready = threading.Event()
        self._asked_s: float | None = None
        self._control_dir = ""
        self.figures = JobStats()
        with Admin.from_connection(connection) as admin:
            self.descriptions = tuple(_describe(admin, name) for name in settings.level_topics)
            for description in self.descriptions:
                check_delivery(description, settings.delivery)
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
            on_progress: called with each ``StreamingQueryProgress``, in another thread.

        Raises:
            AlreadyRunningError, LevelTopicError: the job cannot go on.
            StepsError: the steps lose, change or multiply what has to be sent on.
            BrokerError: with ``once``, the query failed; what is unfinished is unacknowledged.
        """
        with contextlib.ExitStack() as stack:
            spark = stack.enter_context(self._session())
            enter_environment(spark, self._connection)
            end_on_sigterm(spark, self._asked_by_jvm)
            spark.dataSource.register(DelayLevelDataSource)
            self._control_dir = stack.enter_context(_folder())
            admin = stack.enter_context(Admin.from_connection(self._connection))
            standing = Standing(admin, self.descriptions)
            stack.enter_context(self._metrics(standing))
            listener = SyncListener(
                self._query_name, self._control_dir, self.figures, standing, on_progress
            )
            spark.streams.addListener(listener)
            stack.callback(spark.streams.removeListener, listener)
            self._run_queries(spark, listener)

    def _run_queries(self, spark: SparkSession, listener: SyncListener) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._stop.is_set():
            started = time.monotonic()
            try:
                self._run_query(spark, listener)
                return
            except StreamingQueryException as error:
                _raise_if_fatal(error)
                if self._settings.once:
                    raise BrokerError(f"the query failed: {_first_cause(error)}") from error
                self.figures.add_failure()
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
        """Ask the job to end after the batch that runs now; may be called from a signal handler.

        That batch is finished, committed and acknowledged; no other begins.
        """
        self._stop.set()

    def _asked_by_jvm(self) -> bool:
        """Answer a signal to the JVM: the first one asks for an end, the next one is its own."""
        first = not self._stop.is_set()
        self.stop()
        return first

    def stop_at_once(self) -> None:
        """End the job in the middle of a batch; the next run does the whole batch again."""
        self._at_once.set()
        self._stop.set()

    def dataframe(self, spark: SparkSession) -> DataFrame:
        """Return the streaming DataFrame of what is near-due, for steps of a user's own."""
        return self._source(spark).schema(SCHEMA).load()

    def _source(self, spark: SparkSession) -> Any:
        return spark.readStream.format(FORMAT).options(
            **self._common_options(), **self._settings.options
        )

    def _common_options(self) -> dict[str, str]:
        names = ",".join(item.topic for item in self.descriptions)
        return {
            "levelTopics": names,
            "delivery": self._settings.delivery.value,
            "controlDir": self._control_dir,
            **connection_options(self._connection),
        }

    def _run_query(self, spark: SparkSession, listener: SyncListener) -> None:
        # Spark looks a Python data source up in the session that is active in this thread, which
        # a session that was made in another thread becomes by making a DataFrame.
        spark.createDataFrame([], SCHEMA)
        forwarding = {}
        if self._steps is None:
            # Nobody looks at the rows: they need not leave the process that reads them.
            forwarding = {"forwardInSource": "true"}
            frame = self._source(spark).options(**forwarding).load()
        else:
            frame = apply_steps(self.dataframe(spark), self._steps, self._settings.delivery)
        writer = (
            frame.writeStream.format(FORMAT)
            .options(**self._common_options(), **forwarding)
            .option("checkpointLocation", self._settings.checkpoint)
            .queryName(self._query_name)
        )
        if self._settings.once:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=f"{self.trigger_ms} milliseconds")
        with local_sort_allowed(spark) if self._steps else contextlib.nullcontext():
            query = writer.start()
        try:
            while not query.awaitTermination(_LOOK_EVERY_S):
                if listener.warm.is_set():
                    self._ready.set()
                if self._at_once.is_set() or (self._stop.is_set() and self._is_over(query)):
                    return
        finally:
            query.stop()
            listener.wait_ended()

    def _is_over(self, query: Any) -> bool:
        """Ask the source for an end; return whether it has come.

        Once it is asked, no further batch begins. The one that runs is waited for, and then, for
        a while, for the next trigger, at which the source acknowledges and gives its claim back.
        """
        if self._asked_s is None:
            control.request_stop(self._control_dir)
            self._asked_s = time.monotonic()
        if query.status["isTriggerActive"]:
            self._asked_s = time.monotonic()
            return False
        patience_s = min(self.trigger_ms / 1000, _LONGEST_TRIGGER_MS / 1000) + _SLACK_S
        return (
            control.is_stopped(self._control_dir) or time.monotonic() - self._asked_s > patience_s
        )

    @property
    def _query_name(self) -> str:
        return Path(self._control_dir).name  # delaylevel-sync- and something of its own

    def _metrics(self, standing: Standing) -> contextlib.AbstractContextManager[Any]:
        if self._settings.metrics_port is None:
            return contextlib.nullcontext()
        return serve_metrics(
            self.figures,
            standing,
            [item.topic for item in self.descriptions],
            self._settings.metrics_port,
            self._settings.metrics_address,
        )

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


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """Make a folder that the query's processes on this machine meet the job in."""
    folder = tempfile.mkdtemp(prefix="delaylevel-sync-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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


def _worker_died(error: BaseException) -> bool:
    """Say whether a query could not be planned because a Python process had ended."""
    text = str(error)
    return "Python worker" in text and ("exited" in text or "EOFException" in text)


def _raise_if_fatal(error: PySparkException) -> None:
    text = str(error)
    for kind in _FATAL:
        marker = f"delaylevel.errors.{kind.__name__}: "
        if marker in text:
            raise kind(text.split(marker, 1)[1].split("\n", 1)[0]) from error


def _first_cause(error: BaseException) -> str:
    """Return the line of a Spark error that says what happened in Python, or its first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for pattern in (_OUR_ERROR, _PYTHON_ERROR):
        for line in reversed(lines):
            if pattern.match(line):
                return line
    return lines[0] if lines else type(error).__name__
