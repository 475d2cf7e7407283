"""Tests of a producer's limits on a real broker: large messages, full queues, and late failures."""

from __future__ import annotations

from datetime import timedelta

import pytest

from delaylevel.errors import MessageTooLargeError
from delaylevel.model.envelope import Envelope
from delaylevel.model.strategy import PartitionBy, PartitionStrategy
from delaylevel.mover import hop
from support.world import RealWorld

HOURS = PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=4))
LONG = timedelta(hours=2)
MIB = 1024 * 1024


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
