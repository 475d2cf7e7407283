"""The streaming sink: it forwards every row, and a task ends when everything is confirmed."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from delaylevel.mover.forwarder import Forwarder

from . import control
from .arrow_rows import from_batch
from .forwarding import Reports, TaskForwarders, merged, read_reports
from .options import SyncOptions
from .runtime import Runtime, runtime
from .steps import DuplicateCheck

log = logging.getLogger(__name__)


@dataclass
class TaskReport(WriterCommitMessage):
    """The reports of one task, by level topic."""

    reports: Reports = field(default_factory=dict)


class DelayLevelStreamWriter(DataSourceStreamArrowWriter):
    """Sink that forwards rows, at least once or effectively once.

    A task succeeds only after the broker has confirmed everything that its rows became. If it
    fails, Spark runs it again. At least once, the confirmed messages then arrive again with the
    same ``delaylevel.id``; effectively once, the broker drops them.
    """

    def __init__(self, options: SyncOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Forward the rows of one task and wait for their confirmations.

        Raises:
            BrokerError: one of our own topics cannot be written; the batch is not committed.
            StepsError: a row appeared twice.
        """
        if self._options.forward:
            return TaskReport(read_reports(iterator))
        here = runtime(self._options)
        for name in self._options.level_topics:
            here.describe(name)
        return self._forward(here, iterator)

    def _forward(self, here: Runtime, batches: Iterable[Any]) -> TaskReport:
        duplicates = DuplicateCheck()
        used: dict[str, Forwarder] = {}
        with TaskForwarders(here) as forwarders:
            for batch in batches:
                duplicates.check(batch)
                earliest_ms = forwarders.earliest_routing_ms()
                for source, message, planned_ms in from_batch(batch):
                    forwarder = used.get(source.topic)
                    if forwarder is None:
                        forwarder = used[source.topic] = forwarders.of(source)
                    forwarder.forward(source, message, max(earliest_ms, planned_ms))
            return TaskReport(forwarders.flush())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Log the report of a batch, and write it to the control folder."""
        reports = merged(
            item
            for message in messages
            if isinstance(message, TaskReport)
            for item in message.reports.items()
        )
        plain = {
            topic: {**report.counts(), "latest_ms": report.latest_ms}
            for topic, report in reports.items()
        }
        for topic, counts in plain.items():
            log.info("batch %d of %s: %s", batchId, topic, json.dumps(counts))
        control.write_report(self._options.control_dir, batchId, plain)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Log that a batch failed; its source messages stay unacknowledged."""
        log.warning("batch %d failed; nothing of it is acknowledged", batchId)
