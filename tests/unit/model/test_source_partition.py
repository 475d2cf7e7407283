"""Tests of the partitions that a mover reads, derived from a description."""

from __future__ import annotations

from datetime import timedelta

from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Role
from delaylevel.model.position import SourcePartition, source_partitions
from delaylevel.model.strategy import Levels, PartitionStrategy


def test_a_mover_reads_the_levels_and_the_held_topic() -> None:
    description = LevelTopicDescription(
        topic="orders-delay-level",
        levels=Levels(
            [
                PartitionStrategy(maximum_delay=timedelta(days=3)),
                PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(days=1)),
            ]
        ),
        targets=("orders",),
        final_window=FinalWindow.TRACKER,
        hold_pause_ms=777,
    )
    family = "persistent://public/default/orders-delay-level"
    sources = source_partitions(description)
    day, hour = 86_400_000, 3_600_000
    assert sources[:2] == (
        SourcePartition(
            family, f"{family}-partition-0", Role.LEVEL, 0, 0, day - 600_000, lead_ms=600_000
        ),
        SourcePartition(
            family, f"{family}-partition-1", Role.LEVEL, 0, 1, 2 * day - 600_000, True, 600_000
        ),
    )
    assert [source.hand_off_after_ms for source in sources[2:25]] == [
        hours * hour - 300_000 for hours in range(1, 24)
    ]
    assert {source.lead_ms for source in sources[2:25]} == {300_000}
    # A held message has passed the finest level. A mover reads no other topic.
    assert sources[25:] == (
        SourcePartition(family, f"{family}-held-partition-0", Role.HELD, 1, 0, 777),
    )
    assert sources[0].name.full == sources[0].topic
