"""The sync job: a streaming query that forwards what it reads, restarted when it fails."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.functions import collect_list
from pyspark.sql.streaming.listener import StreamingQueryProgress

from delaylevel.cluster.connection.settings import ENVIRONMENT_PREFIX, Connection
from delaylevel.cluster.failures import may_pass
from delaylevel.cluster.logs import RepeatedWarning
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.rest.admin import Admin
from delaylevel.cluster.threads import GrowingPause
from delaylevel.errors import (
    AlreadyRunningError,
    BrokerError,
    ConfigError,
    DataLossError,
    InvalidInputError,
    LevelTopicError,
    StepsError,
    UpgradeRequiredError,
)
from delaylevel.model.formatting import format_duration
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.mover.ready import trigger_of
from delaylevel.mover.reporting import MoverReporter
from delaylevel.mover.service import MoverStats, check_movable
from delaylevel.prometheus import serve
from delaylevel.topics.roster import Roster, RosterReporter
from delaylevel.topics.status import StatusCache, reported

from .arrow_rows import SCHEMA
from .forwarding import forwarded
from .options import (
    FORMAT,
    STOP,
    STOPPED,
    SyncOptions,
    SyncSettings,
    connection_options,
    is_told,
    tell,
    topics_option,
)
from .source import DelayLevelDataSource
from .steps import LOCAL_SORT_ALLOWED, Steps, apply_steps, cause_of, place_of_failure

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
    "spark.app.name": "delaylevel-sync",
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
    # All are read after each batch, some tenths of a second later.
    "spark.sql.streaming.numRecentProgressUpdates": "20",
    _JAVA_OPTIONS: f"-Dlog4j2.configurationFile={_LOG4J.as_uri()}",
}

log = logging.getLogger(__name__)

#: The statistics of a batch: the numbers of messages by outcome, and ``latest_ms``, by level topic.
Report = Mapping[str, Mapping[str, int]]


#: The name of the observation that collects the reports of a batch's tasks.
OBSERVATION = "delaylevel"


def report_of(progress: Any) -> Report:
    """Return the sum of the tasks' reports."""
    found: dict[str, dict[str, int]] = {}
    observed = progress.observedMetrics.get(OBSERVATION)
    for text in () if observed is None else observed.reports:
        for topic, counts in json.loads(text).items():
            total = found.setdefault(topic, dict.fromkeys(counts, 0))
            latest_ms = max(total["latest_ms"], counts["latest_ms"])
            total.update({name: total[name] + count for name, count in counts.items()})
            total["latest_ms"] = latest_ms
    return found


class JobMovers:
    """The level topics of a job, with the statistics of movers, from the progress of its query."""

    def __init__(
        self,
        descriptions: Sequence[LevelTopicDescription],
        admin: TopicAdmin,
        on_progress: Callable[[Any], None] | None = None,
    ) -> None:
        self.members = StatusCache(partial(reported, admin))
        self._stats = {each: MoverStats() for each in descriptions}
        self._on_progress = on_progress
        self._seen, self._batch = "", -1  # the time of the last progress, and the last batch

    def served(self) -> Sequence[tuple[LevelTopicDescription, MoverStats]]:
        """Return the level topics of the job, with their statistics."""
        return list(self._stats.items())

    def failed(self, reason: str) -> None:
        """Count a failure of the query, which has ended."""
        self._stats = {each: stats.failed(reason) for each, stats in self._stats.items()}

    def look(self, query: Any) -> bool:
        """Count the batches that a query has completed; return False as long as there is none."""
        # Java's objects, because PySpark fails on the JSON of a trigger that took no millisecond.
        last = query._jsq.lastProgress()
        if last is None or last.timestamp() == self._seen:
            return last is not None
        self._seen = last.timestamp()
        # A query that completes a batch, even one without messages, has all locks.
        self._stats = {
            each: replace(stats, state="moving", problem="") for each, stats in self._stats.items()
        }
        for progress in query._jsq.recentProgress():
            # While a query is idle, its progress has the number of the next batch, without rows.
            if progress.numInputRows() and progress.batchId() > self._batch:
                self._batch = progress.batchId()
                self._count(StreamingQueryProgress.fromJObject(progress))
        return True

    def _count(self, progress: Any) -> None:
        report = report_of(progress)
        self._stats = {
            each: stats.passed(counts, counts["latest_ms"])
            if (counts := report.get(each.topic))
            else stats
            for each, stats in self._stats.items()
        }
        log.info("%s", batch_line(progress, report))
        if self._on_progress is not None:
            try:
                self._on_progress(progress)
            except Exception:
                log.exception("batch %d: on_progress failed", progress.batchId)


