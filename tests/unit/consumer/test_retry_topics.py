"""Tests of the topics of a subscription's retries, in memory."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from delaylevel import topics
from delaylevel.consumer import Listeners
from delaylevel.consumer.retry_topics import RetryTopics, prepare
from delaylevel.errors import InvalidInputError, LevelTopicError
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow, LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.testing import MemoryPulsar

DAYS = Levels(PartitionStrategy(maximum_delay=timedelta(days=3)))


def test_everything_is_created_once(memory_pulsar: MemoryPulsar) -> None:
    admin, wanted = memory_pulsar.admin, RetryTopics.of("orders", "billing")
    made = prepare(admin, wanted)
    assert made.name.local == "_orders-delay-level"
    for name, subscription in ((wanted.retry, "billing"), (wanted.dead_letter, SUBSCRIPTION)):
        assert admin.partitioned_stats(name)[0].subscriptions[subscription].durable
        assert admin.topic_policies(name).message_ttl_s == 0
    assert prepare(admin, wanted) == made


@pytest.mark.parametrize("subscription", ["", "a/b"])
def test_subscriptions_that_cannot_be_a_part_of_a_name_are_refused(subscription: str) -> None:
    with pytest.raises(InvalidInputError, match="cannot have retries"):
        RetryTopics.of("orders", subscription)


def test_topics_of_another_subscription_are_refused(memory_pulsar: MemoryPulsar) -> None:
    prepare(memory_pulsar.admin, RetryTopics.of("orders-billing-x", "y"))
    other = RetryTopics.of("orders", "billing-x-y")
    with pytest.raises(LevelTopicError, match="give one of the two subscriptions another name"):
        prepare(memory_pulsar.admin, other)


@pytest.mark.parametrize("kind", ["Shared", "Key_Shared", "Failover", "Exclusive"])
@pytest.mark.parametrize("window", list(FinalWindow))
def test_a_level_topic_of_another_name_carries_the_retries(
    memory_pulsar: MemoryPulsar, kind: str, window: FinalWindow
) -> None:
    """Copies that the broker delays come in time to subscriptions of every type."""
    orders = "persistent://public/default/orders"
    memory_pulsar.client().create_producer(orders)
    topic = "persistent://public/default/any-name"
    made = topics.create(
        memory_pulsar.admin, LevelTopicDescription(topic, DAYS, (orders,), final_window=window)
    )
    app = Listeners(memory_pulsar.client())
    at: list[Any] = []

    @app.on("orders", subscription="billing", subscription_type=kind, retry=["2d"])
    def fail_once(message: Any) -> None:
        at.append(memory_pulsar.clock.now())
        if len(at) == 1:
            raise ValueError

    memory_pulsar.client().create_producer(orders).send(b"pay")
    memory_pulsar.advance(timedelta(days=2, minutes=1))
    first, second = at
    assert timedelta(days=2) <= second - first < timedelta(days=2, seconds=2)
    assert [
        each.topic for each in topics.list_level_topics(memory_pulsar.admin, "public/default")
    ] == [made.topic]
    app.close()
