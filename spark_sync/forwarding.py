"""Reading and sending on in one task, where nothing of the user's stands between source and sink.

A message then crosses no process: the task that reads it gives it to the forwarder, and Spark gets
one row for each, with nothing in it, so that it counts them; the last one has the task's report.
Nothing changes for what is lost or repeated: a task succeeds only after the broker has confirmed
all that it read became, and a batch is acknowledged only after all its tasks.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.types import StringType, StructField, StructType

from delaylevel.cluster.reader import messages_in_range
from delaylevel.model.clock import SystemClock
from delaylevel.model.delivery import Delivery, Sequence
from delaylevel.model.position import Position
from delaylevel.model.report import ForwardReport
from delaylevel.mover.fast_path import forward_range
from delaylevel.mover.forwarder import Forwarder

from .options import SyncOptions
from .runtime import Runtime, runtime

if TYPE_CHECKING:
    from .driver import InputRange

FORWARDED_SCHEMA = StructType([StructField("report", StringType(), True)])
_ARROW_SCHEMA = pa.schema([pa.field("report", pa.string())])


def forward_slice(options: SyncOptions, piece: InputRange) -> Iterator[pa.RecordBatch]:
    """Send a slice on, wait for the confirmations, and yield a row for each of its messages.

    Raises:
        BrokerError: a topic of our own cannot be written; the batch is not committed.
    """
    here = runtime(options)
    for name in options.level_topics:
        here.describe(name)
    if options.delivery is Delivery.AT_LEAST_ONCE:
        count, report = _at_least_once(here, options, piece)
    else:
        count, report = _effectively_once(here, options, piece)
    if count:
        text = json.dumps([piece.source.level_topic, _plain(report)])
        column = pa.concat_arrays([pa.nulls(count - 1, pa.string()), pa.array([text])])
        yield pa.RecordBatch.from_arrays([column], schema=_ARROW_SCHEMA)


def read_reports(batches: Iterator[Any]) -> dict[str, ForwardReport]:
    """Return what became of the rows of a sink's task, by level topic."""
    found: dict[str, ForwardReport] = {}
    for batch in batches:
        for text in batch.column("report").drop_null().to_pylist():
            family, plain = json.loads(text)
            found.setdefault(family, ForwardReport()).add(_report(plain))
    return found


def _at_least_once(
    here: Runtime, options: SyncOptions, piece: InputRange
) -> tuple[int, ForwardReport]:
    forwarder = here.forwarder(piece.source.level_topic)
    clock = SystemClock()
    try:
        # Not the time at which the batch was planned: a batch that is long, or that is replayed
        # after an outage, would park for a delay that is no longer there.
        count = _forward(here, options, piece, forwarder, lambda: max(clock.now_ms(), piece.now_ms))
        report = forwarder.flush()
    except BaseException:
        here.forget_forwarders()
        raise
    forwarder.close_targets()
    return count, report


def _effectively_once(
    here: Runtime, options: SyncOptions, piece: InputRange
) -> tuple[int, ForwardReport]:
    """Send on by a forwarder of the slice's own; its producers' names are given back at the end.

    Routing goes by the time at which the batch was planned, so that a replay routes exactly as
    before: otherwise the broker would drop, as lower sequence ids, what now goes elsewhere.
    """
    context = TaskContext.get()
    assert context is not None
    identity = context.getLocalProperty("sql.streaming.queryId")
    assert identity is not None
    forwarder = Forwarder(
        here.client,
        here.admin,
        here.describe(piece.source.level_topic),
        sequence=Sequence(identity, piece.source.topic),
    )
    try:
        count = _forward(here, options, piece, forwarder, lambda: piece.now_ms)
        return count, forwarder.flush()
    finally:
        forwarder.close()


def _forward(
    here: Runtime, options: SyncOptions, piece: InputRange, forwarder: Forwarder, now_ms: Any
) -> int:
    messages = messages_in_range(
        here.client,
        piece.source.topic,
        Position.parse(piece.start),
        Position.parse(piece.end),
        options.poll_timeout_ms,
    )
    with closing(messages):
        return forward_range(forwarder, piece.source, messages, now_ms)


def _plain(report: ForwardReport) -> dict[str, Any]:
    found = {field.name: getattr(report, field.name) for field in fields(report)}
    return {**found, "parked": [[*where, count] for where, count in report.parked.items()]}


def _report(plain: dict[str, Any]) -> ForwardReport:
    found: dict[str, Any] = {
        name: Counter(value) if isinstance(value, dict) else value for name, value in plain.items()
    }
    parked = {(topic, level, part): count for topic, level, part, count in plain["parked"]}
    found["parked"] = Counter(parked)
    return ForwardReport(**found)
