"""Helpers that the tests of function moves share."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from delaylevel.model.level_topic import LevelTopicDescription, Mover
from delaylevel.model.strategy import Levels, PartitionStrategy
from support.world import RealWorld

TWO_LEVELS = Levels(
    [
        PartitionStrategy(partition_by=timedelta(seconds=4), maximum_delay=timedelta(seconds=16)),
        PartitionStrategy(partition_by=timedelta(seconds=1), maximum_delay=timedelta(seconds=6)),
    ]
)


@pytest.fixture
def description(world: RealWorld) -> LevelTopicDescription:
    return world.level_topic(TWO_LEVELS, mover=Mover.FUNCTION, hold_pause_ms=2000)


def wrapped(client: Any, description: LevelTopicDescription, **options: Any) -> Any:
    return client.create_producer(
        description.targets[0],
        enable_delay_level_topic=True,
        partition_strategy=description.levels,
        **options,
    )
