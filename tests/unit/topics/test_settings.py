"""Tests of the settings of a level topic, and of its outcomes topic."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from delaylevel import topics
from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import (
    InvalidInputError,
    LevelTopicError,
    NotFoundError,
    StrategyMismatchError,
    UpgradeRequiredError,
)
from delaylevel.model.level_topic import (
    DESCRIPTION_PROPERTY,
    Expired,
    LevelTopicDescription,
    MissingTarget,
    Role,
)
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
Change = Callable[[TopicAdmin], LevelTopicDescription]


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


def setting(**values: Any) -> Change:
    return lambda admin: change_settings(admin, WANTED.topic, **values)


CHANGES: dict[str, Change] = {
    "drop": setting(on_missing_target=MissingTarget.DROP),
    "dead letter": setting(on_missing_target=MissingTarget.DEAD_LETTER),
    "expiry": setting(expire_after_ms=7),
    "expiry and treatment": setting(expire_after_ms=9, expired=Expired.DEAD_LETTER),
    "amount": setting(attribute="amount"),
    "weight": setting(attribute="weight"),
    "pause": lambda admin: pause(admin, WANTED.topic, "orders", CLOCK),
    "pause of all": lambda admin: pause(admin, WANTED.topic, None, CLOCK),
    "resume": lambda admin: resume(admin, WANTED.topic, "old", CLOCK, 500),
    "resume slowly": lambda admin: resume(admin, WANTED.topic, "old", CLOCK, 700),
    "target": lambda admin: topics.create(admin, describe(targets=("orders", "more"))),
    "expansion": lambda admin: expand(admin, WANTED.topic, LONGER),
}


class Changing:
    """A Pulsar with a level topic of two targets, one of them paused, and what was done to it."""

    def __init__(self, *changes: str) -> None:
        self.memory, self.refused = MemoryPulsar(), list[str]()
        topics.create(self.memory.admin, describe(targets=("orders", "old")))
        pause(self.memory.admin, WANTED.topic, "old", CLOCK)
        for name in changes:
            self.make(name)

    def make(self, name: str) -> None:
        try:
            self.told = CHANGES[name](self.memory.admin)
        except (LevelTopicError, StrategyMismatchError, InvalidInputError):
            self.refused.append(name)
            self.told = None

    @property
    def found(self) -> LevelTopicDescription | None:
        return topics.find(self.memory.admin, WANTED.topic)

    def make_both(self, change: str, meanwhile: str, call: str, at: int) -> bool:
        """Make the second change before a call of the first; False if it has fewer calls."""
        real, count = getattr(self.memory.admin, call), itertools.count(1)

        def called(*values: Any, **named: Any) -> Any:
            if next(count) == at:
                self.make(meanwhile)
            return real(*values, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.memory.admin, call, called)
            self.make(change)
        return next(count) > at


@pytest.mark.parametrize("meanwhile", CHANGES)
@pytest.mark.parametrize("change", CHANGES)
def test_two_changes_at_once_are_made_one_after_the_other_or_refused(
    change: str, meanwhile: str
) -> None:
    """No change takes back another one: after a second try of a refused one, both are made."""
    if change == meanwhile:
        return
    orders = [Changing(change, meanwhile).found, Changing(meanwhile, change).found]
    calls = ["set_properties"]
    if {change, meanwhile} == {"target", "expansion"}:
        calls += ["partitioned_metadata", "create_subscription"]
    for call in calls:
        for at in itertools.count(1):
            both = Changing()
            if not both.make_both(change, meanwhile, call, at):
                assert at > 1, "it made no such call"
                break
            assert len(both.refused) < 2
            assert both.told in (None, both.found)
            for name in both.refused.copy():
                both.make(name)
            assert both.found in orders


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
