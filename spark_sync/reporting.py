"""Statistics of the Spark job: collected from each batch, logged, and reported over HTTP."""

from __future__ import annotations

import json
import logging
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from delaylevel.cluster.port import TopicAdmin
from delaylevel.model.clock import SystemClock
from delaylevel.model.formatting import format_duration
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.topics.status import (
    LevelTopicStatus,
    StatusCache,
    backlog_series,
    lag_check,
    parked_levels,
    refused_checks,
    refused_sections,
    refused_series,
    status,
    topic_problems,
)
from delaylevel.web.reports import (
    DuePeriod,
    ProbeCheck,
    ProblemLine,
    Reporter,
    StatusSection,
)

from .steps import dropped

log = logging.getLogger(__name__)

OUTCOMES = ("parked", "window", "due", "held", "dead", "dropped", "expired")
#: Upper bounds of the lateness histogram, ms; one more bucket holds everything above the last.
LATENESS_BOUNDS_MS = (100, 1_000, 5_000, 15_000, 60_000, 300_000, 600_000, 3_600_000, 86_400_000)
# Minimum interval between two requests to the broker, however many batches and scrapes there are.
BACKLOG_LIFETIME_S = 5.0


@dataclass(frozen=True)
class BatchStats:
    """Statistics of one batch that moved messages.

    Attributes:
        batch_id: Spark's number of the batch.
        duration_ms: time from the search for ready messages to the commit, ms.
        report: numbers of messages by level topic and outcome (``OUTCOMES``), and ``latest_ms``,
            the largest lateness at hand-off in ms.
    """

    batch_id: int
    rows: int
    duration_ms: int
    report: Mapping[str, Mapping[str, int]]


#: Function that returns the status of the job's level topics; None without an answer.
Statuses = Callable[[], Mapping[str, LevelTopicStatus] | None]


def status_reader(admin: TopicAdmin, descriptions: Sequence[LevelTopicDescription]) -> Statuses:
    """Return the function that requests the status of level topics every few seconds at most."""
    clock = SystemClock()
    cache = StatusCache(lambda described: status(admin, described, clock.now_ms()))
    return lambda: cache.read_all(descriptions, BACKLOG_LIFETIME_S)


@dataclass
class JobStats:
    """Sums over a job since its start. Read and change every attribute under ``lock``.

    Attributes:
        rows: number of rows that they read.
        messages: number of messages by (level topic, outcome).
        latest_ms: the largest lateness at hand-off in the last batch, ms, by level topic.
        lateness: number of batches with a largest lateness within each of `LATENESS_BOUNDS_MS`,
            and above the last, by level topic. Only batches that handed off messages count.
        failures: number of times that the query failed and was started again.
    """

    batches: int = 0
    rows: int = 0
    messages: Counter[tuple[str, str]] = field(default_factory=Counter)
    batch_ms: int = 0
    latest_ms: dict[str, int] = field(default_factory=dict)
    lateness: dict[str, list[int]] = field(default_factory=dict)
    lateness_ms: Counter[str] = field(default_factory=Counter)
    failures: int = 0
    last: BatchStats | None = None
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, batch: BatchStats) -> None:
        """Add a batch."""
        with self.lock:
            self.batches += 1
            self.rows += batch.rows
            self.batch_ms += batch.duration_ms
            self.last = batch
            for topic, counts in batch.report.items():
                self.latest_ms[topic] = counts["latest_ms"]
                for outcome in OUTCOMES:
                    self.messages[topic, outcome] += counts.get(outcome, 0)
                if counts["window"] or counts["due"]:
                    late_ms = max(0, counts["latest_ms"])
                    buckets = self.lateness.setdefault(topic, [0] * (len(LATENESS_BOUNDS_MS) + 1))
                    buckets[bisect_left(LATENESS_BOUNDS_MS, late_ms)] += 1
                    self.lateness_ms[topic] += late_ms

    def add_failure(self) -> None:
        """Count a failure of the query."""
        with self.lock:
            self.failures += 1


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
        stats: JobStats,
        backlogs: Statuses,
        on_progress: Callable[[Any], None] | None = None,
    ) -> None:
        self._query_name = query_name
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
        if progress.numInputRows:
            batch = BatchStats(
                progress.batchId,
                progress.numInputRows,
                progress.durationMs.get("triggerExecution", 0),
                report_of(progress),
            )
            self._stats.add(batch)
            if log.isEnabledFor(logging.INFO):
                log.info("%s", batch_line(batch, self._backlogs()))
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


def batch_line(batch: BatchStats, backlogs: Mapping[str, LevelTopicStatus] | None) -> str:
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
        lag_ms = max((item.behind_ms for item in backlogs.values()), default=0)
        parts.append(f"lag {format_duration(lag_ms)}")
    return ", ".join(parts)


