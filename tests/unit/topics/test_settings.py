"""Tests of the settings of a level topic, and of its outcomes topic."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import pytest

from delaylevel import topics
from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import (
    LevelTopicError,
    NotFoundError,
    StrategyMismatchError,
    UpgradeRequiredError,
)
from delaylevel.model.level_topic import (
    DESCRIPTION_PROPERTY,
    Expired,
    MissingTarget,
    Role,
)
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import ManualClock, MemoryPulsar
from delaylevel.topics.lifecycle import (
    change_settings,
    delete,
    expand,
    longer_levels,
    pause,
    resume,
)
from delaylevel.topics.status import status
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
    names = {(found.name, found.role) for found in status(memory.admin, after, 0).foreign}
    assert names == {("spy", Role.WINDOW)}


CHANGES: dict[str, Callable[[TopicAdmin], object]] = {
    "missing target": lambda admin: change_settings(
        admin, WANTED.topic, on_missing_target=MissingTarget.DROP
    ),
    "expiry": lambda admin: change_settings(admin, WANTED.topic, expire_after_ms=7),
    "expired": lambda admin: change_settings(admin, WANTED.topic, expired=Expired.DEAD_LETTER),
    "attribute": lambda admin: change_settings(admin, WANTED.topic, attribute="amount"),
    "pause": lambda admin: pause(admin, WANTED.topic, "orders", CLOCK),
    "pause of all": lambda admin: pause(admin, WANTED.topic, None, CLOCK),
    "resume": lambda admin: resume(admin, WANTED.topic, "old", CLOCK, 500),
    "target": lambda admin: topics.create(admin, describe(targets=("orders", "more"))),
    "expansion": lambda admin: expand(admin, WANTED.topic, LONGER),
}


def two_targets() -> MemoryPulsar:
    """Return a Pulsar with a level topic of two targets, one of them paused."""
    memory = MemoryPulsar()
    topics.create(memory.admin, describe(targets=("orders", "old")))
    pause(memory.admin, WANTED.topic, "old", CLOCK)
    return memory


@pytest.mark.parametrize("meanwhile", CHANGES)
@pytest.mark.parametrize("change", CHANGES)
def test_no_change_takes_back_one_that_was_made_meanwhile(
    change: str, meanwhile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second change is made between the reads of the first one and its last write."""
    if change == meanwhile or {change, meanwhile} == {"target", "expansion"}:
        return  # the next two tests

    one_by_one, memory = two_targets(), two_targets()
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


#: Two changes of each setting, to different values.
CONTRARY: dict[str, tuple[Callable[[TopicAdmin], object], Callable[[TopicAdmin], object]]] = {
    "missing target": (
        lambda admin: change_settings(admin, WANTED.topic, on_missing_target=MissingTarget.DROP),
        lambda admin: change_settings(
            admin, WANTED.topic, on_missing_target=MissingTarget.DEAD_LETTER
        ),
    ),
    "expiry": (
        lambda admin: change_settings(admin, WANTED.topic, expire_after_ms=7),
        lambda admin: change_settings(admin, WANTED.topic, expire_after_ms=9),
    ),
    "expiry and treatment": (
        lambda admin: change_settings(admin, WANTED.topic, expire_after_ms=7),
        lambda admin: change_settings(
            admin, WANTED.topic, expire_after_ms=9, expired=Expired.DEAD_LETTER
        ),
    ),
    "attribute": (
        lambda admin: change_settings(admin, WANTED.topic, attribute="amount"),
        lambda admin: change_settings(admin, WANTED.topic, attribute="weight"),
    ),
    "pause": (
        lambda admin: resume(admin, WANTED.topic, "old", CLOCK, 500),
        lambda admin: resume(admin, WANTED.topic, "old", CLOCK, 700),
    ),
}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("name", CONTRARY)
def test_of_two_changes_of_one_setting_the_later_one_is_made_on_top_of_the_other(
    name: str, swapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier, later = CONTRARY[name][::-1] if swapped else CONTRARY[name]
    one_by_one, memory = two_targets(), two_targets()
    earlier(one_by_one.admin)
    if name == "pause":  # it cannot be ended twice
        pause(one_by_one.admin, WANTED.topic, "old", CLOCK)
    later(one_by_one.admin)
    write, waiting = memory.admin.set_properties, [earlier]

    def interrupted(topic: TopicName, properties: Mapping[str, str]) -> None:
        if waiting:
            waiting.pop()(memory.admin)
        write(topic, properties)

    monkeypatch.setattr(memory.admin, "set_properties", interrupted)
    told = later(memory.admin)
    assert not waiting
    assert told == topics.find(memory.admin, WANTED.topic)
    assert told == topics.find(one_by_one.admin, WANTED.topic)


def _made(change: str, memory: MemoryPulsar) -> bool:
    """Make a change; False if it was refused."""
    try:
        CHANGES[change](memory.admin)
    except (LevelTopicError, StrategyMismatchError):
        return False
    return True


@pytest.mark.parametrize(
    ("change", "meanwhile"), [("target", "expansion"), ("expansion", "target")]
)
@pytest.mark.parametrize("name", ["partitioned_metadata", "create_subscription", "set_properties"])
def test_a_target_and_an_expansion_at_once_are_made_or_refused(
    change: str, meanwhile: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is made at each call of the other. Nothing that was made is lost at the end."""
    both = two_targets()
    assert _made(change, both)
    assert _made(meanwhile, both)

    def at_call(made_at: int) -> bool:
        """Make the other change at a call; False if there are not as many calls."""
        memory, calls, made = two_targets(), itertools.count(1), {}
        call = getattr(memory.admin, name)

        def interrupted(*values: Any, **named: Any) -> Any:
            if next(calls) == made_at:
                made[meanwhile] = _made(meanwhile, memory)
            return call(*values, **named)

        with monkeypatch.context() as patch:
            patch.setattr(memory.admin, name, interrupted)
            made[change] = _made(change, memory)
        if meanwhile not in made:
            return False
        found = topics.describe(memory.admin, WANTED.topic)
        assert made["target"] == (len(found.targets) == 3)
        assert made["expansion"] == (found.levels == LONGER)
        assert any(made.values())
        for each, done in made.items():
            assert done or _made(each, memory)
        assert topics.find(memory.admin, WANTED.topic) == topics.find(both.admin, WANTED.topic)
        return True

    places = 0
    while at_call(places + 1):
        places += 1
    assert places


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
        lambda: change_settings(memory.admin, WANTED.topic, on_missing_target=MissingTarget.DROP),
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
