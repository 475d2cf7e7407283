"""Tests of the level topics that a process serves, and of the age of their cached descriptions."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from delaylevel import topics
from delaylevel.errors import (
    BrokerUnreachableError,
    InvalidInputError,
    LevelTopicError,
    UpgradeRequiredError,
)
from delaylevel.model.level_topic import DESCRIPTION_PROPERTY, LevelTopicDescription
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import MemoryPulsar
from delaylevel.topics.roster import FRESH_S, LIFETIME_S, RESTING_S, DescriptionCache, Roster
from support.fakes import describe

NAMESPACE = "public/default"


class Process:
    """A process that serves level topics, on the in-memory Pulsar."""

    def __init__(self, *names: str, namespace: str | None = None) -> None:
        self.memory = MemoryPulsar()
        self.now_s = 0.0
        self.served: dict[str, bool] = {}
        self.unable: dict[str, Exception] = {}
        self.roster = Roster(self.memory.admin, names, self.serve, namespace, lambda: self.now_s)

    def serve(self, description: LevelTopicDescription, named: bool) -> None:
        if error := self.unable.get(self.name(description.topic)):
            raise error
        assert description.topic not in self.served
        self.served[description.topic] = named

    def create(self, name: str) -> str:
        wanted = describe(topic=f"_{name}-delay-level", targets=(name,))
        return topics.create(self.memory.admin, wanted).topic

    def store(self, topic: str, **values: Any) -> None:
        """Change the stored description of a level topic, as a later version would."""
        name = TopicName.parse(topic)
        text = self.memory.admin.partitioned_metadata(name).properties[DESCRIPTION_PROPERTY]
        changed = json.dumps({**json.loads(text), **values})
        self.memory.admin.set_properties(name, {DESCRIPTION_PROPERTY: changed})

    def name(self, topic: str) -> str:
        return TopicName.parse(topic).local.removeprefix("_").removesuffix("-delay-level")

    def look(self) -> list[str]:
        """Look after the usual time; return the level topics that were deleted."""
        self.now_s += 6
        return [self.name(gone) for gone in self.roster.look(self.served)]

    def names(self) -> list[str]:
        return sorted(map(self.name, self.served))


def test_the_others_are_served_and_each_of_the_rest_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Two names of one level topic are one.
    process = Process("a", "_a-delay-level", "b", "late", "refusing")
    for name in ("a", "b", "refusing"):
        process.create(name)
    process.store("_b-delay-level", version=2)
    process.unable["refusing"] = InvalidInputError("not with this delivery")
    process.roster.start()
    assert process.names() == ["a"]
    assert process.roster.refused.keys() == {"b", "late", "refusing"}
    assert "format 2" in process.roster.refused["b"]
    assert "late has no level topic" in process.roster.refused["late"]
    process.look()
    assert caplog.text.count("is not served") == 3, "each reason is logged once"
    process.store("_b-delay-level", version=1)
    process.create("late")
    process.roster.look(process.served)
    assert process.names() == ["a"], "not at every call"
    process.look()
    assert process.names() == ["a", "b", "late"]
    del process.unable["refusing"]
    process.look()
    assert process.names() == ["a", "b", "late", "refusing"]
    assert set(process.served.values()) == {True}
    assert not process.roster.refused


def test_if_none_can_be_served_the_first_reason_is_raised() -> None:
    with pytest.raises(LevelTopicError, match="a has no level topic"):
        Process("a", "b").roster.start()
    process = Process("a")
    process.create("a")
    process.unable["a"] = BrokerUnreachableError("away")
    with pytest.raises(BrokerUnreachableError):
        process.roster.start()


def test_a_namespace_is_followed() -> None:
    process = Process(namespace=NAMESPACE)
    process.create("a")
    process.store(process.create("b"), version=2)
    damaged = TopicName.parse(process.create("d"))
    process.memory.admin.set_properties(damaged, {"delaylevel.target.a/b": "1"})
    process.roster.start()
    assert process.names() == ["a"]
    assert [process.name(topic) for topic in process.roster.refused] == ["b", "d"]
    assert "cannot be read" in process.roster.refused[damaged.full]
    process.create("c")
    assert process.look() == []
    assert process.names() == ["a", "c"]
    process.store("_b-delay-level", version=1)
    process.look()
    assert process.names() == ["a", "b", "c"]
    process.memory.admin.delete(TopicName.parse("_a-delay-level"))
    assert process.look() == ["a"]
    assert set(process.served.values()) == {False}


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