class JobCollector:
    """Prometheus collector of a job's statistics, with all series of a topic from the start."""

    def __init__(
        self,
        stats: JobStats,
        backlogs: Statuses,
        topics: tuple[str, ...],
        reporters: tuple[Reporter, ...] = (),
        refused: Iterable[str] = (),
    ) -> None:
        self.reporters = reporters
        self._stats = stats
        self._backlogs = backlogs
        self._topics = topics
        self._refused = refused

    def collect(self) -> Iterator[Any]:
        """Yield every metric family."""
        with self._stats.lock:
            families = list(self._of_job(self._stats))
        yield from families
        yield from backlog_series("sync", self._backlogs())
        yield refused_series("sync", self._refused)

    def _of_job(self, stats: JobStats) -> Iterator[Any]:
        from prometheus_client import core

        for name, text, value in (
            ("batches", "Batches that moved messages.", stats.batches),
            ("rows", "Rows that these batches read.", stats.rows),
            ("batch_seconds", "Total duration of these batches.", stats.batch_ms / 1000),
            ("query_failures", "Failures after which the query started again.", stats.failures),
        ):
            yield core.CounterMetricFamily(f"delaylevel_sync_{name}", text, value=value)
        counter = core.CounterMetricFamily(
            "delaylevel_sync_messages", "Messages by outcome.", labels=("level_topic", "became")
        )
        late = core.GaugeMetricFamily(
            "delaylevel_sync_last_batch_lateness_seconds",
            "The largest lateness at hand-off in the last batch.",
            labels=("level_topic",),
        )
        histogram = core.HistogramMetricFamily(
            "delaylevel_sync_lateness_seconds",
            "The largest lateness at hand-off of each batch that handed off messages.",
            labels=("level_topic",),
        )
        bounds = [*(str(bound / 1000) for bound in LATENESS_BOUNDS_MS), "+Inf"]
        for topic in self._topics:
            for outcome in OUTCOMES:
                counter.add_metric((topic, outcome), stats.messages[topic, outcome])
            late.add_metric((topic,), stats.latest_ms.get(topic, 0) / 1000)
            batches_within = accumulate(stats.lateness.get(topic, [0] * len(bounds)))
            histogram.add_metric(
                (topic,),
                list(zip(bounds, batches_within, strict=True)),
                stats.lateness_ms[topic] / 1000,
            )
        yield counter
        yield late
        yield histogram
        yield core.GaugeMetricFamily(
            "delaylevel_sync_last_batch_seconds",
            "Duration of the last batch.",
            value=0 if stats.last is None else stats.last.duration_ms / 1000,
        )


class JobReporter(Reporter):
    """Reporter of a Spark job, for probes and status page. It has no window to query.

    Args:
        started: function that returns True once the job has its locks and Spark is warm.
    """

    def __init__(
        self,
        stats: JobStats,
        backlogs: Statuses,
        descriptions: Sequence[LevelTopicDescription],
        started: Callable[[], bool],
        refused: Mapping[str, str],
    ) -> None:
        self._stats = stats
        self._backlogs = backlogs
        self._descriptions = descriptions
        self._started = started
        self._refused = refused

    def ready(self) -> Sequence[ProbeCheck]:
        started = self._started()
        text = "held" if started else "not yet: the job starts, or another mover holds them"
        checks = [ProbeCheck("partition locks", started, text)]
        backlogs = self._backlogs() or {}
        for each in self._descriptions:
            checks.append(lag_check(f"lag of {each.topic}", each, backlogs.get(each.topic)))
        return checks + refused_checks(self._refused)

    def status(self) -> Sequence[StatusSection]:
        backlogs = self._backlogs() or {}
        served = [self._section(each, backlogs.get(each.topic)) for each in self._descriptions]
        return served + refused_sections(self._refused, "Start the job again then.")

    def _section(
        self, description: LevelTopicDescription, at: LevelTopicStatus | None
    ) -> StatusSection:
        with self._stats.lock:
            moved = {
                outcome: count
                for (topic, outcome), count in self._stats.messages.items()
                if topic == description.topic and count
            }
            failures = self._stats.failures
        facts = {f"Messages {outcome}": f"{count:,}" for outcome, count in sorted(moved.items())}
        facts |= {"Failures of the query": f"{failures:,}"}
        if at is None:
            text = "The broker does not report the state of the topics"
            remedy = "Check that it runs, and that this host reaches it."
            return StatusSection(description.topic, facts, problems=[ProblemLine(text, remedy)])
        parked = parked_levels(at)
        if at.window_entries is not None:
            parked.append(DuePeriod("window", at.window_entries))
        problems = topic_problems(at)
        return StatusSection(description.topic, facts, parked=parked, problems=problems)
