"""Tests of the settings of a level topic, and of its outcomes topic."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta

import pytest

from delaylevel import topics
from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import (
    InvalidInputError,
    LevelTopicError,
    NotFoundError,
    UpgradeRequiredError,
)
from delaylevel.model.level_topic import (
    DESCRIPTION_PROPERTY,
    SUBSCRIPTION,
    Expired,
    FinalWindow,
    MissingTarget,
    Role,
)
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import ManualClock, MemoryPulsar
from delaylevel.topics.lifecycle import (
    delete,
    expand,
    longer_levels,
    pause,
    resume,
    set_attribute,
    set_expiry,
    set_on_missing_target,
)
from delaylevel.topics.status import status
from delaylevel.topics.subscriptions import read_foreign_subscriptions
from support.fakes import describe

WANTED = describe()
LONGER = longer_levels(WANTED.levels, timedelta(days=60))
CLOCK = ManualClock(1_800_000_000_000)


@pytest.fixture
def memory() -> MemoryPulsar:
    """A Pulsar with a level topic."""
    memory = MemoryPulsar()
    topics.create(memory.admin, WANTED)
    return memory


def stored(memory: MemoryPulsar) -> str:
    metadata = memory.admin.partitioned_metadata(WANTED.name)
    return metadata.properties[DESCRIPTION_PROPERTY]


def test_the_outcomes_topic_is_created_and_repaired_like_every_other_member(
    memory: MemoryPulsar,
) -> None:
    described = memory.admin.partitioned_metadata
    assert described(WANTED.outcomes_topic).partitions == 1
    (stats,) = memory.admin.partitioned_stats(WANTED.outcomes_topic).values()
    assert set(stats.subscriptions) == {SUBSCRIPTION}
    assert topics.describe(memory.admin, WANTED.outcomes_topic.full) == WANTED
    memory.admin.delete(WANTED.outcomes_topic)
    assert topics.create(memory.admin, WANTED) == WANTED
    assert described(WANTED.outcomes_topic).partitions == 1
    broker = describe(
        topic="_bills-delay-level", targets=("bills",), final_window=FinalWindow.BROKER
    )
    topics.create(memory.admin, broker)
    with pytest.raises(NotFoundError):
        described(broker.outcomes_topic)


def test_a_topic_of_somebody_else_is_not_taken_for_outcomes() -> None:
    memory = MemoryPulsar()
    memory.admin.create_partitioned(WANTED.outcomes_topic, 1, {})
    with pytest.raises(LevelTopicError, match="-outcomes exists and is an ordinary"):
        topics.create(memory.admin, WANTED)
    assert memory.admin.list_partitioned_topics("public/default") == [WANTED.outcomes_topic]


def test_a_deletion_takes_the_outcomes_and_does_not_wait_for_them(memory: MemoryPulsar) -> None:
    after = WANTED
    producer = memory.client().create_producer(after.outcomes_topic.partition(0).full)
    producer.send(b"an outcome")
    with pytest.raises(LevelTopicError, match="-outcomes-partition-0"):
        delete(memory.client(), memory.admin, after)
    producer.close()
    at = status(memory.admin, after, 0)
    assert at.outcome_entries == 1
    assert delete(memory.client(), memory.admin, after).total == 0
    with pytest.raises(NotFoundError):
        memory.admin.partitioned_metadata(after.outcomes_topic)


def test_applications_may_follow_the_outcomes(memory: MemoryPulsar) -> None:
    after = WANTED
    client = memory.client()
    client.subscribe(after.outcomes_topic.full, "audit")
    client.subscribe(after.window_topic.full, "spy")
    names = {(found.name, found.role) for found in read_foreign_subscriptions(memory.admin, after)}
    assert names == {("spy", Role.WINDOW)}


def test_a_setting_is_a_property_of_its_own(memory: MemoryPulsar) -> None:
    after = set_attribute(memory.admin, WANTED.topic, "amount")
    assert after.attribute == "amount"
    properties = memory.admin.partitioned_metadata(WANTED.name).properties
    assert properties["delaylevel.set.attribute"] == '"amount"'
    assert set_on_missing_target(memory.admin, WANTED.topic, MissingTarget.DROP) == replace(
        after, on_missing_target=MissingTarget.DROP
    )
    set_on_missing_target(memory.admin, WANTED.topic, MissingTarget.HOLD)
    assert set_attribute(memory.admin, WANTED.topic, "size") == WANTED
    assert stored(memory) == WANTED.to_json()
    for name in ("", "x" * 201):
        with pytest.raises(InvalidInputError, match="attribute"):
            set_attribute(memory.admin, WANTED.topic, name)


def _on_missing_target(admin: TopicAdmin) -> None:
    set_on_missing_target(admin, WANTED.topic, MissingTarget.DROP)


CHANGES: dict[str, Callable[[TopicAdmin], object]] = {
    "missing target": _on_missing_target,
    "expiry": lambda admin: set_expiry(admin, WANTED.topic, expire_after_ms=7),
    "expired": lambda admin: set_expiry(admin, WANTED.topic, expired=Expired.DEAD_LETTER),
    "attribute": lambda admin: set_attribute(admin, WANTED.topic, "amount"),
    "pause": lambda admin: pause(admin, WANTED.topic, "orders", CLOCK),
    "pause of all": lambda admin: pause(admin, WANTED.topic, None, CLOCK),
    "resume": lambda admin: resume(admin, WANTED.topic, "old", CLOCK, 500),
    "target": lambda admin: topics.create(admin, describe(targets=("orders", "more"))),
    "expansion": lambda admin: expand(admin, WANTED.topic, LONGER),
}


@pytest.mark.parametrize("meanwhile", CHANGES)
@pytest.mark.parametrize("change", CHANGES)
def test_no_change_takes_back_one_that_was_made_meanwhile(
    change: str, meanwhile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second change is made between the reads of the first one and its last write."""
    if change == meanwhile or {change, meanwhile} == {"target", "expansion"}:
        return  # the same setting: the later one counts; the other pair has its own test

    def level_topic() -> MemoryPulsar:
        memory = MemoryPulsar()
        topics.create(memory.admin, describe(targets=("orders", "old")))
        pause(memory.admin, WANTED.topic, "old", CLOCK)
        return memory

    one_by_one, memory = level_topic(), level_topic()
    for name in (change, meanwhile):
        CHANGES[name](one_by_one.admin)
    write, waiting = memory.admin.set_properties, [CHANGES[meanwhile]]

    def interrupted(topic: TopicName, properties: Mapping[str, str]) -> None:
        last = change != "expansion" or DESCRIPTION_PROPERTY in properties
        if last and waiting:
            waiting.pop()(memory.admin)
        write(topic, properties)

    monkeypatch.setattr(memory.admin, "set_properties", interrupted)
    CHANGES[change](memory.admin)
    assert not waiting
    assert topics.find(memory.admin, WANTED.topic) == topics.find(one_by_one.admin, WANTED.topic)


