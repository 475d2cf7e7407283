"""Tests of the metrics of a producer."""

from __future__ import annotations

from datetime import timedelta

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry

from delaylevel.metrics import ProducerCollector
from delaylevel.testing import MemoryPulsar

TOPIC = "persistent://public/default/_orders-delay-level"
TARGET = "persistent://public/default/orders"


LABELS = {"level_topic": TOPIC, "target": TARGET}


def test_a_producer_counts_messages_by_destination(
    memory_pulsar: MemoryPulsar, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = memory_pulsar.client().create_producer
    producer, other = (create("orders", enable_delay_level_topic=True) for _ in range(2))
    registry = CollectorRegistry()
    collector = ProducerCollector(producer)
    registry.register(collector)

    def scraped(way: str) -> float | None:
        name = "delaylevel_producer_messages_total"
        return registry.get_sample_value(name, {**LABELS, "way": way})

    def connected() -> float | None:
        return registry.get_sample_value("delaylevel_producer_connected", LABELS)

    assert scraped("DAY") == 0
    producer.send(b"x", deliver_after=timedelta(days=3))
    producer.send_async(b"x", None, deliver_after=timedelta(days=3))
    producer.send(b"x", deliver_after=timedelta(minutes=3))
    producer.send(b"x")
    with pytest.raises(ValueError, match="30d"):
        producer.send(b"x", deliver_after=timedelta(days=31))
    assert [scraped(way) for way in ("DAY", "window", "straight")] == [2, 1, 1]
    assert producer.sent() == {"DAY": 2, "window": 1, "straight": 1}
    other.send(b"x", deliver_after=timedelta(days=1))
    collector.add(other)
    assert scraped("DAY") == 3, "two producers of a topic share a series"
    assert connected() == 1
    other.close()
    assert connected() == 1
    with monkeypatch.context() as patch:
        patch.setattr(producer._business, "is_connected", lambda: False)
        assert connected() == 0
    producer.close()
    assert connected() is None
    assert scraped("DAY") == 3, "closing a producer has changed the count"
