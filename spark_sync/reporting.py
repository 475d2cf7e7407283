"""Statistics of the Spark job: collected from each batch, logged, and kept as those of a mover."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from delaylevel.cluster.port import TopicAdmin
from delaylevel.model.clock import SystemClock
from delaylevel.model.delivery import ForwardReport
from delaylevel.model.formatting import format_duration
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.mover.service import MoverStats
from delaylevel.topics.roster import Roster
from delaylevel.topics.status import REPORTED_ROLES, LevelTopicStatus, StatusCache, status

from .steps import dropped

log = logging.getLogger(__name__)

# Minimum interval between two requests to the broker for the log, however many batches there are.
_LOG_EVERY_S = 5.0
#: The statistics of a batch: the numbers of messages by outcome, and ``latest_ms``, by level topic.
Report = Mapping[str, Mapping[str, int]]


class JobMovers:
    """The level topics of a job, each with the statistics of a mover."""

    retries = "Start the job again then."

    def __init__(
        self, roster: Roster, descriptions: Sequence[LevelTopicDescription], admin: TopicAdmin
    ) -> None:
        clock = SystemClock()

        def read(description: LevelTopicDescription) -> LevelTopicStatus:
            now_ms = clock.now_ms()
            return status(admin, description, now_ms, as_described=False, roles=REPORTED_ROLES)

        self.roster = roster
        self.descriptions = descriptions
        self.members = StatusCache(read)
        self._lock = threading.Lock()
        self._stats = {each.topic: MoverStats() for each in descriptions}

    def stats(self) -> dict[str, MoverStats]:
        """Return copies of the statistics by level topic."""
        with self._lock:
            return {topic: stats.copy() for topic, stats in self._stats.items()}

    def passed(self, batch: Report) -> None:
        """Count a batch; a query that completes one has all locks."""
        with self._lock:
            for stats in self._stats.values():
                stats.state, stats.problem = "moving", ""
            for topic, counts in batch.items():
                report = ForwardReport(latest_ms=counts["latest_ms"])
                for outcome in report.counts():
                    key = None if outcome in ("window", "due") else ""
                    report.count(outcome, key, number=counts.get(outcome, 0))
                self._stats[topic].passed(report)

    def failed(self, reason: str) -> None:
        """Count a failure of the query."""
        with self._lock:
            for stats in self._stats.values():
                stats.failed(reason)

    def lag_ms(self) -> int | None:
        """Return how long the oldest ready message has been waiting, ms; None if unknown."""
        found = self.members.read_all(self.descriptions, _LOG_EVERY_S)
        return None if found is None else max(each.behind_ms for each in found.values())


#: The name of the observation that collects the reports of a batch's tasks.
OBSERVATION = "delaylevel"


def report_of(progress: Any) -> dict[str, dict[str, int]]:
    """Return the sum of the tasks' reports, by level topic."""
    found: dict[str, dict[str, int]] = {}
    observed = progress.observedMetrics.get(OBSERVATION)
    for text in () if observed is None else observed.reports:
        for topic, counts in json.loads(text).items():
            total = found.setdefault(topic, dict.fromkeys(counts, 0))
            latest_ms = max(total["latest_ms"], counts["latest_ms"])
            total.update({name: total[name] + count for name, count in counts.items()})
            total["latest_ms"] = latest_ms
    return found


# Spark delivers events in a separate thread, a moment after they happen.
_LAST_EVENT_S = 10.0


class SyncListener(StreamingQueryListener):
    """Listener to the query of one job.

    Args:
        on_progress: function to call with each ``StreamingQueryProgress``, in a thread of Spark.
    """

    def __init__(
        self,
        query_name: str,
        movers: JobMovers,
        on_progress: Callable[[Any], None] | None = None,
    ) -> None:
        self._query_name = query_name
        self._movers = movers
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
        report = report_of(progress) if progress.numInputRows else {}
        self._movers.passed(report)
        if progress.numInputRows:
            if log.isEnabledFor(logging.INFO):
                log.info("%s", batch_line(progress, report, self._movers.lag_ms()))
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


def batch_line(progress: Any, report: Report, lag_ms: int | None) -> str:
    """Return the statistics of a batch, and the lag, in one line."""
    rows, duration_ms = progress.numInputRows, progress.durationMs.get("triggerExecution", 0)
    parts = [
        f"batch {progress.batchId}: {rows:,} rows in {format_duration(duration_ms)}",
        f"{rows * 1000 / max(1, duration_ms):,.0f}/s",
    ]
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
        if (count := sum(counts.get(outcome, 0) for counts in report.values()))
    ]
    parts.append(" + ".join(outcomes) or "nothing sent on")
    late_ms = max((counts["latest_ms"] for counts in report.values()), default=0)
    parts.append(f"late by {format_duration(late_ms)}")
    parts.append("lag unknown" if lag_ms is None else f"lag {format_duration(lag_ms)}")
    return ", ".join(parts)
