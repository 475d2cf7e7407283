"""Tests of the local mover on the in-memory Pulsar."""

from __future__ import annotations

from datetime import timedelta

import pytest

from delaylevel.errors import AlreadyRunningError
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from delaylevel.mover.local import LocalMover
from delaylevel.testing import MemoryPulsar
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
