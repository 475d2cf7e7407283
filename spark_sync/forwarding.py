"""Forwarding of messages in a task of Spark: in the source, or behind a user's steps.

Without steps, the task that reads a message also forwards it, so that no message crosses a process
boundary. Either way Spark gets an empty row for each message, which it counts; the last row
contains the task's report. A task succeeds only after the broker has confirmed everything that it
published, and a batch is acknowledged only after all its tasks. If a task fails, Spark runs it
again, and what was confirmed before arrives again with the same ``delaylevel.id``.

The rows end in Spark's sink ``noop``, and an observation collects the reports: a sink in Python
would cost three more calls to Python processes in each batch.

The Pulsar client does not survive a fork, so each process creates its own on first use. A Python
worker runs one task at a time.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StringType, StructField, StructType
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

from delaylevel.cluster import logs
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.reader import read_range
from delaylevel.cluster.rest.admin import Admin
from delaylevel.cluster.targets.pool import TargetClients
from delaylevel.errors import BatchTooLargeError, BrokerError, ConfigError, UpgradeRequiredError
from delaylevel.model.clock import SteadyClock, SystemClock
from delaylevel.model.delivery import ForwardReport
from delaylevel.model.envelope import is_control
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import Position, SourcePartition
from delaylevel.mover.forwarder import Forwarder
from delaylevel.topics import registry as topics
from delaylevel.topics.roster import DescriptionCache

from .arrow_rows import REQUIRED, from_batch
from .options import SyncOptions
from .steps import DuplicateCheck

log = logging.getLogger(__name__)

Reports = dict[str, ForwardReport]

FORWARDED_SCHEMA = StructType([StructField("report", StringType(), True)])
_ARROW_SCHEMA = pa.schema([pa.field("report", pa.string())])


class Runtime:
    """Connections of this process to one cluster; they live as long as the process."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        # Imported modules stay, and messages have no cycles: collecting garbage among them took a
        # sixth of a task's time.
        gc.freeze()
        gc.set_threshold(50_000, 50, 50)
        try:
            # The token is in this process's environment, or in a file.
            connection = Connection.load(**options)
            self.admin = Admin.from_connection(connection, for_service=True)
            open_client = partial(
                connection.open_service_client,
                logger=logs.to_stderr(),
                stats_interval_in_seconds=0,  # unused, and they time each message
            )
            self.client: Any = open_client()
            self.targets = TargetClients(None, open_client)
        except ConfigError as error:
            if "token_file" not in options:
                raise
            # A token file may be missing for a moment while it is renewed: not fatal for the job.
            raise BrokerError(str(error)) from error
        self._descriptions: dict[str, DescriptionCache] = {}
        # Start of the current task, in s: all its messages were stored before, when it was planned.
        self.task_s = time.monotonic()
        # One for all tasks: a clock that is ahead is noticed by what it was before.
        self._clock = SteadyClock(SystemClock())
        self._forwarders: dict[str, Forwarder] = {}

    def describe(self, level_topic: str) -> LevelTopicDescription:
        """Return the description of a level topic; a change is noticed after some seconds."""
        return self._cache(level_topic).known()

    def planned_by(self, level_topic: str) -> LevelTopicDescription:
        """Return the description of a level topic for a task, the last one that can be read."""
        try:
            return self.describe(level_topic)
        except UpgradeRequiredError:
            # The driver gives the level topic up. What it has planned is finished as planned.
            return self._cache(level_topic).latest()

    def forwarder(self, level_topic: str) -> Forwarder:
        """Return the forwarder for a level topic; a changed description gets a new one."""
        description = self.planned_by(level_topic)
        forwarder = self._forwarders.get(level_topic)
        if forwarder is None or forwarder.description != description:
            if forwarder is not None:
                forwarder.close()
            forwarder = self._forwarders[level_topic] = Forwarder(
                self.client,
                self.admin,
                description,
                self._clock,
                client_of=self.targets.of,
                refreshed=lambda: self._cache(level_topic).refresh(self.task_s),
            )
        return forwarder

    def _cache(self, level_topic: str) -> DescriptionCache:
        found = self._descriptions.get(level_topic)
        if found is None:
            found = DescriptionCache(partial(topics.describe, self.admin, level_topic))
            self._descriptions[level_topic] = found
        return found


def runtime(options: SyncOptions) -> Runtime:
    """Return this process's runtime for a cluster."""
    # By process, because a fork inherits what is open, and by cluster: queries share connections.
    return _opened(os.getpid(), options.connection)


