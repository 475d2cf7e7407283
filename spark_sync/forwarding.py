"""Forwarding of messages in a task of Spark: in the source, or behind a user's steps.

Without steps, the task that reads a message also forwards it, so that no message crosses a process
boundary. Either way Spark gets an empty row for each message, which it counts; the last row
contains the task's report. A task succeeds only after the broker has confirmed everything that it
published, and a batch is acknowledged only after all its tasks. If a task fails, Spark runs it
again, and what was confirmed before arrives again with the same ``delaylevel.id``.

The rows end in Spark's sink ``noop``, and an observation collects the reports: a sink in Python
would cost three more calls to Python processes in each batch.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StringType, StructField, StructType
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

from delaylevel.errors import BatchTooLargeError
from delaylevel.model.delivery import ForwardReport
from delaylevel.model.envelope import is_control
from delaylevel.model.level_topic import FinalWindow
from delaylevel.model.message import ParkedMessage
from delaylevel.mover.forwarder import Forwarder

from .arrow_rows import REQUIRED, from_batch
from .options import SyncOptions
from .runtime import InputRange, Runtime, runtime
from .steps import DuplicateCheck

log = logging.getLogger(__name__)

Reports = dict[str, ForwardReport]

FORWARDED_SCHEMA = StructType([StructField("report", StringType(), True)])
_ARROW_SCHEMA = pa.schema([pa.field("report", pa.string())])


class TaskForwarders(dict[str, Forwarder]):
    """The forwarders of one task, for use in a ``with`` block: the same one for a level topic."""

    def __init__(self, here: Runtime) -> None:
        here.start_task()
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
        if kind is not None:
            self._here.reset_forwarders()
            return
        for forwarder in self.values():
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
                forwarders[source.level_topic].forward(source, message)
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
        report = pa.array([json.dumps(plain)])
        column = pa.concat_arrays([pa.nulls(count - 1, pa.string()), report])
        yield pa.RecordBatch.from_arrays([column], schema=_ARROW_SCHEMA)


def messages_only(options: SyncOptions, part: InputRange) -> Iterator[ParkedMessage]:
    """Yield the messages of a range, and forward the control records among them."""
    # A user's steps see no control records, so they cannot lose or change one. Where the final
    # window allows none, such a record becomes a dead letter like any message that cannot be read.
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
                forwarders[source.level_topic].forward(source, message)
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
