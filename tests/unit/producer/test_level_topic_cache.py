"""Tests of the level topic cache of a producer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest

from delaylevel.errors import DelayTooLongError, UpgradeRequiredError
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from delaylevel.producer.checks import Message
from delaylevel.producer.level_topic_cache import LevelTopicCache
from delaylevel.producer.routing import Routing
from delaylevel.testing import ManualClock
from delaylevel.topics import lifecycle
from support.fakes import describe

DAY = timedelta(days=1)
WEEK = PartitionStrategy(partition_by=PartitionBy.DAY, maximum_delay=7 * DAY)


KNOWN = describe(7, levels=Levels(WEEK))


class Looks:
    """A cache of a level topic, and when it looked at the broker."""

    def __init__(self, described: Callable[[], LevelTopicDescription]) -> None:
        self.now_s = 0.0
        self.at: list[float] = []
        self._described = described
        routing = Routing(KNOWN, KNOWN.targets[0], None, ManualClock(1_800_000_000_000))
        self.cache = LevelTopicCache(routing, self._look, lambda: self.now_s)

    def _look(self) -> LevelTopicDescription:
        self.at.append(self.now_s)
        return self._described()

    def route(self, now_s: float, days: int) -> int:
        self.now_s = now_s
        message = Message(deliver_after=days * DAY)
        return self.cache.routed(lambda routing: routing.route(message)).partition


def test_refusals_query_the_broker_at_most_once_a_second() -> None:
    known = KNOWN
    looks = Looks(lambda: known)
    for _ in range(3):
        with pytest.raises(DelayTooLongError):
            looks.route(2.0, 8)
    longer = lifecycle.longer_levels(KNOWN.levels, 9 * DAY)
    known = replace(KNOWN, levels=longer, former=(KNOWN.levels,))
    with pytest.raises(DelayTooLongError):
        looks.route(2.9, 8)
    assert looks.route(3.1, 8) == 7
    assert looks.at == [2.0, 3.1]
    # Another level topic of the same name is not an expansion.
    hours = PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(hours=9))
    known = replace(KNOWN, levels=Levels(hours))
    looks.now_s = 5.0
    assert not looks.cache.refresh_after_refusal()
    assert looks.cache.routing.description.levels == longer


def test_a_running_producer_continues_when_the_level_topic_needs_a_later_version(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every version understands ordinary messages; the producer refuses at its next start."""

    def described() -> LevelTopicDescription:
        raise UpgradeRequiredError("it is described in format 9")

    looks = Looks(described)
    looks.cache.check_exists()
    looks.now_s = 2.0
    assert not looks.cache.refresh_after_refusal()
    assert "format 9" in caplog.text
    assert looks.route(2.0, 2) == 1
