"""Tests of the live view of a service."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from delaylevel import PartitionStrategy
from delaylevel.cli.service import serving_lines
from delaylevel.cli.views.service import TopicProgress, progress_of, totals
from delaylevel.dispatcher.assignment import ServedGroup
from delaylevel.dispatcher.stats import LATENESS_BOUNDS_MS, OwnerStats
from delaylevel.model.delivery import ForwardReport
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels
from delaylevel.mover.service import MoverStats
from delaylevel.testing import ManualClock, MemoryPulsar
from delaylevel.topics.status import LevelTopicStatus, status

ORDERS = "persistent://public/default/_orders-delay-level"
LEVEL_TOPIC = LevelTopicDescription(ORDERS, Levels(PartitionStrategy()), ("orders",))
NOW_MS = 1_800_000_000_000
Members = dict[str, LevelTopicStatus | None]
OTHERS = "persistent://public/others/_orders-delay-level"


def owner(**values: object) -> OwnerStats:
    lateness = np.zeros(len(LATENESS_BOUNDS_MS) + 1, dtype=np.int64)
    lateness[2] = 100
    return OwnerStats(**{"state": "releasing", "lateness": lateness, **values})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def members() -> Members:
    """Three messages are parked for the next three hours, and one is in the window."""
    hours = PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(hours=5))
    with MemoryPulsar(ManualClock(NOW_MS)) as memory:
        producer = memory.client().create_producer(
            "orders", enable_delay_level_topic=True, partition_strategy=hours
        )
        for number in range(4):
            producer.send(b"x", deliver_after=timedelta(minutes=30 + 60 * number))
        (description,) = memory.level_topics()
        return {ORDERS: status(memory.admin, description, memory.clock.now_ms()), OTHERS: None}


def updated(members: Members, **values: Any) -> list[TopicProgress]:
    movers = {ORDERS: MoverStats("moving", counts=ForwardReport(window=1_200).counts())}
    owners = {(ORDERS, index): owner() for index in range(4)}
    owners[ORDERS, 1] = owner(**{"pending": 7, "next_due_ms": NOW_MS + 9_000, **values})
    owners[OTHERS, 0] = owner(state="recovering")
    return progress_of(movers, owners, {ORDERS: 600, OTHERS: 0}, members, NOW_MS + 1_000)


def test_rows_and_lines_show_what_waits_in_the_level_topic(members: Members) -> None:
    orders, others = rows = updated(members, next_due_ms=NOW_MS - 5_000)
    assert orders == TopicProgress(
        "orders", "moving", 1_200, 600, "4", 25, 3 + 7, 0, "overdue 6.0s"
    )
    assert others == TopicProgress("public/others/orders", None, 0, 0, "1 recovering", 25)
    assert totals(rows) == (1_200, 600)
    assert str(orders) == (
        "orders: 10 entries pending; next due overdue 6.0s; 1,200 moved (mover moving); "
        "600 released (4 window partitions); p99 25ms late"
    )
    assert "p99 over 1h00m late" in str(replace(orders, p99_ms=LATENESS_BOUNDS_MS[-1] + 1))
    assert str(others).startswith(
        "public/others/orders; 0 moved (mover elsewhere); 0 released (1 recovering"
    )
    # The window of another process counts as the broker reports it.
    (elsewhere,) = progress_of({}, {}, {ORDERS: 0}, members, NOW_MS)
    assert elsewhere.pending == 4


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({}, "in 8.0s"),
        # The first message is parked for one to two hours.
        ({"next_due_ms": None, "pending": 0}, "after 59m59s"),
        ({"next_due_ms": NOW_MS + 5 * 3_600_000}, "after 59m59s"),
    ],
)
def test_the_next_due_time(members: Members, values: dict[str, Any], wanted: str) -> None:
    assert updated(members, **values)[0].next_due == wanted


def test_a_mover_that_is_behind_is_shown(members: Members) -> None:
    now_ms = NOW_MS + 2 * 3_600_000
    later: Any = {ORDERS: replace(members[ORDERS], now_ms=now_ms)}  # type: ignore[type-var]
    (row,) = progress_of({}, {}, {ORDERS: 0}, later, now_ms)
    assert "next due behind 1h05m" in str(row)


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
