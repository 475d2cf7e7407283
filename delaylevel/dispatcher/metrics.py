"""A dispatcher's figures in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from delaylevel.model.clock import Clock, SystemClock

from .service import Dispatcher
from .stats import LATENESS_BOUNDS_MS

_LABELS = ("level_topic", "partition")


class DispatchCollector:
    """Reads a dispatcher's figures when it is asked for them.

    Args:
        dispatcher: whose.
        clock: says what is overdue.
    """

    def __init__(self, dispatcher: Dispatcher, clock: Clock | None = None) -> None:
        self._dispatcher = dispatcher
        self._clock = clock or SystemClock()

    def collect(self) -> Iterator[Any]:
        """Yield every series, as ``prometheus_client`` wants them."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        found = {
            (topic, str(index)): figures
            for (topic, index), figures in sorted(self._dispatcher.figures().items())
        }
        for name, text in (
            ("arrived", "Messages read from the window topic."),
            ("released", "Messages that their targets have confirmed."),
            ("duplicates", "Copies that were left out."),
            ("dead", "Messages that could not be understood."),
            ("dropped", "Messages that were thrown away: their target does not exist."),
        ):
            counter = CounterMetricFamily(f"delaylevel_dispatch_{name}", text, labels=_LABELS)
            for labels, figures in found.items():
                counter.add_metric(labels, getattr(figures, name))
            yield counter
        held = CounterMetricFamily(
            "delaylevel_dispatch_held",
            "Messages whose target could not be written.",
            labels=(*_LABELS, "target"),
        )
        for labels, figures in found.items():
            for target, count in sorted(figures.held.items()):
                held.add_metric((*labels, target), count)
        yield held
        for name, text in (
            ("pending", "Messages that wait for their due time."),
            ("in_flight", "Messages that are being published."),
            ("memory_bytes", "What is pending takes in memory, about."),
            ("disk_bytes", "What is pending takes on disk."),
        ):
            gauge = GaugeMetricFamily(f"delaylevel_dispatch_{name}", text, labels=_LABELS)
            for labels, figures in found.items():
                gauge.add_metric(labels, getattr(figures, name))
            yield gauge
        overdue = GaugeMetricFamily(
            "delaylevel_dispatch_overdue_seconds",
            "For how long the earliest message that waits has been due; 0 while none is.",
            labels=_LABELS,
        )
        now_ms = self._clock.now_ms()
        for labels, figures in found.items():
            due_ms = now_ms if figures.next_due_ms is None else figures.next_due_ms
            overdue.add_metric(labels, max(0, now_ms - due_ms) / 1000)
        yield overdue
        state = GaugeMetricFamily(
            "delaylevel_dispatch_state",
            "1 for the state that a window partition is in.",
            labels=(*_LABELS, "state"),
        )
        for labels, figures in found.items():
            for each in ("recovering", "releasing", "disk full", "stopped"):
                state.add_metric((*labels, each), int(figures.state == each))
        yield state
        histogram = HistogramMetricFamily(
            "delaylevel_dispatch_lateness_seconds",
            "How long after its due time a message was confirmed.",
            labels=_LABELS,
        )
        bounds = [*(str(bound / 1000) for bound in LATENESS_BOUNDS_MS), "+Inf"]
        for labels, figures in found.items():
            counts = figures.lateness.cumsum().tolist()
            histogram.add_metric(
                labels, list(zip(bounds, counts, strict=True)), figures.lateness_ms / 1000
            )
        yield histogram
