"""Tests of missing and stale movers and dispatchers, as the broker's statistics show them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from delaylevel.cluster.port import ConsumerStats, PartitionStats, SubscriptionStats
from delaylevel.model.level_topic import Mover, Pauses
from delaylevel.model.position import Position
from delaylevel.topics.hosts import missing_hosts, summary
from delaylevel.topics.status import status
from support.fakes import describe

NOW_MS = 1_800_000_000_000
HOUR_MS = 3_600_000
LEVEL_TOPIC = describe().topic
NEAR_DUE_MS = describe().levels[-1].near_due_ms
IDLE = SubscriptionStats(0)
RUNNING = SubscriptionStats(0, consumers=(ConsumerStats("host-1"),), type="Exclusive")
FUNCTION: dict[str, Any] = {"mover": Mover.FUNCTION}
PAUSED: dict[str, Any] = {"pauses": Pauses((("*", NOW_MS - HOUR_MS),))}


class Reported:
    """An admin interface that reports the same subscription for all partitions of a kind."""

    def __init__(self, levels: SubscriptionStats, window: SubscriptionStats) -> None:
        self.levels, self.window = levels, window

    def partitioned_stats(self, topic: Any) -> dict[int, PartitionStats]:
        found = self.window if topic.local.endswith("-window") else self.levels
        return {index: PartitionStats(0, {"delaylevel": found}) for index in range(40)}

    def mark_delete_position(self, partition: Any, subscription: str) -> Position:
        return Position(7, -1, -1)


def waiting(since_ms: int) -> SubscriptionStats:
    """Return the statistics of a running process with a message of that age."""
    return replace(RUNNING, backlog_entries=1, oldest_publish_ms=NOW_MS - since_ms)


@pytest.mark.parametrize(
    ("levels", "window", "changes", "lines"),
    [
        (RUNNING, RUNNING, {}, []),
        (IDLE, IDLE, {}, ["no mover and no dispatcher is running for orders: `delaylevel run o"]),
        (RUNNING, IDLE, {}, ["no dispatcher is running for orders: `delaylevel run orders`"]),
        (IDLE, RUNNING, {}, ["no mover is running for orders: `delaylevel run orders`"]),
        (
            IDLE,
            IDLE,
            FUNCTION,
            [
                f"no mover is running for orders: `delaylevel mover deploy {LEVEL_TOPIC}`",
                f"no dispatcher is running for orders: `delaylevel dispatcher run {LEVEL_TOPIC}`",
            ],
        ),
        # -- stale ones. The finest level's first partition hands off after an hour; the lead is
        # five minutes.
        (
            waiting(3 * HOUR_MS),
            RUNNING,
            {},
            ["host-1 is connected, and hand-offs are overdue by 2h"],
        ),
        (
            waiting(3 * HOUR_MS),
            IDLE,
            {},
            ["the mover of orders", "no dispatcher is running"],
        ),
        (RUNNING, waiting(NEAR_DUE_MS + 30_000), {}, []),
        (
            RUNNING,
            waiting(NEAR_DUE_MS + HOUR_MS),
            {},
            [
                "host-1 is connected, and a message in the window was due 1h00m ago or earlier: "
                "`delaylevel levels describe orders`"
            ],
        ),
        (RUNNING, waiting(100 * HOUR_MS), PAUSED, []),
    ],
)
def test_a_line_for_each_missing_or_stale_host_names_the_command(
    levels: SubscriptionStats, window: SubscriptionStats, changes: dict[str, Any], lines: list[str]
) -> None:
    admin: Any = Reported(levels, window)
    described = replace(describe(), **changes)
    rows = status(admin, described, 0, as_described=False).rows()
    missing = missing_hosts(admin, described, rows, "orders", NOW_MS)
    found = summary(missing, "orders")
    assert len(found) == len(lines)
    assert all(words in line for words, line in zip(lines, found, strict=True))
    running = {"mover": levels, "dispatcher": window}
    assert all(each.stale == bool(running[each.kind].consumers) for each in missing)
