"""A job's statistics in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

from delaylevel.topics.status import refused_series
from delaylevel.web.reports import Reporter

from .stats import LATENESS_BOUNDS_MS, OUTCOMES, BacklogReader, JobStats


class JobCollector:
    """Prometheus collector of a job's statistics, with all series of a topic from the start.

    Args:
        reporters: what else the HTTP service tells about the job.
        refused: level topics that cannot be served.
    """

    def __init__(
        self,
        stats: JobStats,
        backlogs: BacklogReader,
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
        yield from self._of_backlogs()
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

    def _of_backlogs(self) -> Iterator[Any]:
        from prometheus_client import core

        backlogs = self._backlogs.read()
        yield core.GaugeMetricFamily(
            "delaylevel_sync_broker_answers",
            "1 if the broker reported the state of the level topics, 0 if not.",
            value=0 if backlogs is None else 1,
        )

        def gauge(name: str, text: str, *labels: str) -> Any:
            return core.GaugeMetricFamily(
                f"delaylevel_sync_{name}", text, labels=("level_topic", *labels)
            )

        lag = gauge("lag_seconds", "Time that the oldest ready message has been waiting.")
        held = gauge("held_entries", "Entries whose target cannot be written.")
        dead = gauge("dead_letter_entries", "Entries that could not be understood.")
        parked = gauge("parked_entries", "Entries that wait in a level.", "level")
        window = gauge("window_entries", "Entries of the window topic that are not all released.")
        for topic, item in (backlogs or {}).items():
            lag.add_metric((topic,), item.lag_ms / 1000)
            held.add_metric((topic,), item.held)
            dead.add_metric((topic,), item.dead_letters)
            for level, entries in item.by_level.items():
                parked.add_metric((topic, level), entries)
            if item.window is not None:
                window.add_metric((topic,), item.window)
        yield from (lag, held, dead, parked, window)
