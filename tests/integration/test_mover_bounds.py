"""Tests of a mover on a real broker: bounds to the millisecond, late triggers, and mover locks.

The tests set the mover's clock, so that a unit of a minute takes no minute.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest

from delaylevel.cluster.connection.settings import Connection
from delaylevel.doctor import State, examine
from delaylevel.model.clock import SystemClock
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.mover.local import LocalMover
from support.world import RealWorld

UNIT_MS, LEAD_MS = 60_000, 20_000
MINUTES = Levels(
    PartitionStrategy(
        partition_by=timedelta(milliseconds=UNIT_MS),
        maximum_delay=timedelta(minutes=4),
        lead=timedelta(milliseconds=LEAD_MS),
    )
)


@pytest.mark.parametrize("field", ["properties", "partition_key", "ordering_key"])
def test_no_field_of_a_message_hides_those_in_front_of_it(
    world: RealWorld, connection: Connection, clock: Any, field: str
) -> None:
    """The admin interface tells fields in HTTP headers, and fails if they are large."""
    description = world.level_topic(MINUTES)
    orders, large = description.targets[0], "x" * 20_000
    fields: dict[str, Any] = {field: {"large": large} if field == "properties" else large}
    producer = world.producer(orders, batching_enabled=False)
    for value in (b"first", b"second"):
        producer.send(value, deliver_after=timedelta(seconds=70))
        time.sleep(0.02)
    producer.send(b"large", deliver_after=timedelta(seconds=70), **fields)
    producer.send(b"last", deliver_after=timedelta(seconds=70))
    published = {m.value: m.publish_ms for m in world.stored(description.name.partition(0).full)}

    def hand_off(moving: LocalMover, *values: bytes) -> None:
        clock.advance(published[values[-1]] + UNIT_MS - LEAD_MS - clock.now_ms())
        assert moving.run_once().total == len(values)
        assert {m.value for m in world.stored(orders)} >= set(values)

    with LocalMover(world.plain_client, world.admin, description, clock) as moving:
        hand_off(moving, b"first")
        # The clock of a producer cannot be wrong by less than it takes to send a message.
        examined = examine(connection, orders, clock=SystemClock())
        assert {found.check: found.state for found in examined}["producer clocks"] is State.OK
    with LocalMover(world.plain_client, world.admin, description, clock) as moving:
        hand_off(moving, b"second")
    with LocalMover(world.plain_client, world.admin, description, clock) as moving:
        hand_off(moving, b"large", b"last")
    world.drained(description)
