"""Messages that fit alone, and not together, on a real broker with a low limit for messages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel.errors import BrokerError
from delaylevel.model.envelope import DUE, TARGET
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.mover.drain import drain
from support.fakes import HandClock
from support.world import RealWorld

LEVELS = Levels(PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(hours=3)))
HOUR_MS = 3_600_000
#: They share batches, of which the client counts only the payloads.
COLOR, BODY, COUNT = "x" * 3700, bytes(1000), 1000


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
            described = world.level_topic(LEVELS, (name,), final_window=window, window_partitions=1)
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
