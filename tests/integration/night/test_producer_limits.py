"""Tests of a producer's limits on a real broker: large messages, full queues, and late failures."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel.errors import MessageTooLargeError
from delaylevel.model.envelope import Envelope
from delaylevel.model.strategy import PartitionBy, PartitionStrategy
from delaylevel.mover import hop
from support.world import MakeClient, RealWorld, Stored

HOURS = PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=4))
LONG = timedelta(hours=2)
MIB = 1024 * 1024
ALMOST = 5 * MIB - 110


@pytest.fixture
def orders(namespace: str) -> str:
    return f"persistent://{namespace}/orders"


# -- large messages


def test_messages_that_no_hop_could_send_are_refused(
    dl_client: MakeClient, orders: str, stored: Stored
) -> None:
    client = dl_client()
    compressing = client.create_producer(
        orders,
        enable_delay_level_topic=True,
        partition_strategy=HOURS,
        compression_type=pulsar.CompressionType.LZ4,
    )
    plain = client.create_producer(orders, enable_delay_level_topic=True, batching_enabled=True)
    outcomes: list[Any] = []
    for producer, body in ((compressing, bytes(6 * MIB)), (plain, b"x" * ALMOST)):
        # A level, the window, and the fast path of both, which needs open producers.
        for after in (LONG, timedelta(minutes=5)):
            for _ in range(2):
                with pytest.raises(MessageTooLargeError, match=f"{len(body):,} bytes"):
                    producer.send(body, deliver_after=after)
                with pytest.raises(MessageTooLargeError):
                    producer.send_async(
                        body, lambda *got: outcomes.append(got), deliver_after=after
                    )
                with pytest.raises(MessageTooLargeError):
                    producer.send_async(body, None, deliver_after=after)
                producer.send(b"small", deliver_after=after)
        producer.flush()
        assert outcomes == []
    compressing.send(bytes(6 * MIB))  # undelayed, as with the plain client

    description = plain.description
    for topic in (description.topic, description.window_topic.full):
        found = stored(topic)
        assert [message.value for message in found] == [b"small"] * len(found)
    assert [len(message.value or b"") for message in stored(orders)] == [6 * MIB]


def test_the_largest_message_passes_every_hop(world: RealWorld, orders: str) -> None:
    own = {"customer": "7" * 200, "kind": "reminder"}
    producer = world.client().create_producer(
        orders, enable_delay_level_topic=True, partition_strategy=HOURS, batching_enabled=True
    )
    with pytest.raises(MessageTooLargeError) as refused:
        producer.send(b"x" * 5 * MIB, own, "key", "order", deliver_after=LONG)
    body = b"x" * (5 * MIB - (refused.value.size - refused.value.limit))
    producer.send(body, own, "key", "order", deliver_after=LONG)
    description = producer.description

    world.catch_up(LONG)  # level -> window, in a batch
    (found,) = world.stored(description.window_topic.full)
    assert (found.value, found.key, found.ordering_key) == (body, "key", "order")

    envelope = Envelope.read(found.properties)._replace(attempt=10**6)
    reason = "r" * 1024
    held = hop.set_aside(description, found, envelope, reason, 0)
    source = description.level_topic(0).partition(1).full
    dead = hop.dead_letter(description, found._replace(properties=held.properties), source, reason)
    for aside in (held, dead):
        copy = world.plain_client.create_producer(aside.place.topic, batching_enabled=True)
        copy.send(body, aside.properties, found.key, found.ordering_key, event_timestamp=2**60)
    assert [message.value for message in world.stored(held.place.topic)] == [body]
    assert [message.value for message in world.stored(dead.place.topic)] == [body]


# -- messages without a callback
