"""Figures for Prometheus; ``prometheus_client`` is loaded only where they are served.

Names are ``delaylevel_<part>_<what>[_<unit>][_total]``, with the parts ``producer``, ``sync`` (the
Spark job), ``function`` and ``dispatch``; docs/metrics.md lists all of them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from delaylevel.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from delaylevel.model.level_topic import LevelTopicDescription


class Collector(Protocol):
    """What ``prometheus_client`` asks for series, each time it is scraped."""

    def collect(self) -> Iterator[Any]:
        """Yield every series."""
        ...


@contextlib.contextmanager
def serve(collector: Collector, port: int, address: str = "127.0.0.1") -> Iterator[int]:
    """Serve ``/metrics`` while the block runs.

    Args:
        collector: what is served.
        port: where; 0 for any that is free.
        address: of which interface.

    Yields:
        The port.

    Raises:
        MissingExtraError: ``prometheus_client`` is not installed.
        ConfigError: the port cannot be had.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "metrics need prometheus_client: pip install 'delaylevel[metrics]'"
        ) from error
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as error:
        raise ConfigError(
            f"metrics cannot be served at {address}:{port}: {error.strerror}"
        ) from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class CountingProducer(Protocol):
    """What both kinds of `DelayLevelProducer` say of themselves."""

    @property
    def description(self) -> LevelTopicDescription:
        """The level topic."""
        ...

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        ...

    def topic(self) -> str:
        """Return the business topic."""
        ...

    def is_connected(self) -> bool:
        """Return whether every producer in use is connected."""
        ...

    def sent(self) -> Mapping[str, int]:
        """Return how many messages were given to the client, by where they went."""
        ...


class ProducerCollector:
    """Figures of an application's producers, read when they are asked for.

    For ``prometheus_client.REGISTRY.register(…)`` where an application has metrics of its own, or
    for :func:`serve`. Sending costs no more with it than without. Several producers of one topic
    are one series.

    Args:
        producers: of :meth:`delaylevel.DelayLevelClient.create_producer`, :func:`delaylevel.wrap`
            and their asyncio twins. They are kept: the counts of one that is closed stay.
    """

    def __init__(self, *producers: CountingProducer) -> None:
        self._producers = list(producers)

    def add(self, producer: CountingProducer) -> None:
        """Read one more."""
        self._producers.append(producer)

    def collect(self) -> Iterator[Any]:
        """Yield every series, as ``prometheus_client`` wants them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        sent: Counter[tuple[str, str, str]] = Counter()
        connected: dict[tuple[str, str], bool] = {}
        for producer in tuple(self._producers):
            topics = (producer.description.topic, producer.topic())
            for way, count in producer.sent().items():
                sent[topics[0], topics[1], way] += count
            if not producer.closed:
                connected[topics] = connected.get(topics, True) and producer.is_connected()
        messages = CounterMetricFamily(
            "delaylevel_producer_messages",
            "Messages given to the client, by where they went: a level, `window`, or `straight`.",
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
