"""Tests of the metrics of a producer."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry

from delaylevel.metrics import ProducerCollector
from delaylevel.model.strategy import PartitionStrategy
from delaylevel.testing import MemoryPulsar

TOPIC = "persistent://public/default/_orders-delay-level"
TARGET = "persistent://public/default/orders"


def producing(memory: MemoryPulsar) -> Any:
    return memory.client().create_producer(
        "orders", enable_delay_level_topic=True, partition_strategy=PartitionStrategy()
    )


def scraped(registry: CollectorRegistry, way: str) -> float | None:
    labels = {"level_topic": TOPIC, "target": TARGET, "way": way}
    return registry.get_sample_value("delaylevel_producer_messages_total", labels)


def test_a_producer_counts_messages_by_destination(monkeypatch: pytest.MonkeyPatch) -> None:
    with MemoryPulsar() as memory:
        producer, other = producing(memory), producing(memory)
        registry = CollectorRegistry()
        collector = ProducerCollector(producer)
        registry.register(collector)
        assert scraped(registry, "DAY") == 0
        producer.send(b"x", deliver_after=timedelta(days=3))
        producer.send_async(b"x", None, deliver_after=timedelta(days=3))
        producer.send(b"x", deliver_after=timedelta(minutes=3))
        producer.send(b"x")
        with pytest.raises(ValueError, match="30d"):
            producer.send(b"x", deliver_after=timedelta(days=31))
        assert [scraped(registry, way) for way in ("DAY", "window", "straight")] == [2, 1, 1]
        assert producer.sent() == {"DAY": 2, "window": 1, "straight": 1}
        other.send(b"x", deliver_after=timedelta(days=1))
        collector.add(other)
        assert scraped(registry, "DAY") == 3, "two producers of a topic share a series"
        labels = {"level_topic": TOPIC, "target": TARGET}
        assert registry.get_sample_value("delaylevel_producer_connected", labels) == 1
        other.close()
        assert registry.get_sample_value("delaylevel_producer_connected", labels) == 1
        monkeypatch.setattr(producer._business, "is_connected", lambda: False)
        assert registry.get_sample_value("delaylevel_producer_connected", labels) == 0
        monkeypatch.undo()
        producer.close()
        assert registry.get_sample_value("delaylevel_producer_connected", labels) is None
        assert scraped(registry, "DAY") == 3, "closing a producer has changed the count"
