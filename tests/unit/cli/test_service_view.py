"""Tests of the live view of a service."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from delaylevel import PartitionStrategy
from delaylevel.cli.service import serving_lines
from delaylevel.cli.views.service import progress_of
from delaylevel.dispatcher.assignment import ServedGroup
from delaylevel.dispatcher.stats import LATENESS_BOUNDS_MS, OwnerStats
from delaylevel.model.delivery import ForwardReport
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels
from delaylevel.mover.service import MoverStats

ORDERS = "persistent://public/default/_orders-delay-level"
LEVEL_TOPIC = LevelTopicDescription(ORDERS, Levels(PartitionStrategy()), ("orders",))
OTHERS = "persistent://public/others/_orders-delay-level"


def owner(**values: object) -> OwnerStats:
    lateness = np.zeros(len(LATENESS_BOUNDS_MS) + 1, dtype=np.int64)
    lateness[2] = 100
    return OwnerStats(**{"state": "releasing", "lateness": lateness, **values})  # type: ignore[arg-type]


def test_a_line_shows_what_was_moved_and_released() -> None:
    movers = {ORDERS: MoverStats("moving", counts=ForwardReport(window=1_200).counts())}
    owners = {(ORDERS, index): owner() for index in range(4)}
    owners[OTHERS, 0] = owner(state="recovering")
    orders, others = progress_of(movers, owners, {ORDERS: 600, OTHERS: 0})
    assert str(orders) == (
        "orders: 1,200 moved (mover moving); 600 released (4 window partitions); p99 25ms late"
    )
    assert "p99 over 1h00m late" in str(replace(orders, p99_ms=LATENESS_BOUNDS_MS[-1] + 1))
    assert str(others).startswith(
        "public/others/orders: 0 moved (mover elsewhere); 0 released (1 recovering"
    )


def test_a_service_tells_what_it_serves() -> None:
    def lines(mover: MoverStats | None, *groups: ServedGroup) -> str:
        (line,) = serving_lines([LEVEL_TOPIC], {ORDERS: mover}, list(groups))
        return line.removeprefix("_orders-delay-level for orders: ")

    standby = MoverStats("standby", "delaylevel-run@host:1")
    none, two = (
        ServedGroup(LEVEL_TOPIC, "a", None, 0.0, {}, owners)
        for owners in ({}, {0: OwnerStats(), 1: OwnerStats()})
    )
    both = "levels with 29 partitions; window with 2 of 4 partitions"
    assert lines(MoverStats("moving"), two) == both
    assert lines(standby, none) == (
        "levels on standby for delaylevel-run@host:1; window on standby"
    )
    assert lines(None) == "levels with 29 partitions"
