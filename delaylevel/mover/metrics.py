"""Statistics of local movers in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .reporting import MoverReporter
from .service import MoverService
from .topic_thread import STATES

_COUNTERS = (
    ("passes", "Passes over a level topic that ended without a failure."),
    ("failures", "Failures after which the mover tried again."),
)


class MoverCollector:
    """Collector that reads the statistics of the movers at each scrape.

    Args:
        is_reported: as for `MoverReporter`.

    Attributes:
        reporters: what else the HTTP service tells about the movers.
    """

    def __init__(
        self, movers: MoverService, is_reported: Callable[[str], bool] | None = None
    ) -> None:
        self._movers = movers
        reporter = MoverReporter(movers, is_reported) if is_reported else MoverReporter(movers)
        self.reporters = (reporter,)

    def collect(self) -> Iterator[Any]:
        """Yield every series, in the form that ``prometheus_client`` expects."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        found = sorted(self._movers.stats().items())
        messages = CounterMetricFamily(
            "delaylevel_mover_messages", "Messages by outcome.", labels=("level_topic", "became")
        )
        state = GaugeMetricFamily(
            "delaylevel_mover_state",
            "1 for the current state of the mover.",
            labels=("level_topic", "state"),
        )
        for topic, stats in found:
            for outcome, count in stats.report.counts().items():
                messages.add_metric((topic, outcome), count)
            for each in STATES:
                state.add_metric((topic, each), int(stats.state == each))
        yield from (messages, state)
        for name, text in _COUNTERS:
            series = CounterMetricFamily(f"delaylevel_mover_{name}", text, labels=("level_topic",))
            for topic, stats in found:
                series.add_metric((topic,), getattr(stats, name))
            yield series
