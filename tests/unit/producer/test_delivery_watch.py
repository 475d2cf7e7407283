"""Tests of a producer's warning about a missing mover or dispatcher.

The statistics are those that a broker was seen to report: a mover that was connected leaves the
type of its subscription behind, and one that moved messages the time; both until the broker opens
the topic again. The acknowledged position stays.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from delaylevel.cluster.port import ConsumerStats, PartitionStats, SubscriptionStats
from delaylevel.errors import BrokerUnreachableError
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.position import Position
from delaylevel.model.topic_name import TopicName
from delaylevel.producer import setup
from delaylevel.producer.setup import (
    CHECK_EVERY_S,
    CONFIRM_AFTER_S,
    WARN_EVERY_S,
    DeliveryWatch,
    DeliveryWatches,
    missing_hosts,
)
from support.fakes import HandClock, describe

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
    ) -> None:
        self.levels, self.window = levels, window
        self.acknowledged = acknowledged
        self.failure: Exception | None = None
        self.topics: set[str] = set()

    def partitioned_stats(self, topic: TopicName) -> Mapping[int, PartitionStats]:
        if self.failure is not None:
            raise self.failure
        self.topics.add(topic.local)
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


# -- repeated checks


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[DeliveryWatch], tuple[float, int]]:
    """``warnings(watch)``: check once; return the pause before the next check, and the warnings."""

    def check(watch: DeliveryWatch) -> tuple[float, int]:
        caplog.clear()
        return watch.check(), len(caplog.records)

    return check


def test_warning_needs_two_checks_and_is_not_repeated_for_hours(warnings: Any) -> None:
    admin: Any = Reported()
    clock = HandClock()
    watch = DeliveryWatch(admin, describe(), "orders", clock)
    assert warnings(watch) == (CONFIRM_AFTER_S, 0)
    assert warnings(watch) == (CHECK_EVERY_S, 2)
    assert warnings(watch) == (CHECK_EVERY_S, 0)
    clock.advance(1000 * int(WARN_EVERY_S))
    assert warnings(watch) == (CHECK_EVERY_S, 2)


def test_host_that_restarts_causes_no_warning(warnings: Any) -> None:
    admin: Any = Reported(RUNNING, RUNNING)
    watch = DeliveryWatch(admin, describe(), "orders", HandClock())
    assert warnings(watch) == (CHECK_EVERY_S, 0)
    admin.window = NEVER
    assert warnings(watch) == (CONFIRM_AFTER_S, 0)
    admin.window = RUNNING
    assert warnings(watch) == (CHECK_EVERY_S, 0)
    admin.levels = NEVER
    assert warnings(watch) == (CONFIRM_AFTER_S, 0)
    assert warnings(watch) == (CHECK_EVERY_S, 1)


# -- the thread


class Counted(Reported):
    """An admin interface that signals each request."""

    def __init__(self) -> None:
        super().__init__(RUNNING, RUNNING)
        self.asked = threading.Event()

    def partitioned_stats(self, topic: TopicName) -> Mapping[int, PartitionStats]:
        self.asked.set()
        assert threading.current_thread().daemon
        return super().partitioned_stats(topic)


def test_checks_of_all_producers_run_in_one_thread_that_ends_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(setup, "CHECK_EVERY_S", 0.01)
    watches = DeliveryWatches(first_check_s=0.0)
    admins: list[Any] = [Counted(), Counted()]
    users = [lambda: None for _ in range(4)]
    for number, user in enumerate(users):
        watches.add(admins[number % 2], describe(), "orders", user)
    assert len(watches) == 2
    assert all(admin.asked.wait(20) for admin in admins)
    thread = watches._thread
    assert thread is not None
    users.clear()
    del user
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    assert len(watches) == 0
    users = [lambda: None]
    admins[0].asked.clear()
    watches.add(admins[0], describe(), "orders", users[0])
    assert admins[0].asked.wait(20)


def test_failing_admin_interface_only_means_no_warning(warnings: Any) -> None:
    admin: Any = Reported()
    admin.failure = BrokerUnreachableError("away")
    watch = DeliveryWatch(admin, describe(), "orders", HandClock())
    for _ in range(3):
        assert warnings(watch) == (CHECK_EVERY_S, 0)


def test_final_window_of_the_broker_needs_no_dispatcher() -> None:
    assert missing(Reported(RUNNING), describe(final_window=FinalWindow.BROKER)) == {}