@pytest.mark.parametrize("name", ["expired", "paused.x", "resumed.x"])
@pytest.mark.parametrize("text", ["", "x", "7", "[]"])
def test_a_damaged_setting_is_reported(memory: MemoryPulsar, name: str, text: str) -> None:
    if (name, text) == ("paused.x", "7"):
        return
    memory.admin.set_properties(WANTED.name, {f"delaylevel.set.{name}": text})
    with pytest.raises(LevelTopicError, match="cannot be read"):
        topics.find(memory.admin, WANTED.topic)


def test_a_later_format_refuses_every_use(memory: MemoryPulsar) -> None:
    text = json.dumps({**json.loads(stored(memory)), "version": 2})
    memory.admin.set_properties(WANTED.name, {DESCRIPTION_PROPERTY: text})
    for use in (
        lambda: topics.find(memory.admin, WANTED.topic),
        lambda: topics.describe(memory.admin, WANTED.topic),
        lambda: topics.create(memory.admin, WANTED),
        lambda: set_on_missing_target(memory.admin, WANTED.topic, MissingTarget.DROP),
        lambda: memory.client().create_producer(
            "orders",
            enable_delay_level_topic=True,
            delay_level_topic=WANTED.topic,
            partition_strategy=WANTED.levels,
        ),
    ):
        with pytest.raises(UpgradeRequiredError, match="format 2"):
            use()
    assert stored(memory) == text
    (listed,) = topics.list_level_topics(memory.admin, "public/default")
    assert listed.description is None
    assert "format 2" in str(listed.problem)
