"""The listener of the running query: it logs and counts every batch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from delaylevel.model.formatting import format_duration

from . import control
from .stats import Backlog, BacklogReader, BatchStats, JobStats
from .steps import dropped

log = logging.getLogger(__name__)

# Spark delivers events in a separate thread, a moment after they happen.
_LAST_EVENT_S = 10.0


class SyncListener(StreamingQueryListener):
    """Listener to the query of one job.

    Args:
        query_name: the name of the query; other queries of the session are ignored.
        control_dir: the folder of the sink's reports.
        backlogs: the source of the job's lag.
        on_progress: function to call with each ``StreamingQueryProgress``, in a thread of Spark.
    """

    def __init__(
        self,
        query_name: str,
        control_dir: str,
        stats: JobStats,
        backlogs: BacklogReader,
        on_progress: Callable[[Any], None] | None = None,
    ) -> None:
        self._query_name = query_name
        self._control_dir = control_dir
        self._stats = stats
        self._backlogs = backlogs
        self._on_progress = on_progress
        self._run_id: str | None = None
        self._ended = threading.Event()
        self.warm = threading.Event()
        self.moving = threading.Event()  # the running query has completed a batch

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802
        """Remember the identity of our run."""
        if event.name == self._query_name:
            self._run_id = str(event.runId)
            self._ended.clear()
            self.moving.clear()

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        """Log and count a batch."""
        progress = event.progress
        if progress.name != self._query_name:
            return
        self.warm.set()
        self.moving.set()
        report = control.take_report(self._control_dir, progress.batchId)
        if progress.numInputRows:
            batch = BatchStats(
                progress.batchId,
                progress.numInputRows,
                progress.durationMs.get("triggerExecution", 0),
                report,
            )
            self._stats.add(batch)
            if log.isEnabledFor(logging.INFO):
                log.info("%s", batch_line(batch, self._backlogs.read()))
            if left_out := dropped(progress):
                log.info("batch %d: %d rows dropped by the steps", progress.batchId, left_out)
        if self._on_progress is not None:
            self._on_progress(progress)

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        """Note that no further event of our run follows."""
        if str(event.runId) == self._run_id:
            self._ended.set()

    def wait_ended(self) -> None:
        """Wait until the last batch of a terminated query is counted."""
        if self._run_id is not None and not self._ended.wait(_LAST_EVENT_S):
            log.warning("Spark did not report the end of the query; its last batch may be missing")


def batch_line(batch: BatchStats, backlogs: dict[str, Backlog] | None) -> str:
    """Return the statistics of a batch, and the lag, in one line."""
    parts = [
        f"batch {batch.batch_id}: {batch.rows:,} rows in {format_duration(batch.duration_ms)}",
        f"{batch.rows * 1000 / max(1, batch.duration_ms):,.0f}/s",
    ]
    by_topic = batch.report.values()
    outcomes = [
        f"{count:,} {words}"
        for outcome, words in (
            ("parked", "parked"),
            ("window", "to the window"),
            ("due", "due"),
            ("held", "held"),
            ("dead", "dead letters"),
            ("dropped", "dropped"),
            ("expired", "expired"),
        )
        if (count := sum(counts.get(outcome, 0) for counts in by_topic))
    ]
    parts.append(" + ".join(outcomes) or "nothing sent on")
    late_ms = max((counts["latest_ms"] for counts in by_topic), default=0)
    parts.append(f"late by {format_duration(late_ms)}")
    if backlogs is None:
        parts.append("lag unknown")
    else:
        lag_ms = max((item.lag_ms for item in backlogs.values()), default=0)
        parts.append(f"lag {format_duration(lag_ms)}")
    return ", ".join(parts)
