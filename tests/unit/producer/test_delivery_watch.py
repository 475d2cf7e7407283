"""Tests of a producer's warning about a missing mover or dispatcher.

The statistics are those that a broker was seen to report: a mover that was connected leaves the
type of its subscription behind, and one that moved messages the time; both until the broker opens
the topic again. The acknowledged position stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from delaylevel.cluster.port import ConsumerStats, PartitionStats, SubscriptionStats
from delaylevel.errors import BrokerUnreachableError
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.position import Position
from delaylevel.model.topic_name import TopicName
from delaylevel.producer import setup
from delaylevel.producer.setup import missing_hosts, warn_if_undelivered
from support.fakes import describe

NOW_MS = 1_800_000_000_000
MINUTE_MS = 60_000
HOST = (ConsumerStats("host"),)
NEVER = SubscriptionStats(0)


class Reported:
    """An admin interface that reports the same subscription for all partitions of a kind."""

    def __init__(
        self,
        levels: SubscriptionStats = NEVER,
        window: SubscriptionStats = NEVER,
        acknowledged: int = -1,
        failure: Exception | None = None,
    ) -> None:
        self.levels, self.window = levels, window
        self.acknowledged, self.failure = acknowledged, failure

    def partitioned_stats(self, topic: TopicName) -> Mapping[int, PartitionStats]:
        if self.failure is not None:
            raise self.failure
        found = self.window if topic.local.endswith("-window") else self.levels
        return {index: PartitionStats(100, {"delaylevel": found}) for index in range(40)}

    def mark_delete_position(self, partition: TopicName, subscription: str) -> Position:
        return Position(7, self.acknowledged, -1)


def parked(since_ms: int, **changes: Any) -> SubscriptionStats:
    """Return a subscription whose oldest entry was published some time ago."""
    return SubscriptionStats(3, oldest_publish_ms=NOW_MS - since_ms, **changes)


def missing(admin: Any, description: LevelTopicDescription | None = None) -> dict[str, str]:
    return missing_hosts(admin, description or describe(), "orders", NOW_MS)


RUNNING = replace(NEVER, consumers=HOST, type="Exclusive")


@pytest.mark.parametrize(
    "admin",
    [
        Reported(replace(NEVER, type="Exclusive"), RUNNING),  # it was connected, and moved nothing
        Reported(replace(NEVER, acknowledged_ms=NOW_MS - MINUTE_MS), RUNNING),
        Reported(NEVER, RUNNING, acknowledged=12),  # before the broker opened the topic again
        Reported(parked(5 * MINUTE_MS, type="Exclusive"), RUNNING),  # not ready for a long time
    ],
)
def test_spark_job_that_runs_at_intervals_is_not_missing(admin: Any) -> None:
    assert missing(admin) == {}


def test_overdue_hand_offs_show_that_no_mover_runs_even_at_intervals() -> None:
    # The finest level's first partition hands off after an hour; the lead is five minutes.
    late = parked(3 * 60 * MINUTE_MS, type="Exclusive", acknowledged_ms=NOW_MS - 90 * MINUTE_MS)
    text = missing(Reported(late, RUNNING))["mover"]
    assert text.startswith("no mover is running for orders (the last one moved messages 1h30m ago)")
    assert "hand-offs are overdue by 2h05m" in text


def test_final_window_of_the_broker_needs_no_dispatcher() -> None:
    assert missing(Reported(RUNNING), describe(final_window=FinalWindow.BROKER)) == {}


# -- the warning


@pytest.mark.parametrize(
    ("first", "second", "warnings"),
    [
        (Reported(), Reported(), 2),
        (Reported(), Reported(RUNNING), 1),
        (Reported(), Reported(RUNNING, RUNNING), 0),  # they started meanwhile
        (Reported(RUNNING), Reported(window=RUNNING), 0),  # the one, then the other
        (Reported(RUNNING, RUNNING), Reported(), 0),
        (Reported(), Reported(failure=BrokerUnreachableError("away")), 0),
    ],
)
def test_two_looks_are_needed_for_a_warning(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    first: Any,
    second: Any,
    warnings: int,
) -> None:
    looks = iter((first, second))
    monkeypatch.setattr(setup, "_looked", set())
    monkeypatch.setattr(setup, "LOOK_AFTER_S", (0.0, 0.0))
    monkeypatch.setattr(setup, "missing_hosts", lambda _, *rest: missing_hosts(next(looks), *rest))
    thread = warn_if_undelivered(first, "orders", describe())
    assert thread is not None
    assert warn_if_undelivered(first, "orders", describe()) is None, "once in a process"
    thread.join(60)
    assert len(caplog.records) == warnings
