"""Tests of missing and stale movers and dispatchers, as the broker's statistics show them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from delaylevel.cluster.port import ConsumerStats, PartitionStats, SubscriptionStats
from delaylevel.model.level_topic import LevelTopicDescription, Mover, Pauses
from delaylevel.model.position import Position
from delaylevel.topics.hosts import MissingHost, missing_hosts, summary
from delaylevel.topics.status import status
from support.fakes import describe

NOW_MS = 1_800_000_000_000
HOUR_MS = 3_600_000
IDLE = SubscriptionStats(0)
RUNNING = SubscriptionStats(0, consumers=(ConsumerStats("host-1"),), type="Exclusive")


class Reported:
    """An admin interface that reports the same subscription for all partitions of a kind."""

    def __init__(self, levels: SubscriptionStats, window: SubscriptionStats) -> None:
        self.levels, self.window = levels, window

    def partitioned_stats(self, topic: Any) -> dict[int, PartitionStats]:
        found = self.window if topic.local.endswith("-window") else self.levels
        return {index: PartitionStats(0, {"delaylevel": found}) for index in range(40)}

    def mark_delete_position(self, partition: Any, subscription: str) -> Position:
        return Position(7, -1, -1)


def missing(
    levels: SubscriptionStats,
    window: SubscriptionStats,
    description: LevelTopicDescription | None = None,
) -> tuple[MissingHost, ...]:
    admin: Any = Reported(levels, window)
    described = description or describe()
    rows = status(admin, described, 0, as_described=False).rows()
    return missing_hosts(admin, described, rows, "orders", NOW_MS)


@pytest.mark.parametrize(
    ("levels", "window", "lines"),
    [
        (RUNNING, RUNNING, []),
        (
            IDLE,
            IDLE,
            ["no mover and no dispatcher is running for orders: `delaylevel run orders`"],
        ),
        (RUNNING, IDLE, ["no dispatcher is running for orders: `delaylevel run orders`"]),
        (IDLE, RUNNING, ["no mover is running for orders: `delaylevel run orders`"]),
    ],
)
def test_one_line_names_the_command(
    levels: SubscriptionStats, window: SubscriptionStats, lines: list[str]
) -> None:
    assert summary(missing(levels, window), "orders") == lines


def test_function_and_its_dispatcher_have_commands_of_their_own() -> None:
    function = describe(mover=Mover.FUNCTION)
    level_topic = function.topic
    assert summary(missing(IDLE, IDLE, function), "orders") == [
        f"no mover is running for orders: `delaylevel mover deploy {level_topic}`",
        f"no dispatcher is running for orders: `delaylevel dispatcher run {level_topic}`",
    ]


def waiting(subscription: SubscriptionStats, since_ms: int) -> SubscriptionStats:
    return replace(subscription, backlog_entries=1, oldest_publish_ms=NOW_MS - since_ms)


def test_dispatcher_that_is_connected_and_releases_nothing_is_stale() -> None:
    near_due_ms = describe().levels[-1].near_due_ms
    assert not missing(RUNNING, waiting(RUNNING, near_due_ms + 30_000))
    (found,) = missing(RUNNING, waiting(RUNNING, near_due_ms + HOUR_MS))
    assert (found.kind, found.stale) == ("dispatcher", True)
    assert "host-1 is connected, and a message in the window was due 1h00m ago" in str(found)
    assert "`delaylevel levels describe orders`" in str(found)


def test_pause_makes_no_dispatcher_stale() -> None:
    paused = replace(describe(), pauses=Pauses((("*", NOW_MS - HOUR_MS),)))
    assert not missing(RUNNING, waiting(RUNNING, 100 * HOUR_MS), paused)


def test_mover_that_is_connected_and_behind_is_stale() -> None:
    # The finest level's first partition hands off after an hour; the lead is five minutes.
    (found,) = missing(waiting(RUNNING, 3 * HOUR_MS), RUNNING)
    assert (found.kind, found.stale) == ("mover", True)
    assert "host-1 is connected, and hand-offs are overdue by 2h05m" in str(found)
    # It is no reason to start another one.
    both = missing(waiting(RUNNING, 3 * HOUR_MS), IDLE)
    assert [item.stale for item in both] == [True, False]
    assert len(summary(both, "orders")) == 2
