"""Helpers that the tests of spark levels share."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy

HOUR_MS = 3_600_000


BRIEF = Levels(
    PartitionStrategy(
        partition_by=timedelta(milliseconds=200), maximum_delay=timedelta(milliseconds=800)
    )
)


def overdue(description: LevelTopicDescription, eventually: Callable[..., Any]) -> None:
    """Wait until every message parked in a brief level is overdue."""
    ready_ms = SystemClock().now_ms() + 1000
    eventually(lambda: SystemClock().now_ms() > ready_ms, "the due time")
