"""Tests of the path of a message that is never late."""

from __future__ import annotations

from datetime import timedelta

from delaylevel.model.path import hop_times
from delaylevel.model.router import Router
from delaylevel.model.strategy import Levels, PartitionStrategy

HOUR_MS = 3_600_000
HOURS = PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(days=1))
ROUTER = Router(Levels([PartitionStrategy(), HOURS]))


def test_the_hops_of_a_delay_are_those_of_the_router() -> None:
    delay_ms = 77 * HOUR_MS
    first_ms = 72 * HOUR_MS - 600_000
    # Five hours and ten minutes are left: five hours less the lead go by in the next level.
    second_ms = first_ms + 5 * HOUR_MS - 300_000
    assert hop_times(ROUTER, delay_ms) == [first_ms, second_ms, delay_ms]


def test_a_short_delay_has_only_its_due_time() -> None:
    assert hop_times(ROUTER, 1000) == [1000]
