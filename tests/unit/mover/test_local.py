"""Tests of the local mover on the in-memory Pulsar."""

from __future__ import annotations

from datetime import timedelta

import pytest

from delaylevel.errors import AlreadyRunningError
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from delaylevel.mover.local import LocalMover
from delaylevel.testing import ManualClock, MemoryPulsar
from delaylevel.topics import lifecycle

DAY = timedelta(days=1)
WEEK = PartitionStrategy(partition_by=PartitionBy.DAY, maximum_delay=7 * DAY)


def test_a_mover_locks_new_partitions() -> None:
    with MemoryPulsar() as memory:
        producer = memory.client().create_producer(
            "orders", enable_delay_level_topic=True, partition_strategy=WEEK
        )
        with LocalMover(memory.client(), memory.admin, producer.description, memory.clock) as mover:
            longer = lifecycle.longer_levels(Levels(WEEK), 10 * DAY)
            after = lifecycle.expand(memory.admin, "orders", longer)
            memory.clock.advance(timedelta(seconds=6))
            mover.run_once()
            with pytest.raises(AlreadyRunningError):
                LocalMover(memory.client(), memory.admin, after, memory.clock)
            added = after.name.partition(8)
            subscription = memory.admin.partition_stats(added).subscriptions["delaylevel"]
            assert [consumer.name[:16] for consumer in subscription.consumers] == [
                "delaylevel-local"
            ]


STEPS = [timedelta(seconds=60), timedelta(days=20), timedelta(seconds=-60), timedelta(days=-20)]


@pytest.mark.parametrize("step", STEPS, ids=str)
@pytest.mark.parametrize("sent", ["before", "while", "after"])
def test_a_clock_that_was_wrong_for_a_moment_makes_no_message_late(
    step: timedelta, sent: str
) -> None:
    """The mover's clock is wrong during one pass; the clock of the producer is always correct."""
    with MemoryPulsar() as memory:
        clock = ManualClock(memory.clock.now_ms())
        producer = memory.client().create_producer(
            "orders", enable_delay_level_topic=True, partition_strategy=WEEK, final_window="broker"
        )
        description = producer.description
        ready = timedelta(milliseconds=description.levels[0].hand_off_after_ms(0))

        def let_pass(delta: timedelta) -> None:
            memory.clock.advance(delta)
            clock.advance(delta)

        def send(moment: str) -> None:
            if moment == sent:
                producer.send(b"pay me", deliver_after=DAY + timedelta(seconds=5))

        with LocalMover(memory.client(), memory.admin, description, clock) as mover:
            send("before")
            clock.step(step)
            early = sent == "before" and step > ready
            assert mover.run_once().total == early, "ready by the wrong clock"
            send("while")
            mover.run_once()
            clock.step(-step)
            mover.run_once()
            send("after")
            if early:
                return
            let_pass(ready - timedelta(seconds=1))
            moved = mover.run_once().total
            let_pass(timedelta(seconds=2))
            moved += mover.run_once().total
            assert moved == 1, "late"
