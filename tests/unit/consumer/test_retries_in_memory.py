"""Tests of parking on the in-memory Pulsar."""

from __future__ import annotations

from datetime import timedelta

import pulsar

from delaylevel.consumer.message import ReceivedMessage
from delaylevel.consumer.retry import Failure
from delaylevel.consumer.retry_publisher import RetryPublisher
from delaylevel.testing import MemoryPulsar


def failing(memory: MemoryPulsar) -> tuple[RetryPublisher, ReceivedMessage]:
    """Return a received message, and the publisher of its copies."""
    client = memory.client()
    consumer = client.subscribe("orders", "billing")
    client.create_producer("orders").send(b"pay")
    publisher = RetryPublisher(client, "orders", "billing")
    topic = "persistent://public/default/orders"
    return publisher, ReceivedMessage(consumer.receive(), topic, "billing", 0)


def test_outcomes_are_known_at_once_in_memory() -> None:
    with MemoryPulsar() as memory:
        publisher, message = failing(memory)
        outcomes: list[Exception | None] = []
        failure = Failure(None, "no money")
        publisher.park(message, timedelta(hours=5), failure, outcomes.append)
        publisher.bury(message, failure, outcomes.append)
        publisher.close()
        publisher.park(message, timedelta(hours=5), failure, outcomes.append)
        assert outcomes[:2] == [None, None]
        assert isinstance(outcomes[2], pulsar.AlreadyClosed)
        assert len(memory.pending("orders-billing-RETRY")) == 1


def test_a_failing_function_for_the_outcome_breaks_nothing() -> None:
    with MemoryPulsar() as memory:
        publisher, message = failing(memory)

        def fail(error: Exception | None) -> None:
            raise ValueError

        publisher.park(message, timedelta(hours=5), Failure(None, "x"), fail)
        publisher.bury(message, Failure(None, "x"), fail)
        assert len(memory.pending("orders-billing-RETRY")) == 1
