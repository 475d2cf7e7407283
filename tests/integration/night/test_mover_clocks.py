"""Tests of producers with wrong clocks: no message stalls, and none is late by the mover's clock.

The Python client takes publish times from the machine's clock, inside C++. A Java client stamps
messages here as a machine with another clock would. The tests set the mover's own clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest

from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.message import ParkedMessage
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.mover.local import LocalMover
from support.world import RealWorld

UNIT_MS = 600_000
DAY_MS = 86_400_000
STEP_MS = 20_000


def levels(lead_s: int) -> Levels:
    return Levels(
        PartitionStrategy(
            partition_by=timedelta(milliseconds=UNIT_MS),
            maximum_delay=timedelta(milliseconds=3 * UNIT_MS),
            lead=timedelta(seconds=lead_s),
        )
    )


@pytest.fixture
def park(skewed: Any, parked: Any) -> Callable[..., dict[bytes, int]]:
    """``park(description, offsets_ms)``: publish into partition 0 with these clocks, one by one.

    Each producer has chosen the partition by its own clock, for a delay of ``unit + number`` ms.
    """
    clock = SystemClock()

    def publish(
        description: LevelTopicDescription, offsets_ms: Sequence[int], first: int = 0
    ) -> dict[bytes, int]:
        topic = description.name.partition(0).full
        sent = {}
        for number, offset_ms in enumerate(offsets_ms, first):
            value = b"%d" % number
            sent[value] = clock.now_ms() + offset_ms + UNIT_MS + 1000 + number
            skewed(topic, offset_ms, value, parked(sent[value]))
        return sent

    return publish


def move(
    moving: LocalMover, clock: Any, until_ms: int, topic: str, stored: Any
) -> dict[bytes, int]:
    """Trigger every 20 s; return the hand-off time of each message by the mover's clock."""
    handed: dict[bytes, int] = {}
    seen = 0
    while clock.now_ms() < until_ms:
        clock.advance(STEP_MS)
        report = moving.run_once()
        assert report.latest_ms <= 0, report
        assert not report.dead
        assert not report.held
        if report.window or report.due:
            found: list[ParkedMessage] = stored(topic)
            for message in found[seen:]:
                handed[message.value or b""] = clock.now_ms()
            seen = len(found)
    return handed


@pytest.mark.parametrize(
    ("lead_s", "clocks_ms"),
    [(200, (0, 30_000)), (200, (0, -30_000)), (400, (30_000, 0, -30_000))],
    ids=["ahead", "behind", "both"],
)
def test_clocks_half_a_minute_off(
    lead_s: int,
    clocks_ms: tuple[int, ...],
    world: RealWorld,
    park: Callable[..., dict[bytes, int]],
    clock: Any,
) -> None:
    description = world.level_topic(levels(lead_s))
    # One by one, then in runs: each clock has messages at the front, in the middle and at the end.
    sent = park(description, [*clocks_ms * 6, *(c for c in clocks_ms for _ in range(20))])
    moving = world.mover(description, clock)
    handed = move(moving, clock, clock.now_ms() + 2 * UNIT_MS, description.targets[0], world.stored)
    assert set(handed) == set(sent)
    for value, due_ms in sent.items():
        assert handed[value] <= due_ms, "late"
        assert due_ms - handed[value] <= description.levels[0].near_due_ms, "handed off too early"
    world.drained(description)


@pytest.mark.parametrize("where", ["front", "middle", "end", "everywhere"])
def test_a_clock_a_day_ahead(
    where: str, world: RealWorld, park: Callable[..., dict[bytes, int]], clock: Any
) -> None:
    description = world.level_topic(levels(200))
    right, wrong = [0] * 15, [DAY_MS] * 3
    offsets = {
        "front": [*wrong, *right],
        "middle": [*right, *wrong, *right],
        "end": [*right, *wrong],
        "everywhere": [*wrong, *right, *wrong, *right, *wrong],
    }[where]
    start_ms = clock.now_ms()
    sent = park(description, offsets)
    in_time = {value for value, due_ms in sent.items() if due_ms < start_ms + DAY_MS // 2}
    assert len(in_time) == offsets.count(0)

    moving = world.mover(description, clock)
    orders = description.targets[0]
    handed = move(moving, clock, start_ms + 750_000, orders, world.stored)
    assert set(handed) == in_time
    assert all(handed[value] <= sent[value] for value in in_time)

    # Messages with wrong stamps that stay behind do not stop later ones.
    clock.advance(SystemClock().now_ms() - clock.at_ms)
    later = park(description, right, first=1000)
    moving.close()
    moving = world.mover(description, clock)
    handed = {**handed, **move(moving, clock, clock.now_ms() + 750_000, orders, world.stored)}
    assert set(handed) == in_time | set(later)

    # A day later the others are due by every clock.
    clock.advance(start_ms + DAY_MS + 450_000 - clock.at_ms)
    moving.run_once()
    assert {m.value for m in world.stored(orders)} == set(sent) | set(later)
    world.drained(description)


def test_a_clock_a_day_behind(
    world: RealWorld, park: Callable[..., dict[bytes, int]], clock: Any
) -> None:
    """By other clocks these were due yesterday: they are delivered at once, and none is lost."""
    description = world.level_topic(levels(200))
    sent = park(description, [-DAY_MS, 0, 0, -DAY_MS, 0, -DAY_MS])
    clock.advance(SystemClock().now_ms() - clock.at_ms)
    report = world.mover(description, clock).run_once()
    # Messages with correct stamps are near-due and precede a ready one, so they go with it.
    assert (report.due, report.window) == (3, 3)
    assert {m.value for m in world.stored(description.targets[0])} == set(sent)
    world.drained(description)
