"""Helpers that the tests of levels broker share."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from delaylevel.model.level_topic import (
    FinalWindow,
    LevelTopicDescription,
)
from delaylevel.model.strategy import Levels, PartitionStrategy

LEVELS = Levels(
    [
        PartitionStrategy(partition_by=timedelta(minutes=10), maximum_delay=timedelta(minutes=30)),
        PartitionStrategy(partition_by=timedelta(minutes=5), maximum_delay=timedelta(minutes=10)),
    ]
)


def described(namespace: str, *, levels: Levels = LEVELS, **changes: Any) -> LevelTopicDescription:
    values: dict[str, Any] = {
        "targets": (f"{namespace}/orders",),
        "final_window": FinalWindow.BROKER,
        **changes,
    }
    return LevelTopicDescription(f"{namespace}/orders-delay-level", levels, **values)
