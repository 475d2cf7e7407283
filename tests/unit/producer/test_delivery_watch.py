"""Tests of a producer's warning about a missing mover or dispatcher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from delaylevel.cluster.port import ConsumerStats, PartitionStats, SubscriptionStats
from delaylevel.errors import BrokerUnreachableError
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
        failure: Exception | None = None,
    ) -> None:
        self.levels, self.window, self.failure = levels, window, failure

    def partitioned_stats(self, topic: TopicName) -> Mapping[int, PartitionStats]:
        if self.failure is not None:
            raise self.failure
        found = self.window if topic.local.endswith("-window") else self.levels
        return {index: PartitionStats(100, {"delaylevel": found}) for index in range(40)}

    def mark_delete_position(self, partition: TopicName, subscription: str) -> Position:
        return Position(7, -1, -1)


RUNNING = replace(NEVER, consumers=HOST, type="Exclusive")


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
