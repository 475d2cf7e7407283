"""Tests of large messages on a real broker: alone, compressed, and too large together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel import wrap
from delaylevel.errors import BrokerError, MessageTooLargeError
from delaylevel.model.envelope import COMPRESSION, DUE, TARGET, Envelope
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.topic_name import TopicName
from delaylevel.mover import hop
from delaylevel.mover.drain import drain
from support.fakes import HandClock
from support.world import HOURS, RealWorld

LONG = timedelta(hours=2)
MIB = 1024 * 1024
LARGE = bytes(6 * 1024 * 1024)  # above the broker's limit of 5 MiB
SMALL = [b"%d" % number * 200 for number in range(700)]
HOUR_MS = 3_600_000
#: They share batches, of which the client counts only the payloads.
COLOR, BODY, COUNT = "x" * 3700, bytes(1000), 1000


def test_the_largest_message_passes_every_hop(world: RealWorld, orders: str, clock: Any) -> None:
    own = {"customer": "7" * 200, "kind": "reminder"}
    producer = world.producer(
        orders, clock, partition_strategy=HOURS.strategies[0], batching_enabled=True
    )
    with pytest.raises(MessageTooLargeError) as refused:
        producer.send(b"x" * 5 * MIB, own, "key", "order", deliver_after=LONG)
    body = b"x" * (5 * MIB - (refused.value.size - refused.value.limit))
    producer.send(body, own, "key", "order", deliver_after=LONG)
    description = producer.description

    clock.advance(LONG // timedelta(milliseconds=1))
    world.mover(description, clock).run_once()  # level -> window, in a batch
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


def test_every_hop_compresses_as_the_producer_does(world: RealWorld, clock: Any) -> None:
    description = world.level_topic(HOURS, final_window=FinalWindow.TRACKER, window_partitions=1)
    client, (orders,) = world.client(clock), description.targets
    # The wrapper would refuse such messages, but producers in other languages may park them.
    # They are more than the queue of a producer takes.
    any_size = {"max_message_size": 16 * 1024 * 1024, "block_if_queue_full": True}
    lz4, zstd = pulsar.CompressionType.LZ4, pulsar.CompressionType.ZSTD
    zipped = client.create_producer(
        orders, enable_delay_level_topic=True, compression_type=lz4, **any_size
    )
    wrapped = wrap(client.create_producer(orders), client, compression_type=zstd, **any_size)
    plain = client.create_producer(orders, enable_delay_level_topic=True)
    sent = {"LZ4": [*SMALL, LARGE, *SMALL], "ZSTD": [LARGE], None: SMALL}
    for producer, bodies in zip((zipped, wrapped, plain), sent.values(), strict=True):
        for body in bodies:
            producer.send_async(body, None, deliver_after=timedelta(minutes=90))
        producer.close()

    def stored(topic: TopicName) -> dict[str | None, list[bytes | None]]:
        found: dict[str | None, list[bytes | None]] = {}
        for item in world.stored(topic.full):
            found.setdefault(item.properties.get(COMPRESSION), []).append(item.value)
        return found

    assert stored(description.level_topic(0)) == sent
    clock.advance(90 * 60_000)
    assert world.mover(description, clock).run_once().window == 2102
    assert stored(description.window_topic) == sent
    world.drained(description)


def _passes(world: RealWorld, description: LevelTopicDescription, clock: Any) -> None:
    """Let a service move everything, which opens another mover after each failure."""
    failures = 0
    while world.backlog(description):
        mover = world.mover(description, clock)
        try:
            mover.run_once()
        except BrokerError:
            failures += 1
            assert failures < 4
        finally:
            mover.close()


def _drain(world: RealWorld, description: LevelTopicDescription, clock: Any) -> None:
    drain(world.plain_client, world.admin, description, clock=clock)


@pytest.mark.parametrize("move", [_passes, _drain])
def test_messages_that_are_too_large_together_are_moved_and_delivered(
    broker_with: Callable[..., Any], move: Callable[..., None]
) -> None:
    broker, clock = broker_with({"maxMessageSize": 1 << 20}), HandClock()
    with ExitStack() as stack:
        world = RealWorld(broker.connection, stack, "public/default")
        for window in FinalWindow:
            name = f"orders-{move.__name__}-{window.value}"
            described = world.level_topic(HOURS, (name,), final_window=window, window_partitions=1)
            (orders,) = described.targets
            world.plain_client.subscribe(orders, "app", pulsar.ConsumerType.Shared).close()
            partition = described.level_topic(0).partition(0).full
            plain = world.plain_client.create_producer(
                partition, batching_max_messages=20, block_if_queue_full=True
            )
            due = {DUE: str(clock.now_ms() + HOUR_MS), TARGET: orders}
            for _ in range(COUNT):
                plain.send_async(BODY, None, {**due, "color": COLOR})
            plain.flush()
            clock.advance(2 * HOUR_MS)
            move(world, described, clock)
            found = orders if window is FinalWindow.BROKER else described.window_topic.full
            assert len(world.stored(found)) >= COUNT
            assert world.stored(described.dead_letter_topic.full) == []