@cache
def _opened(process: int, connection: tuple[tuple[str, str], ...]) -> Runtime:
    return Runtime(dict(connection))


@dataclass
class InputRange(InputPartition):
    """The part of a source partition that one task reads, and the time of the plan."""

    source: SourcePartition
    start: Position
    end: Position
    now_ms: int

    def read(self, options: SyncOptions) -> Generator[ParkedMessage, None, None]:
        """Yield the messages of the range."""
        client = runtime(options).client
        return read_range(client, self.source.topic, self.start, self.end)


class TaskForwarders(dict[str, Forwarder]):
    """The forwarders of one task, for use in a ``with`` block: the same one for a level topic."""

    def __init__(self, here: Runtime) -> None:
        here.task_s = time.monotonic()
        self._here = here

    def __missing__(self, level_topic: str) -> Forwarder:
        self[level_topic] = self._here.forwarder(level_topic)
        return self[level_topic]

    def flush(self) -> Reports:
        """Wait until everything is confirmed; return the reports by level topic."""
        return {topic: forwarder.flush() for topic, forwarder in self.items()}

    def __enter__(self) -> TaskForwarders:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        for forwarder in self.values():
            if kind is not None:
                forwarder.reset()
            forwarder.close_targets()


def forward_input(options: SyncOptions, part: InputRange) -> Iterator[pa.RecordBatch]:
    """Forward a range, wait for the confirmations, and yield a row for each of its messages."""
    with TaskForwarders(runtime(options)) as forwarders:
        try:
            count, reports = _forward(options, part, forwarders)
        except BatchTooLargeError:
            count, reports = _forward(options, part, forwarders)
    yield from _counted(count, reports)


def forwarded(rows: DataFrame, options: SyncOptions) -> DataFrame:
    """Return the rows as forwarded by the task that has them: see `forward_rows`."""
    # DataFrame.mapInArrow() does the same, but asks for pandas, which nothing here uses.
    forward = UserDefinedFunction(
        partial(forward_rows, options),
        returnType=FORWARDED_SCHEMA,
        evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF,
    )
    message = rows.select(*REQUIRED)
    column: Any = forward(*(message[name] for name in REQUIRED))
    return DataFrame(message._jdf.mapInArrow(column._jc, False, None), message.sparkSession)


def forward_rows(
    options: SyncOptions, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Forward the rows of a task, wait for the confirmations, and yield a row for each."""
    count = 0
    duplicates = DuplicateCheck()
    with TaskForwarders(runtime(options)) as forwarders:
        for batch in batches:
            duplicates.check(batch)
            for source, message in from_batch(batch):
                forwarders[source.level_topic].forward_all(source, (message,))
            count += batch.num_rows
        reports = forwarders.flush()
    yield from _counted(count, reports)


def _counted(count: int, reports: Reports) -> Iterator[pa.RecordBatch]:
    """Yield a row for each message of a task, the last one with the reports as JSON."""
    if count:
        plain = {
            topic: {**report.counts(), "latest_ms": report.latest_ms}
            for topic, report in reports.items()
        }
        # Spark counts the rows, and its progress shows them as the messages of the batch.
        report = pa.array([json.dumps(plain)])
        column = pa.concat_arrays([pa.nulls(count - 1, pa.string()), report])
        yield pa.RecordBatch.from_arrays([column], schema=_ARROW_SCHEMA)


def messages_only(options: SyncOptions, part: InputRange) -> Iterator[ParkedMessage]:
    """Yield the messages of a range, and forward the control records among them."""
    # A user's steps see no control records, so they cannot lose or change one. Where the final
    # window allows none, such a record becomes a dead letter like any message that cannot be read:
    # behind the steps, where the report of the batch counts it.
    here, source = runtime(options), part.source
    if here.planned_by(source.level_topic).final_window is not FinalWindow.TRACKER:
        yield from part.read(options)
        return
    with (
        TaskForwarders(here) as forwarders,
        closing(part.read(options)) as messages,
    ):
        for message in messages:
            if is_control(message.properties):
                forwarders[source.level_topic].forward_all(source, (message,))
            else:
                yield message
        # Spark commits the batch only after this task has ended.
        for topic, report in forwarders.flush().items():
            log.info("%s: %d control records forwarded", topic, report.total)


def _forward(
    options: SyncOptions, part: InputRange, forwarders: TaskForwarders
) -> tuple[int, Reports]:
    """Forward a range; return the number of its messages, and the reports."""
    forwarder = forwarders[part.source.level_topic]
    with closing(part.read(options)) as messages:
        count = forwarder.forward_all(part.source, messages)
    return count, forwarders.flush()
