"""Metrics of an application's producers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from .scheduling import BaseProducer


class ProducerCollector:
    """Metrics of an application's producers, read at each scrape.

    Register it with ``prometheus_client.REGISTRY.register(…)`` if the application has metrics of
    its own, or pass it to :func:`delaylevel.metrics.serve`. It adds no cost to sending. Several
    producers of one topic form one series.

    Args:
        producers: producers from :meth:`delaylevel.DelayLevelClient.create_producer`,
            :func:`delaylevel.wrap` or their asyncio twins. The counts of a closed producer stay.
    """

    def __init__(self, *producers: BaseProducer) -> None:
        self._producers = list(producers)

    def add(self, producer: BaseProducer) -> None:
        """Add a producer."""
        self._producers.append(producer)

    def collect(self) -> Iterator[Any]:
        """Yield every metric family."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        sent: Counter[tuple[str, str, str]] = Counter()
        connected: dict[tuple[str, str], bool] = {}
        for producer in tuple(self._producers):
            topics = (producer.description.topic, producer.topic())
            # Closed ones count, too: a counter of Prometheus must not fall.
            for way, count in producer.sent().items():
                sent[topics[0], topics[1], way] += count
            if not producer.closed:
                connected[topics] = connected.get(topics, True) and producer.is_connected()
        messages = CounterMetricFamily(
            "delaylevel_producer_messages",
            "Messages given to the client, by destination: a level, `window`, or `straight`.",
            labels=("level_topic", "target", "way"),
        )
        for labels, count in sorted(sent.items()):
            messages.add_metric(labels, count)
        yield messages
        alive = GaugeMetricFamily(
            "delaylevel_producer_connected",
            "1 while every producer that is not closed is connected.",
            labels=("level_topic", "target"),
        )
        for topics, well in sorted(connected.items()):
            alive.add_metric(topics, int(well))
        yield alive
