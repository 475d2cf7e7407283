"""Tests of the cached description: its age, its rate of reads, and failing reads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delaylevel.errors import BrokerUnreachableError, UpgradeRequiredError
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.topics.roster import (
    FRESH_S,
    LIFETIME_S,
    RESTING_S,
    DescriptionCache,
)
from support.fakes import describe

FIRST = describe()
CHANGED = replace(FIRST, targets=("orders", "invoices"))


class Stored:
    """A description on a broker, with the monotonic clock of the process that reads it."""

    def __init__(self) -> None:
        self.description = FIRST
        self.now_s = 100.0
        self.reads = 0
        self.away = self.needs_upgrade = False

    def read(self) -> LevelTopicDescription:
        self.reads += 1
        if self.away:
            raise BrokerUnreachableError("no broker answers")
        if self.needs_upgrade:
            raise UpgradeRequiredError("format 9")
        return self.description

    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    def cache(self, description: LevelTopicDescription | None = FIRST) -> DescriptionCache:
        return DescriptionCache(self.read, description, now_s=lambda: self.now_s, wait=self.wait)


def test_a_read_that_fails_decides_nothing_and_does_not_stop_the_host() -> None:
    stored = Stored()
    cache = stored.cache()
    stored.away = True
    with pytest.raises(BrokerUnreachableError):
        cache.refresh(stored.now_s)
    assert cache.failing
    assert cache.read_since(stored.now_s) is None
    stored.now_s += LIFETIME_S
    with pytest.raises(BrokerUnreachableError):
        cache.current()
    assert cache.current() == FIRST, "a moment later, the host continues with what it has"
    stored.away, stored.description = False, CHANGED
    assert cache.refresh(stored.now_s) == CHANGED
    assert not cache.failing


def test_at_rest_it_is_read_rarely_and_again_before_a_decision() -> None:
    stored = Stored()
    cache = stored.cache(None)
    asked: list[float] = []
    cache.ask = lambda: asked.append(stored.now_s)
    stored.description = CHANGED
    while stored.now_s + 1 < cache.next_read_s(RESTING_S):
        stored.now_s += 1
        assert cache.current(RESTING_S) == FIRST
    assert stored.now_s == 100 + RESTING_S - 1
    assert (stored.reads, asked) == (1, [])
    assert not cache.is_current()
    assert not cache.is_current()
    assert asked == [stored.now_s], "one read is enough"
    assert cache.current(RESTING_S) == CHANGED, "it does not wait for the end of the rest"
    assert cache.is_current()
    stored.now_s += FRESH_S - 0.1
    assert cache.is_current(), "decisions do not wait for a read of one that is fresh"
    assert len(asked) == 2, "but it is read for the next ones"
    assert cache.next_read_s(RESTING_S) < stored.now_s


def test_an_admin_interface_that_hangs_or_fails_delays_decisions_for_a_moment_only() -> None:
    stored = Stored()
    cache = stored.cache()
    cache.ask = lambda: None
    stored.now_s += RESTING_S
    begin_s = stored.now_s
    while not cache.is_current():
        stored.now_s += 0.1
    assert stored.now_s - begin_s == pytest.approx(FRESH_S - LIFETIME_S, abs=0.2)
    stored.away = True
    for _ in range(3):
        with pytest.raises(BrokerUnreachableError):
            cache.current(RESTING_S)
        assert cache.is_current()
        stored.now_s += LIFETIME_S
        assert cache.is_current(), "it waits only once"
    stored.away, stored.needs_upgrade = False, True
    for _ in range(2):
        with pytest.raises(UpgradeRequiredError):
            cache.current(RESTING_S)
    stored.now_s += 60
    assert not cache.is_current(), "nothing is decided by a description of an earlier format"
    with pytest.raises(UpgradeRequiredError):
        cache.refresh(stored.now_s)
    stored.needs_upgrade = False
    assert cache.current(RESTING_S) == FIRST
