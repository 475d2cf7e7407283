"""Tests that a message which fits only with its producer's compression passes every hop."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel import wrap
from delaylevel.model.envelope import COMPRESSION
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.message import ParkedMessage
from delaylevel.model.strategy import Levels, PartitionStrategy
from support.world import RealWorld

LEVELS = Levels(
    [
        PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(hours=3)),
        PartitionStrategy(partition_by="MINUTE", maximum_delay=timedelta(hours=1)),
    ]
)
MINUTE_MS = 60_000
LARGE = bytes(6 * 1024 * 1024)  # above the broker's limit of 5 MiB
# The wrapper would refuse such messages, but producers in other languages may park them.
ANY_SIZE = 16 * 1024 * 1024
SMALL = [b"%d" % number * 200 for number in range(700)]


@pytest.fixture
def parked(world: RealWorld, clock: Any) -> LevelTopicDescription:
    """A level topic with large and small messages of producers with and without compression."""
    made = world.level_topic(LEVELS, final_window=FinalWindow.TRACKER, window_partitions=1)
    client, target = world.client(clock), made.targets[0]
    zipped = client.create_producer(
        target,
        enable_delay_level_topic=True,
        compression_type=pulsar.CompressionType.LZ4,
        block_if_queue_full=True,
        max_message_size=ANY_SIZE,
    )
    wrapped = wrap(
        client.create_producer(target),
        client,
        compression_type=pulsar.CompressionType.ZSTD,
        max_message_size=ANY_SIZE,
    )
    plain = client.create_producer(target, enable_delay_level_topic=True, block_if_queue_full=True)
    for body in (*SMALL, LARGE, *SMALL):
        zipped.send_async(body, lambda *_: None, deliver_after=timedelta(minutes=90))
    wrapped.send(LARGE, deliver_after=timedelta(minutes=90))
    for body in SMALL:
        plain.send_async(body, lambda *_: None, deliver_after=timedelta(minutes=90))
    for producer in (zipped, wrapped, plain):
        producer.close()
    return made


def check(found: list[ParkedMessage]) -> None:
    """Check that all messages are there, with the compression of their producers."""
    bodies: dict[str | None, list[bytes]] = {}
    for item in found:
        bodies.setdefault(item.properties.get(COMPRESSION), []).append(item.value or b"")
    assert bodies == {"LZ4": [*SMALL, LARGE, *SMALL], "ZSTD": [LARGE], None: SMALL}


def test_every_hop_compresses_as_the_producer_does(
    world: RealWorld, parked: LevelTopicDescription, clock: Any
) -> None:
    check(world.stored(parked.level_topic(0).full))
    moving = world.mover(parked, clock)
    clock.advance(90 * MINUTE_MS)
    assert moving.run_once().window == 2102
    check(world.stored(parked.window_topic.full))
    world.eventually(lambda: world.backlog(parked) == 0, "the acknowledgement of all")
