"""Tests of targets that nobody can receive from, on the in-memory Pulsar."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel import PartitionStrategy
from delaylevel.model.level_topic import FinalWindow
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import MemoryPulsar
from delaylevel.topics.targets import keep

ORDERS = TopicName.parse("orders")
MINUTES = PartitionStrategy(partition_by="MINUTE", maximum_delay=timedelta(minutes=5))


@pytest.fixture
def memory() -> Iterator[MemoryPulsar]:
    with MemoryPulsar(retention=False) as made:
        yield made


def producer_of(memory: MemoryPulsar, window: FinalWindow = FinalWindow.TRACKER) -> Any:
    return memory.client().create_producer(
        "orders",
        enable_delay_level_topic=True,
        partition_strategy=MINUTES,
        final_window=window,
    )


def drained(consumer: Any) -> Counter[bytes]:
    found: Counter[bytes] = Counter()
    while True:
        try:
            message = consumer.receive(1)
        except pulsar.Timeout:
            return found
        consumer.acknowledge(message)
        found[message.data()] += 1


@pytest.mark.parametrize("window", list(FinalWindow))
def test_what_is_due_for_a_deleted_target_arrives_after_the_next_subscription(
    memory: MemoryPulsar, window: FinalWindow
) -> None:
    """The client of the producer, which stays connected, creates the topic again."""
    consumer = memory.client().subscribe("orders", "app", pulsar.ConsumerType.Shared)
    producer = producer_of(memory, window)
    producer.send(b"first", deliver_after=timedelta(minutes=2))
    sent = [b"%d" % number for number in range(20)]
    for body in sent:  # without keys, they are in all window partitions
        producer.send(body, deliver_after=timedelta(minutes=4))
    memory.advance(timedelta(minutes=2, seconds=1))
    assert drained(consumer) == {b"first": 1}
    consumer.close()
    memory.admin.delete(ORDERS, force=True)
    assert memory.admin.topic_exists(ORDERS)
    memory.advance(timedelta(minutes=3))
    again = memory.client().subscribe("orders", "app", pulsar.ConsumerType.Shared)
    memory.advance(timedelta(minutes=30))
    assert drained(again) == Counter(sent)


def test_a_target_that_is_kept_without_subscriptions_gets_its_messages(
    memory: MemoryPulsar,
) -> None:
    keep(memory.admin, ORDERS)
    reader = memory.client().create_reader("orders", pulsar.MessageId.earliest)
    producer_of(memory).send(b"hello", deliver_after=timedelta(minutes=2))
    memory.advance(timedelta(minutes=3))
    assert reader.read_next(1).data() == b"hello"