def batch_line(progress: Any, report: Report) -> str:
    """Return the statistics of a batch in one line."""
    rows, duration_ms = progress.numInputRows, progress.durationMs.get("triggerExecution", 0)
    totals: Counter[str] = Counter()
    for counts in report.values():
        totals.update(counts)
    del totals["latest_ms"]
    late_ms = max((counts["latest_ms"] for counts in report.values()), default=0)
    return (
        f"batch {progress.batchId}: {rows:,} rows in {format_duration(duration_ms)}, "
        f"{rows * 1000 / max(1, duration_ms):,.0f}/s, "
        + "".join(f"{count:,} {outcome}, " for outcome, count in totals.items() if count)
        + f"late by {format_duration(late_ms)}"
    )


def spark_session(
    connection: Connection, settings: SyncSettings, *, steps: bool = False
) -> SparkSession:
    """Create a Spark session; with ``steps``, the rows of messages go through it."""
    conf = {**settings.spark_conf}
    if settings.master == "local" or settings.master.startswith("local["):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        conf.setdefault("spark.driver.host", "127.0.0.1")
        conf.setdefault("spark.driver.bindAddress", "127.0.0.1")
        if not steps:
            # Spark only counts empty rows. Its compiler and its collector would take more time from
            # the Python processes on the same cores than they save.
            conf.setdefault(_JAVA_OPTIONS, f"{_DEFAULTS[_JAVA_OPTIONS]} {_LIGHT_JAVA}")
    else:
        # Spark starts the Python processes of the source on the driver's machine by the same name
        # as on executors. So the name must lead to this Python here, and to theirs there.
        path, ours = os.environ.get("PATH", _SYSTEM_PATH), str(Path(sys.executable).parent)
        if path.split(":")[0] != ours:
            os.environ["PATH"] = f"{ours}:{path}"
        os.environ.setdefault("PYSPARK_PYTHON", "python{}.{}".format(*sys.version_info[:2]))
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if connection.token is not None:
        os.environ[_TOKEN_VARIABLE] = connection.token.get_secret_value()
    conf = {"spark.master": settings.master, **_DEFAULTS, **conf}
    # PySpark logs every error that it raises, as JSON.
    logging.getLogger("SQLQueryContextLogger").disabled = True
    # At INFO, Py4J logs every event that Spark delivers.
    logging.getLogger("py4j").setLevel(max(logging.WARNING, logging.getLogger("py4j").level))
    with _keep_interrupt_handler():
        return SparkSession.Builder().config(map=conf).getOrCreate()


def enter_environment(spark: Any, connection: Connection) -> None:
    """Put the token into the environment of a session's Python workers."""
    # Spark copies it when the data source is registered. A token in a file is read from there
    # instead. It travels inside the tasks that Spark sends, so it is on no command line and in no
    # setting, and neither the UI nor a checkpoint shows it.
    environment: dict[str, str] = spark.sparkContext.environment
    # These are for executors, which have them from their settings; they are wrong on the driver.
    for name in ("PATH", "PYTHONPATH"):
        environment.pop(name, None)
    if connection.token is not None:
        _hide_environments(spark)
        environment[_TOKEN_VARIABLE] = connection.token.get_secret_value()


def _hide_environments(spark: Any) -> None:
    """Keep the environment of Python workers out of logs at DEBUG."""
    py4j = logging.getLogger("py4j")
    if py4j.isEnabledFor(logging.DEBUG):  # it logs every value that goes to the JVM
        py4j.setLevel(logging.INFO)
    log4j = spark.sparkContext._jvm.org.apache.logging.log4j
    for name in _LOGGERS_OF_ENVIRONMENTS:
        if log4j.LogManager.getLogger(name).isDebugEnabled():
            log4j.core.config.Configurator.setLevel(name, log4j.Level.INFO)


@contextlib.contextmanager
def _keep_interrupt_handler() -> Iterator[None]:
    """Restore the program's handler of Ctrl-C: a Spark context installs one that aborts."""
    ours = signal.getsignal(signal.SIGINT)
    yield
    if ours is not signal.default_int_handler and callable(ours):
        with contextlib.suppress(ValueError):  # not the main thread: Spark has installed nothing
            signal.signal(signal.SIGINT, ours)


_LONGEST_TRIGGER_MS = 5000
_POLL_S = 0.25
_STOP_SLACK_S = 5.0
# By default, Spark starts 20 processes in each batch to rename and protect files of a checkpoint.
_LOCAL_FILES = {
    "spark.sql.streaming.checkpointFileManagerClass": "org.apache.spark.sql.execution.streaming"
    ".checkpointing.FileSystemBasedCheckpointFileManager"
}
# A query that has run for longer than this has worked.
_LONG_S = 60.0

