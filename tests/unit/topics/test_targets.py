"""Tests of business topics that nobody subscribes to, on the in-memory Pulsar."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from delaylevel import PartitionStrategy
from delaylevel.cluster.targets.receivers import NO_RECEIVER
from delaylevel.errors import AdminError, LevelTopicError
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import MemoryPulsar
from delaylevel.topics.targets import keep, unsubscribed

ORDERS = TopicName.parse("orders")


@pytest.fixture
def memory() -> Iterator[MemoryPulsar]:
    with MemoryPulsar(retention=False) as made:
        yield made


def test_missing_topic_is_created_and_kept(memory: MemoryPulsar) -> None:
    missing = unsubscribed(memory.admin, ORDERS)
    assert missing is not None
    assert "orders does not exist" in missing.finding
    assert "`delaylevel levels set orders --keep-target`" in missing.remedy
    keep(memory.admin, ORDERS)
    assert memory.admin.partitioned_metadata(ORDERS).partitions == 0
    assert unsubscribed(memory.admin, ORDERS) is None
    keep(memory.admin, ORDERS)


def test_subscription_keeps_a_topic(memory: MemoryPulsar) -> None:
    memory.client().create_producer("orders").close()
    found = unsubscribed(memory.admin, ORDERS)
    assert found is not None
    assert "orders has no subscription" in str(found)
    memory.client().subscribe("orders", "app")
    assert unsubscribed(memory.admin, ORDERS) is None


def test_broker_without_policies_for_topics_is_named(
    memory: MemoryPulsar, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AdminError("disabled", status=405)

    monkeypatch.setattr(memory.admin, "set_topic_policies", refuse)
    with pytest.raises(LevelTopicError, match="subscribe to it"):
        keep(memory.admin, ORDERS)


def test_warning_about_a_topic_without_receivers_has_the_remedies(
    memory: MemoryPulsar, caplog: pytest.LogCaptureFixture
) -> None:
    minutes = PartitionStrategy(partition_by="MINUTE", maximum_delay=timedelta(minutes=5))
    producer = memory.client().create_producer(
        "orders", enable_delay_level_topic=True, partition_strategy=minutes
    )
    producer.send(b"later", deliver_after=timedelta(minutes=3))
    with caplog.at_level(logging.WARNING):
        memory.advance(timedelta(minutes=4))
    (line,) = {item.getMessage() for item in caplog.records if "holding" in item.getMessage()}
    assert f"({NO_RECEIVER}): holding its messages. Subscribe to it." in line
    assert "`delaylevel levels set orders --keep-target`" in line
