"""The streaming sink: every row goes where the router sends it, and a task ends confirmed."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from delaylevel.model.clock import SystemClock
from delaylevel.model.delivery import Delivery, Sequence
from delaylevel.model.report import ForwardReport
from delaylevel.mover.forwarder import Forwarder

from . import control
from .arrow_rows import from_batch
from .forwarding import read_reports
from .options import SyncOptions
from .runtime import Runtime, runtime
from .steps import TwiceCheck

log = logging.getLogger(__name__)


@dataclass
class TaskReport(WriterCommitMessage):
    """What became of one task's rows, by level topic."""

    reports: dict[str, ForwardReport] = field(default_factory=dict)


class DelayLevelStreamWriter(DataSourceStreamArrowWriter):
    """Sends rows on with a forwarder, at least once or effectively once.

    A task succeeds only after the broker has confirmed all that its rows became. If it fails,
    Spark runs it again: at least once, what had arrived arrives again with the same
    ``delaylevel.id``; effectively once, the broker drops it.
    """

    def __init__(self, options: SyncOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Send the rows of one task on and wait for their confirmations.

        Raises:
            BrokerError: a topic of our own cannot be written; the batch is not committed.
            StepsError: a row came twice.
            InvalidInputError: effectively once, rows out of order.
        """
        if self._options.forward:
            return TaskReport(read_reports(iterator))
        here = runtime(self._options)
        for name in self._options.level_topics:
            here.describe(name)
        if self._options.delivery is Delivery.AT_LEAST_ONCE:
            return self._write_at_least_once(here, iterator)
        return self._write_effectively_once(here, iterator)

    def _write_at_least_once(self, here: Runtime, iterator: Iterator[Any]) -> TaskReport:
        used: dict[str, Forwarder] = {}
        twice = TwiceCheck()
        clock = SystemClock()
        try:
            for batch in iterator:
                twice.look(batch)
                # Not the time at which the batch was planned: a batch that is long, or that is
                # replayed after an outage, would park for a delay that is no longer there.
                now_ms = clock.now_ms()
                for source, message, planned_ms in from_batch(batch):
                    forwarder = used.get(source.level_topic)
                    if forwarder is None:
                        forwarder = used[source.level_topic] = here.forwarder(source.level_topic)
                    forwarder.forward(source, message, max(now_ms, planned_ms))
            done = TaskReport({family: forwarder.flush() for family, forwarder in used.items()})
        except BaseException:
            here.forget_forwarders()
            raise
        for forwarder in used.values():
            forwarder.close_targets()
        return done

    def _write_effectively_once(self, here: Runtime, iterator: Iterator[Any]) -> TaskReport:
        """One forwarder for each source partition; their names are given back at the end.

        Routing goes by the time at which the batch was planned, so that a replay routes exactly as
        before: otherwise the broker would drop, as lower sequence ids, what now goes elsewhere.
        """
        identity = TaskContext.get().getLocalProperty("sql.streaming.queryId")
        used: dict[str, tuple[str, Forwarder]] = {}
        done = TaskReport()
        twice = TwiceCheck()
        try:
            for batch in iterator:
                twice.look(batch)
                for source, message, now_ms in from_batch(batch):
                    family, forwarder = used.get(source.topic, (source.level_topic, None))
                    if forwarder is None:
                        sequence = Sequence(identity, source.topic)
                        forwarder = Forwarder(
                            here.client, here.admin, here.describe(family), sequence=sequence
                        )
                        used[source.topic] = (family, forwarder)
                    forwarder.forward(source, message, now_ms)
            for family, forwarder in used.values():
                done.reports.setdefault(family, ForwardReport()).add(forwarder.flush())
        finally:
            for _, forwarder in used.values():
                forwarder.close()
        return done

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Log what became of a batch."""
        total: dict[str, ForwardReport] = {}
        for message in messages:
            if isinstance(message, TaskReport):
                for family, report in message.reports.items():
                    total.setdefault(family, ForwardReport()).add(report)
        for family, report in total.items():
            log.info("batch %d of %s: %s", batchId, family, json.dumps(summary(report)))
        plain = {family: summary(report) for family, report in total.items()}
        control.leave_report(self._options.control_dir, batchId, plain)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Log that a batch failed; its source messages stay unacknowledged."""
        log.warning("batch %d failed; nothing of it is acknowledged", batchId)


def summary(report: ForwardReport) -> dict[str, Any]:
    """Return a report as plain values."""
    return {
        "parked": report.parked.total(),
        "window": report.window,
        "due": report.due,
        "held": report.held.total(),
        "dropped": report.dropped.total(),
        "dead": report.dead.total(),
        "latest_ms": report.latest_ms,
    }
