"""Tests of the cached description: its age, its rate of reads, and failing reads."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from delaylevel.errors import BrokerUnreachableError, UpgradeRequiredError
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.topics.roster import LIFETIME_S, REFRESH_EVERY_S, DescriptionCache
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
        self.waits: list[float] = []

    def read(self) -> LevelTopicDescription:
        self.reads += 1
        if self.away:
            raise BrokerUnreachableError("no broker answers")
        if self.needs_upgrade:
            raise UpgradeRequiredError("format 9")
        return self.description

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now_s += seconds

    def cache(self, description: LevelTopicDescription | None = FIRST) -> DescriptionCache:
        return DescriptionCache(self.read, description, now_s=lambda: self.now_s, wait=self.wait)


def test_the_description_is_read_again_when_its_lifetime_is_over() -> None:
    stored = Stored()
    cache = stored.cache(None)
    stored.description = CHANGED
    stored.now_s += LIFETIME_S - 0.01
    assert cache.current() == FIRST
    assert stored.reads == 1
    stored.now_s += 0.01
    assert cache.current() == cache.latest() == CHANGED
    assert stored.reads == 2


def test_a_description_that_was_given_may_have_been_read_at_any_earlier_time() -> None:
    stored = Stored()
    cache = stored.cache()
    assert cache.read_since(0) is None
    assert cache.refresh(stored.now_s) == FIRST
    assert stored.reads == 1
    assert stored.waits == []


def test_only_a_description_that_was_read_since_counts() -> None:
    stored = Stored()
    cache = stored.cache()
    cache.refresh(stored.now_s)
    stored.description = CHANGED
    assert cache.refresh(stored.now_s) == FIRST, "one read decides for all that was stored before"
    stored.now_s += 0.1
    assert cache.read_since(stored.now_s) is None
    assert cache.refresh(stored.now_s) == CHANGED
    assert stored.waits == [pytest.approx(REFRESH_EVERY_S - 0.1)]
    assert cache.read_since(stored.now_s) == CHANGED
    assert stored.reads == 2


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


def test_one_read_answers_all_threads_that_wait() -> None:
    stored = Stored()
    cache = stored.cache()
    entered, leave = threading.Event(), threading.Event()
    read = stored.read

    def slow() -> LevelTopicDescription:
        entered.set()
        assert leave.wait(60)
        return read()

    cache._read = slow  # type: ignore[method-assign]
    since_s = stored.now_s
    threads = [threading.Thread(target=cache.refresh, args=(since_s,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert entered.wait(60)
    assert cache.current() == FIRST, "a reader does not block the host's own loop"
    leave.set()
    for thread in threads:
        thread.join(60)
    assert stored.reads == 1


def test_a_host_does_not_continue_with_a_level_topic_that_needs_a_later_version() -> None:
    stored = Stored()
    cache = stored.cache()
    stored.needs_upgrade = True
    with pytest.raises(UpgradeRequiredError):
        cache.refresh(stored.now_s)
    for _ in range(3):
        with pytest.raises(UpgradeRequiredError):
            cache.current()
    stored.needs_upgrade = False
    assert cache.current() == FIRST
