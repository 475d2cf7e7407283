"""Statistics of a dispatcher in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from delaylevel.model.clock import Clock, SystemClock

from .cancellations import CANCELLED, TOO_LATE, UNKNOWN
from .reporting import DispatchReporter
from .service import Dispatcher
from .stats import LATENESS_BOUNDS_MS

_LABELS = ("level_topic", "partition")
_COUNTERS = (
    ("arrived", "Messages read from the window topic."),
    ("released", "Messages confirmed by their targets."),
    ("duplicates", "Copies that were left out."),
    ("dead", "Messages that were put into the dead-letter topic."),
    ("dropped", "Messages that were dropped because their target does not exist."),
    ("expired", "Messages that were not released because of their expiry."),
)
_GAUGES = (
    ("pending", "Messages that wait for their due time."),
    ("in_flight", "Messages that are being published."),
    ("memory_bytes", "Approximate memory of the pending messages."),
    ("disk_bytes", "Disk space of the pending messages."),
)


class DispatchCollector:
    """Collector that reads a dispatcher's statistics at each scrape.

    Attributes:
        reporters: what else the HTTP service tells about the dispatcher.
    """

    def __init__(self, dispatcher: Dispatcher, clock: Clock | None = None) -> None:
        self._dispatcher = dispatcher
        self._clock = clock or SystemClock()
        self.reporters = (DispatchReporter(dispatcher, self._clock),)

    def collect(self) -> Iterator[Any]:
        """Yield every series, in the form that ``prometheus_client`` expects."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        def family(kind: Any, name: str, text: str, *labels: str) -> Any:
            return kind(f"delaylevel_dispatch_{name}", text, labels=(*_LABELS, *labels))

        found = {
            (topic, str(index)): stats
            for (topic, index), stats in sorted(self._dispatcher.stats().items())
        }
        plain = [(CounterMetricFamily, *each) for each in _COUNTERS]
        plain += [(GaugeMetricFamily, *each) for each in _GAUGES]
        for kind, name, text in plain:
            series = family(kind, name, text)
            for labels, stats in found.items():
                series.add_metric(labels, getattr(stats, name))
            yield series
        held = family(
            CounterMetricFamily, "held", "Messages whose target could not be written.", "target"
        )
        outcomes = family(
            CounterMetricFamily, "outcomes", "Outcomes of cancellations, some repeatedly.", "status"
        )
        overdue = family(
            GaugeMetricFamily,
            "overdue_seconds",
            "Time since the due time of the earliest pending message; 0 if none is overdue.",
        )
        state = family(
            GaugeMetricFamily, "state", "1 for the current state of a window partition.", "state"
        )
        lateness = family(
            HistogramMetricFamily,
            "lateness_seconds",
            "Time from the due time of a message to its confirmation.",
        )
        now_ms = self._clock.now_ms()
        bounds = [*(str(bound / 1000) for bound in LATENESS_BOUNDS_MS), "+Inf"]
        for labels, stats in found.items():
            for target, count in sorted(stats.held.items()):
                held.add_metric((*labels, target), count)
            for status in (CANCELLED, TOO_LATE, UNKNOWN):
                outcomes.add_metric((*labels, status), stats.outcomes.get(status, 0))
            due_ms = now_ms if stats.next_due_ms is None else stats.next_due_ms
            overdue.add_metric(labels, max(0, now_ms - due_ms) / 1000)
            for each in ("recovering", "releasing", "disk full", "disk error", "stopped"):
                state.add_metric((*labels, each), int(stats.state == each))
            counts = zip(bounds, stats.lateness.cumsum().tolist(), strict=True)
            lateness.add_metric(labels, list(counts), stats.lateness_ms / 1000)
        yield from (held, outcomes, overdue, state, lateness)
