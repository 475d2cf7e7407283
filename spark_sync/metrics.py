"""A job's figures in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any

from delaylevel.prometheus import serve

from .stats import LATENESS_BOUNDS_MS, OUTCOMES, JobStats, Standing


def serve_metrics(
    figures: JobStats,
    standing: Standing,
    topics: Iterable[str],
    port: int,
    address: str = "127.0.0.1",
) -> AbstractContextManager[int]:
    """Serve ``/metrics`` while a block runs, as `delaylevel.metrics.serve`.

    Args:
        figures, standing: what is served.
        topics: the level topics, so that each has its series from the start.
        port: where; 0 for any that is free.
        address: of which interface.
    """
    return serve(JobCollector(figures, standing, tuple(topics)), port, address)


class JobCollector:
    """Reads the figures when it is asked for them.

    Args:
        figures, standing: what is read.
        topics: the level topics.
    """

    def __init__(self, figures: JobStats, standing: Standing, topics: tuple[str, ...]) -> None:
        self._figures = figures
        self._standing = standing
        self._topics = topics

    def collect(self) -> Iterator[Any]:
        """Yield every series, as ``prometheus_client`` wants them."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        figures = self._figures
        with figures.lock:
            batches, rows, seconds = figures.batches, figures.rows, figures.batch_ms / 1000
            messages, latest_ms = dict(figures.messages), dict(figures.latest_ms)
            failures, last = figures.failures, figures.last
            lateness = {topic: list(counts) for topic, counts in figures.lateness.items()}
            lateness_ms = dict(figures.lateness_ms)
        for name, text, value in (
            ("batches", "Batches that moved something.", batches),
            ("rows", "Rows that these batches read.", rows),
            ("batch_seconds", "What these batches took, in all.", seconds),
            ("query_failures", "How often the query failed and was started again.", failures),
        ):
            yield CounterMetricFamily(f"delaylevel_sync_{name}", text, value=value)
        counter = CounterMetricFamily(
            "delaylevel_sync_messages", "What became of messages.", labels=("level_topic", "became")
        )
        late = GaugeMetricFamily(
            "delaylevel_sync_last_batch_lateness_seconds",
            "The largest lateness at hand-off in the last batch.",
            labels=("level_topic",),
        )
        histogram = HistogramMetricFamily(
            "delaylevel_sync_lateness_seconds",
            "The largest lateness at hand-off of each batch that sent something on.",
            labels=("level_topic",),
        )
        bounds = [*(str(bound / 1000) for bound in LATENESS_BOUNDS_MS), "+Inf"]
        for topic in self._topics:
            for outcome in OUTCOMES:
                counter.add_metric((topic, outcome), messages.get((topic, outcome), 0))
            late.add_metric((topic,), latest_ms.get(topic, 0) / 1000)
            batches_within = accumulate(lateness.get(topic, [0] * len(bounds)))
            histogram.add_metric(
                (topic,),
                list(zip(bounds, batches_within, strict=True)),
                lateness_ms.get(topic, 0) / 1000,
            )
        yield counter
        yield late
        yield histogram
        yield GaugeMetricFamily(
            "delaylevel_sync_last_batch_seconds",
            "What the last batch took.",
            value=0 if last is None else last.duration_ms / 1000,
        )
        yield from self._standing_now()

    def _standing_now(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        waiting = self._standing.ask()
        yield GaugeMetricFamily(
            "delaylevel_sync_broker_answers",
            "Whether the broker said how the level topics stand: 1 or 0.",
            value=0 if waiting is None else 1,
        )
        for name, text, attribute, scale in (
            (
                "lag_seconds",
                "For how long the oldest ripe message that was not moved has been ripe.",
                "lag_ms",
                0.001,
            ),
            ("held_entries", "Entries whose target cannot be written.", "held", 1),
            ("dead_letter_entries", "Entries that were not understood.", "dead_letters", 1),
        ):
            family = GaugeMetricFamily(f"delaylevel_sync_{name}", text, labels=("level_topic",))
            for topic, item in (waiting or {}).items():
                family.add_metric((topic,), getattr(item, attribute) * scale)
            yield family
        parked = GaugeMetricFamily(
            "delaylevel_sync_parked_entries",
            "Entries that wait in a level.",
            labels=("level_topic", "level"),
        )
        window = GaugeMetricFamily(
            "delaylevel_sync_window_entries",
            "Entries of the window topic that are not all released.",
            labels=("level_topic",),
        )
        for topic, item in (waiting or {}).items():
            for level, entries in item.by_level.items():
                parked.add_metric((topic, level), entries)
            if item.window is not None:
                window.add_metric((topic,), item.window)
        yield parked
        yield window
