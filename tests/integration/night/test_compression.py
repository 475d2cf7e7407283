"""Tests that a message which fits only with its producer's compression passes every hop."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pulsar

from delaylevel import wrap
from delaylevel.model.envelope import COMPRESSION
from delaylevel.model.level_topic import FinalWindow
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from support.world import RealWorld

HOURS = Levels(PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(hours=3)))
LARGE = bytes(6 * 1024 * 1024)  # above the broker's limit of 5 MiB
SMALL = [b"%d" % number * 200 for number in range(700)]


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
