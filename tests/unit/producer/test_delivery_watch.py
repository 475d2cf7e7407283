"""Tests of a producer's warning about a missing mover or dispatcher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from delaylevel.cluster.port import ClientStats, PartitionStats, SubscriptionStats
from delaylevel.errors import BrokerUnreachableError
from delaylevel.model.position import Position
from delaylevel.model.topic_name import TopicName
from delaylevel.producer import setup
from support.fakes import describe

NEVER = SubscriptionStats(0)
RUNNING = SubscriptionStats(0, consumers=(ClientStats("host"),), type="Exclusive")


class Reported:
    """An admin interface that reports the same subscription for all partitions of a kind."""

    def __init__(self, levels: SubscriptionStats | None, window: SubscriptionStats) -> None:
        self.levels, self.window = levels, window

    def partitioned_stats(self, topic: TopicName) -> Mapping[int, PartitionStats]:
        found = self.window if topic.local.endswith("-window") else self.levels
        if found is None:
            raise BrokerUnreachableError("away")
        return {index: PartitionStats(100, {"delaylevel": found}) for index in range(40)}

    def mark_delete_position(self, partition: TopicName, subscription: str) -> Position:
        return Position(7, -1, -1)


@pytest.mark.parametrize(
    ("levels", "window", "warnings"),
    [(NEVER, NEVER, 2), (NEVER, RUNNING, 1), (RUNNING, RUNNING, 0), (None, NEVER, 0)],
)
def test_a_missing_mover_or_dispatcher_is_named_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    levels: SubscriptionStats | None,
    window: SubscriptionStats,
    warnings: int,
) -> None:
    monkeypatch.setattr(setup, "_looked", set())
    monkeypatch.setattr(setup, "LOOK_AFTER_S", 0.0)
    admin: Any = Reported(levels, window)
    thread = setup.warn_if_undelivered(admin, "orders", describe())
    assert thread is not None
    assert setup.warn_if_undelivered(admin, "orders", describe()) is None, "once in a process"
    thread.join(60)
    assert len(caplog.records) == warnings
