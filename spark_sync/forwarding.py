"""Forwarding of messages in a task of Spark: in the source, or in the sink behind a user's steps.

Without steps, the task that reads a message also forwards it, so that no message crosses a process
boundary. Spark then gets an empty row for each message, which it counts; the last row contains the
task's report. The guarantees are the same as with a sink: a task succeeds only after the broker
has confirmed everything that it published, and a batch is acknowledged only after all its tasks.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any

import pyarrow as pa
from pyspark.sql.types import BinaryType, StructField, StructType

from delaylevel.errors import BatchTooLargeError
from delaylevel.model.clock import SteadyClock, SystemClock
from delaylevel.model.delivery import ForwardReport
from delaylevel.model.envelope import is_control
from delaylevel.model.level_topic import FinalWindow
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import SourcePartition
from delaylevel.mover.forwarder import Forwarder

from .options import SyncOptions
from .runtime import InputRange, Runtime, runtime

log = logging.getLogger(__name__)

Reports = dict[str, ForwardReport]

FORWARDED_SCHEMA = StructType([StructField("report", BinaryType(), True)])
_ARROW_SCHEMA = pa.schema([pa.field("report", pa.binary())])


# One for all tasks of a worker: a clock that is ahead is noticed by what it was before.
_CLOCK = SteadyClock(SystemClock())


class TaskForwarders:
    """The forwarders of one task, for use in a ``with`` block: one for each level topic."""

    def __init__(self, here: Runtime) -> None:
        here.start_task()
        self._here = here
        self._used: dict[str, Forwarder] = {}

    def of(self, source: SourcePartition) -> Forwarder:
        """Return the forwarder for the messages of a source partition."""
        topic = source.level_topic
        forwarder = self._used.get(topic)
        if forwarder is None:
            forwarder = self._used[topic] = self._here.forwarder(topic)
        return forwarder

    @staticmethod
    def earliest_routing_ms() -> int:
        """Return the earliest time by which a message may be routed now, in ms since the epoch."""
        # It is the current time, not the time of the plan: in a batch that takes long, or that is
        # replayed after an outage, a message would be parked for a delay that it no longer has.
        return _CLOCK.now_ms()

    def flush(self) -> Reports:
        """Wait until everything is confirmed; return the reports by level topic."""
        return merged((topic, forwarder.flush()) for topic, forwarder in self._used.items())

    def __enter__(self) -> TaskForwarders:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is not None:
            self._here.reset_forwarders()
            return
        for forwarder in self._used.values():
            forwarder.close_targets()


def forward_input(options: SyncOptions, part: InputRange) -> Iterator[pa.RecordBatch]:
    """Forward a range, wait for the confirmations, and yield a row for each of its messages."""
    here = runtime(options)
    for name in options.level_topics:
        here.describe(name)
    with TaskForwarders(here) as forwarders:
        try:
            count, reports = _forward(here, options, part, forwarders)
        except BatchTooLargeError:
            count, reports = _forward(here, options, part, forwarders)
    if count:
        report = pa.array([pickle.dumps(reports)])
        column = pa.concat_arrays([pa.nulls(count - 1, pa.binary()), report])
        yield pa.RecordBatch.from_arrays([column], schema=_ARROW_SCHEMA)


def messages_only(options: SyncOptions, part: InputRange) -> Iterator[ParkedMessage]:
    """Yield the messages of a range, and forward the control records among them."""
    # A user's steps see no control records, so they cannot lose or change one. Where the final
    # window allows none, such a record becomes a dead letter like any message that cannot be read.
    here, source = runtime(options), part.source
    if here.describe(source.level_topic).final_window is not FinalWindow.TRACKER:
        yield from part.read(options)
        return
    with (
        TaskForwarders(here) as forwarders,
        closing(part.read(options)) as messages,
    ):
        for message in messages:
            if is_control(message.properties):
                now_ms = max(forwarders.earliest_routing_ms(), part.now_ms)
                forwarders.of(source).forward(source, message, now_ms)
            else:
                yield message
        # Spark commits the batch only after this task has ended.
        for topic, report in forwarders.flush().items():
            log.info("%s: %d control records forwarded", topic, report.total)


def _forward(
    here: Runtime, options: SyncOptions, part: InputRange, forwarders: TaskForwarders
) -> tuple[int, Reports]:
    """Forward a range; return the number of its messages, and the reports."""
    forwarder = forwarders.of(part.source)
    with closing(part.read(options)) as messages:
        count = forwarder.forward_all(
            part.source, messages, lambda: max(forwarders.earliest_routing_ms(), part.now_ms)
        )
    return count, forwarders.flush()


def read_reports(batches: Iterable[Any]) -> Reports:
    """Return the reports among the rows of a sink's task, by level topic."""
    return merged(
        item
        for batch in batches
        for pickled in batch.column("report").drop_null().to_pylist()
        for item in pickle.loads(pickled).items()
    )


def merged(reports: Iterable[tuple[str, ForwardReport]]) -> Reports:
    """Return the sum of the reports of each level topic."""
    found: Reports = {}
    for topic, report in reports:
        found.setdefault(topic, ForwardReport()).add(report)
    return found
