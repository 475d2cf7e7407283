"""Statistics of a local service in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from delaylevel.dispatcher.metrics import DispatchCollector
from delaylevel.mover.metrics import MoverCollector
from delaylevel.prometheus import Collector

from .service import LocalService


class ServiceCollector:
    """Collector of the series of movers and dispatchers, with the reporters of both."""

    def __init__(self, service: LocalService) -> None:
        def is_dispatched(topic: str) -> bool:
            groups = [group for each in service.dispatchers for group in each.groups()]
            return any(group.description.topic == topic for group in groups)

        self._collectors: list[Collector] = [
            *(MoverCollector(each, is_dispatched) for each in service.movers),
            *map(DispatchCollector, service.dispatchers),
        ]

    def collect(self) -> Iterator[Any]:
        """Yield every series."""
        for collector in self._collectors:
            yield from collector.collect()
