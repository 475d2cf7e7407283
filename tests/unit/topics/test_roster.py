"""Tests of the level topics that a process is to serve: one that it cannot serve stops no other."""

from __future__ import annotations

import json
from typing import Any

import pytest

from delaylevel import topics
from delaylevel.errors import (
    BrokerUnreachableError,
    InvalidInputError,
    LevelTopicError,
)
from delaylevel.model.level_topic import DESCRIPTION_PROPERTY, LevelTopicDescription
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import MemoryPulsar
from delaylevel.topics.roster import Roster
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