# The class of errors for values that an expression cannot convert or compute.
_DATA_ERROR = "SQLSTATE: 22"
_OUR_ERROR = re.compile(r"(delaylevel|_pulsar)\.\S+")

# Raised in Spark's Python processes; they reach this process as text.
_FATAL = (
    AlreadyRunningError,
    DataLossError,
    LevelTopicError,
    ConfigError,
    StepsError,
    UpgradeRequiredError,
    InvalidInputError,
)


class SparkSyncJob:
    """Mover of near-due messages with Spark Structured Streaming.

    Args:
        spark: the session to run in, which is not stopped here; None to create one.
        steps: the user's DataFrame steps between source and sink: see docs/spark.md.

    Attributes:
        descriptions: the level topics.
        refused: the reason for each level topic that cannot be served, by its name.
        ready: set once the job has its locks and Spark is warm.
        http_address: address and port of the HTTP service; None while it is not served.

    Raises:
        LevelTopicError: none of the topics can be served: it is not a level topic, or is moved by a
            Function. If others can be served, this one is reported.
        BrokerError: the broker did not answer for one of the topics: start the job again.
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
        self.ready = threading.Event()
        self._stop_requested_s: float | None = None
        self._control_dir = ""
        self._warning = RepeatedWarning(log, f"Spark job for {', '.join(settings.level_topics)}")
        self.http_address: tuple[str, int] | None = None
        with Admin.from_connection(connection) as admin:
            found: list[LevelTopicDescription] = []

            def serve(description: LevelTopicDescription, named: bool) -> None:
                check_movable(description)
                found.append(description)

            roster = Roster(admin, settings.level_topics, serve)
            roster.start()
        # Spark's query has a fixed set of level topics, so those that are refused wait for the next
        # start. None should wait that long for a failure that may pass.
        for error in roster.errors.values():
            if may_pass(error):
                raise error
        self.descriptions = tuple(found)
        self._roster, self.refused = roster, roster.refused

    @property
    def trigger_ms(self) -> int:
        """The interval between two searches for ready messages, in ms."""
        if self._settings.trigger_ms is not None:
            return self._settings.trigger_ms
        return min(map(trigger_of, self.descriptions))

    def run(self, on_progress: Callable[[Any], None] | None = None) -> None:
        """Run until the job is stopped, or, with ``once``, until all ready messages are moved.

        A query that fails because the broker is unavailable is started again from its checkpoint,
        after a growing pause.

        Args:
            on_progress: function to call with the ``StreamingQueryProgress`` of each batch with
                messages, soon after its end; its errors are only logged.

        Raises:
            AlreadyRunningError, LevelTopicError: the job cannot continue; or, with ``once``, all is
                moved except the messages of level topics that cannot be served.
            StepsError: the steps lose, change or multiply rows.
            BrokerError: with ``once``, the query failed; unfinished messages are unacknowledged.
        """
        with contextlib.ExitStack() as stack:
            spark = self._given or stack.enter_context(
                spark_session(self._connection, self._settings, steps=self._steps is not None)
            )
            enter_environment(spark, self._connection)
            spark.dataSource.register(DelayLevelDataSource)
            self._control_dir = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="delaylevel-sync-", ignore_cleanup_errors=True)
            )
            admin = stack.enter_context(
                Admin.from_connection(self._connection, for_service=not self._settings.once)
            )
            movers = JobMovers(self.descriptions, admin, on_progress)
            if self._settings.metrics_port is not None:
                port, address = self._settings.metrics_port, self._settings.metrics_address
                untold = RosterReporter(self._roster, "Start the job again then.")
                collectors = MoverReporter(movers), untold
                served = stack.enter_context(serve(collectors, port, address))
                self.http_address = address, served
            refused = "; ".join(f"{name}: {reason}" for name, reason in self.refused.items())
            try:
                self._run_queries(spark, movers)
            except LevelTopicError as error:
                if not refused:
                    raise
                # The query does not know these, but its checkpoint may contain them.
                raise LevelTopicError(f"{error}. Not served: {refused}") from error
        if self._settings.once and refused and not self._stop.is_set():
            raise LevelTopicError(
                "the ready messages were moved, except those of level topics that cannot be "
                f"served: {refused}"
            )

    def _run_queries(self, spark: SparkSession, movers: JobMovers) -> None:
        pause = GrowingPause()
        while not self._stop.is_set():
            started = time.monotonic()
            try:
                self._run_query(spark, movers)
                return
            except StreamingQueryException as error:
                log.debug("the query failed", exc_info=True)
                _raise_if_fatal(error)
                cause, is_ours = _explained(error)
                if self._settings.once:
                    # Without Spark's text, which has the plan, the offsets and a Java stack.
                    if self._steps is None or is_ours:
                        raise BrokerError(f"the query failed{cause}") from None
                    raise StepsError(f"the steps failed{cause}") from None
                movers.failed(f"the query failed{cause}")
                if time.monotonic() - started > _LONG_S:
                    # It worked for a while, so this is not the same failure again.
                    pause.reset()
                self._warning.failed(
                    f"the query failed{cause}. It starts again from its checkpoint after a pause; "
                    "`delaylevel doctor` tells whether the cluster forbids what it needs"
                )
                self._stop.wait(pause.next_s())

    def stop(self) -> None:
        """Request the end of the job after the current batch; safe in a signal handler.

        The current batch is completed, committed and acknowledged; no other batch begins.
        """
        self._stop.set()

    def stop_at_once(self) -> None:
        """End the job in the middle of a batch; the next run repeats the whole batch."""
        self._at_once.set()
        self._stop.set()

    def _run_query(self, spark: SparkSession, movers: JobMovers) -> None:
        # Spark looks up a Python data source in the active session of this thread. A session that
        # was created in another thread becomes active here by creating a DataFrame.
        spark.createDataFrame([], SCHEMA)
        settings: dict[str, str] = {}
        options = {
            "levelTopics": topics_option(item.topic for item in self.descriptions),
            "controlDir": self._control_dir,
            **connection_options(self._connection),
        }
        reader = spark.readStream.format(FORMAT).options(**options, **self._settings.options)
        if self._steps is None:
            # Nothing uses the rows, so they need not leave the process that reads them.
            frame = reader.option("forwardInSource", "true").load()
        else:
            rows = apply_steps(reader.schema(SCHEMA).load(), self._steps)
            frame = forwarded(rows, SyncOptions.parse(options))
            settings |= LOCAL_SORT_ALLOWED
        if urlsplit(self._settings.checkpoint).scheme in ("", "file"):
            settings |= _LOCAL_FILES
        settings = {k: v for k, v in settings.items() if k not in self._settings.spark_conf}
        writer = (
            frame.observe(OBSERVATION, collect_list("report").alias("reports"))
            .writeStream.format("noop")
            .option("checkpointLocation", self._settings.checkpoint)
        )
        if self._settings.once:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=f"{self.trigger_ms} milliseconds")
        with _set(spark, settings):
            query = writer.start()
        try:
            while not query.awaitTermination(_POLL_S):
                if movers.look(query):
                    self.ready.set()
                    self._warning.over()
                if self._at_once.is_set() or (self._stop.is_set() and self._is_stopped(query)):
                    return
        finally:
            query.stop()
            movers.look(query)

    def _is_stopped(self, query: Any) -> bool:
        """Request that the source stops; return whether it has stopped."""
        # After the request, no further batch begins. Wait for the current batch, and then, for a
        # limited time, for the next trigger: there the source acknowledges and releases its locks.
        if self._stop_requested_s is None:
            tell(self._control_dir, STOP)
            self._stop_requested_s = time.monotonic()
        if query.status["isTriggerActive"]:
            self._stop_requested_s = time.monotonic()
            return False
        timeout_s = min(self.trigger_ms, _LONGEST_TRIGGER_MS) / 1000 + _STOP_SLACK_S
        waited_s = time.monotonic() - self._stop_requested_s
        return is_told(self._control_dir, STOPPED) or waited_s > timeout_s


def default_checkpoint(
    state_dir: Path, connection: Connection, level_topics: tuple[str, ...]
) -> str:
    """Return the default checkpoint folder for a set of level topics of one cluster."""
    identity = "\n".join([connection.service_url, *sorted(level_topics)])
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return str(state_dir / "checkpoints" / digest)


@contextlib.contextmanager
def _set(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Change settings of a session for the start of a query, which keeps them."""
    before = {name: spark.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            spark.conf.unset(name) if value is None else spark.conf.set(name, value)


def _raise_if_fatal(error: PySparkException) -> None:
    text = str(error)
    for kind in _FATAL:
        marker = f"delaylevel.errors.{kind.__name__}: "
        if marker in text:
            raise kind(text.split(marker, 1)[1].split("\n", 1)[0]) from None


def _explained(error: PySparkException) -> tuple[str, bool]:
    """Return where a query failed and why, and False if it failed in the steps."""
    lines = str(error).splitlines()
    if "No module named 'delaylevel'" in str(error):
        return ": the executors' Python has no delaylevel; see docs/spark.md, On a cluster", True
    ours = next((line.strip() for line in reversed(lines) if _OUR_ERROR.match(line.strip())), None)
    if ours is not None:
        return f": {ours}", True
    where = place_of_failure(lines)
    in_steps = bool(where) or _DATA_ERROR in str(error)
    return f"{where}: {cause_of(error)}", not in_steps
