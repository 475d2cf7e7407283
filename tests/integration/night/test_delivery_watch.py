"""Tests of the warning that a level topic has no mover or no dispatcher, on a real broker."""

from __future__ import annotations

from datetime import timedelta

from delaylevel import PartitionBy, PartitionStrategy
from delaylevel.model.level_topic import FinalWindow
from delaylevel.model.strategy import Levels
from delaylevel.producer.setup import missing_hosts
from support.world import RealWorld

HOURS = PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=3))


def test_movers_and_dispatchers_are_seen_by_their_consumers_and_traces(world: RealWorld) -> None:
    description = world.level_topic(Levels(HOURS), final_window=FinalWindow.TRACKER)

    def missing() -> dict[str, str]:
        now_ms = world.clock.now_ms()
        return missing_hosts(world.admin, description, description.targets[0], now_ms)

    assert set(missing()) == {"mover", "dispatcher"}
    with world.serving(description):
        world.eventually(lambda: set(missing()) == {"mover"}, "the dispatcher's consumers")
        mover = world.mover(description)
        assert missing() == {}
        mover.close()
        # It moved nothing, but it was there: a job that runs at intervals.
        assert missing() == {}
    world.eventually(lambda: set(missing()) == {"dispatcher"}, "the end of the dispatcher")
