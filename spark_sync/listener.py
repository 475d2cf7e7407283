"""What Spark says of the running query: a log line for each batch, and the job's figures."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from delaylevel.model.formatting import format_duration

from . import control
from .stats import BatchStats, JobStats, Standing, Waiting
from .steps import dropped

log = logging.getLogger(__name__)

# Spark hands events over in a thread of its own, a moment after they happen.
_LAST_EVENT_S = 10.0


class SyncListener(StreamingQueryListener):
    """Follows the query of one job.

    Args:
        query_name: other queries of the same session are left alone.
        control_dir: where the sink leaves its reports.
        figures: what is added to.
        standing: says how far behind the job is.
        on_progress: called with each ``StreamingQueryProgress``, in a thread of Spark's.
    """

    def __init__(
        self,
        query_name: str,
        control_dir: str,
        figures: JobStats,
        standing: Standing,
        on_progress: Callable[[Any], None] | None = None,
    ) -> None:
        self._query_name = query_name
        self._control_dir = control_dir
        self._figures = figures
        self._standing = standing
        self._on_progress = on_progress
        self._run_id: str | None = None
        self._ended = threading.Event()
        self.warm = threading.Event()

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802
        """Remember which run is ours."""
        if event.name == self._query_name:
            self._run_id = str(event.runId)
            self._ended.clear()

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        """Log and count a batch."""
        progress = event.progress
        if progress.name != self._query_name:
            return
        self.warm.set()
        report = control.take_report(self._control_dir, progress.batchId)
        if progress.numInputRows:
            batch = BatchStats.collect(
                progress.batchId,
                progress.numInputRows,
                int(progress.durationMs.get("triggerExecution", 0)),
                report,
            )
            self._figures.add(batch)
            if log.isEnabledFor(logging.INFO):
                log.info("%s", batch_line(batch, self._standing.ask()))
            if left_out := dropped(progress):
                log.info("batch %d: %d rows dropped by the steps", progress.batchId, left_out)
        if self._on_progress is not None:
            self._on_progress(progress)

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        """Nothing to do: nothing was moved."""

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        """Say that nothing further comes of this run."""
        if str(event.runId) == self._run_id:
            self._ended.set()

    def wait_ended(self) -> None:
        """Wait until the last batch of a query that has ended is counted."""
        if self._run_id is not None and not self._ended.wait(_LAST_EVENT_S):
            log.warning("Spark did not say that the query has ended; its last batch may miss")


def batch_line(batch: BatchStats, waiting: dict[str, Waiting] | None) -> str:
    """Return a batch in one line.

    Args:
        batch: what it moved.
        waiting: how the level topics stand; None where the broker did not say.
    """
    parts = [
        f"batch {batch.batch_id}: {batch.rows:,} rows in {format_duration(batch.duration_ms)}",
        f"{batch.rows_per_second:,.0f}/s",
    ]
    became = [
        f"{batch.count(outcome):,} {words}"
        for outcome, words in (
            ("parked", "parked"),
            ("window", "to the window"),
            ("due", "due"),
            ("held", "held"),
            ("dead", "dead letters"),
            ("dropped", "dropped"),
        )
        if batch.count(outcome)
    ]
    parts.append(" + ".join(became) or "nothing sent on")
    parts.append(f"late by {format_duration(max(batch.latest_ms.values(), default=0))}")
    if waiting is None:
        parts.append("lag unknown")
    else:
        lag_ms = max((item.lag_ms for item in waiting.values()), default=0)
        parts.append(f"lag {format_duration(lag_ms)}")
    return ", ".join(parts)
