"""Tests of changes of a level topic: settings, expansion and deletion, in memory."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel import topics
from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import (
    BrokerError,
    BrokerUnreachableError,
    DelayTooLongError,
    InvalidInputError,
    InvalidStrategyError,
    LevelTopicError,
    NotFoundError,
    StillPendingError,
    StrategyMismatchError,
    UpgradeRequiredError,
)
from delaylevel.model.level_topic import (
    DESCRIPTION_PROPERTY,
    SUBSCRIPTION,
    Expired,
    LevelTopicDescription,
    MissingTarget,
    Role,
)
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
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
from support.seeds import seeds

DAY = timedelta(days=1)
WEEK = PartitionStrategy(partition_by=PartitionBy.DAY, maximum_delay=7 * DAY)
HOURS = PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=DAY)
WANTED = describe()
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


def test_a_deletion_takes_the_outcomes_and_waits_for_everything_else(memory: MemoryPulsar) -> None:
    client = memory.client()
    stored_in = WANTED.outcomes_topic, WANTED.window_topic, WANTED.dead_letter_topic
    producers = [client.create_producer(topic.partition(0).full) for topic in stored_in]
    for producer in producers:
        producer.send(b"stored")
        with pytest.raises(LevelTopicError, match=r"in use: .*producer .*-partition-0\)"):
            delete(client, memory.admin, WANTED)
        producer.close()
    consumer = client.subscribe(WANTED.held_topic.partition(0).full, SUBSCRIPTION)
    with pytest.raises(LevelTopicError, match=r"in use: .*consumer .*-held-partition-0\)"):
        delete(client, memory.admin, WANTED)
    consumer.close()
    with pytest.raises(StillPendingError, match=r"2 entries \(1 in the window, 1 dead letters\)"):
        delete(client, memory.admin, WANTED)
    assert status(memory.admin, WANTED, 0).tracked_entries(Role.OUTCOMES) == 1
    assert delete(client, memory.admin, WANTED, discard=2).total() == 2
    with pytest.raises(NotFoundError):
        memory.admin.partitioned_metadata(WANTED.outcomes_topic)


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
    "expansion": lambda admin: expand(admin, WANTED.topic, 60 * DAY),
    "longer one": lambda admin: expand(admin, WANTED.topic, 90 * DAY),
}
#: They take several writes.
LONG = {"target", "expansion", "longer one"}


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
        except (LevelTopicError, StrategyMismatchError, InvalidInputError, InvalidStrategyError):
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
    """No change takes back another one: if one is refused, both are made by a second try."""
    if change == meanwhile:
        return
    orders = [Changing(change, meanwhile).found, Changing(meanwhile, change).found]
    calls = ["set_properties"]
    if {change, meanwhile} <= LONG:
        calls += ["partitioned_metadata", "create_subscription"]
    for call in calls:
        for at in itertools.count(1):
            both = Changing()
            if not both.make_both(change, meanwhile, call, at):
                assert at > 1, "it made no such call"
                break
            assert len(both.refused) < 2
            assert both.told in (None, both.found)
            if both.refused:
                both.make(change)
                both.make(meanwhile)
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


@pytest.mark.parametrize("overflow", ["reject", "recirculate"])
@pytest.mark.parametrize("seed", seeds(1))
def test_an_expansion_at_any_time_loses_and_delays_nothing(seed: int, overflow: str) -> None:
    choose = random.Random(seed)
    levels = Levels([WEEK.model_copy(update={"overflow": overflow}), HOURS])
    with MemoryPulsar() as memory:
        old, new = (
            memory.client().create_producer(
                "orders", enable_delay_level_topic=True, partition_strategy=levels.strategies
            )
            for _ in range(2)
        )
        maximum, dues = 7, {}
        for step in range(40):
            if step == 15:
                longer = expand(memory.admin, "orders", 20 * DAY, {HOURS.unit: 2 * DAY}).levels
                maximum = 20
                # The new producer refreshes at once. The old one refreshes after its first refusal.
                new._cache.refresh(0)
                assert new.description.levels == longer
            producer = choose.choice((old, new))
            longest = 40 if overflow == "recirculate" else 7 if producer is old else maximum
            delay = timedelta(seconds=choose.randrange(longest * 86_400))
            producer.send(b"%d" % step, deliver_after=delay, message_id=f"m{step}")
            dues[f"m{step}"] = delay
            memory.advance(timedelta(minutes=choose.randrange(600)))
        memory.advance(60 * DAY)
        found = memory.delivered("orders")
        assert sorted(item.properties["delaylevel.id"] for item in found) == sorted(dues)
        for item in found:
            if "delaylevel.due" in item.properties:
                assert int(item.at.timestamp() * 1000) == int(item.properties["delaylevel.due"])


def test_impossible_expansions_are_refused() -> None:
    levels = Levels([WEEK, HOURS])
    longer = longer_levels(levels, 9 * DAY, {HOURS.unit: 2 * DAY})
    assert [item.partitions for item in longer] == [8, 47]
    for maximum, finer, words in (
        (6 * DAY, {}, "cannot be made shorter"),
        (7 * DAY, {}, "already has these levels"),
        (None, {DAY / 2: 2 * DAY}, "no level with a unit of 12h"),
        (4000 * DAY, {}, "more than the limit"),
        (9 * DAY, {DAY: 8 * DAY}, "cannot take up to 9d and 8d"),
    ):
        with pytest.raises(InvalidStrategyError, match=words):
            longer_levels(levels, maximum, finer)


@pytest.mark.parametrize("failure", [pulsar.Timeout("no answer"), BrokerUnreachableError("away")])
def test_a_deletion_that_fails_keeps_no_partition_closed(
    memory: MemoryPulsar, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = memory.client()
    real = client.create_producer

    def failing(topic: str, **options: Any) -> Any:
        if topic == WANTED.name.partition(1).full:
            raise failure
        return real(topic, **options)

    with monkeypatch.context() as patch:
        patch.setattr(client, "create_producer", failing)
        with pytest.raises(BrokerError):
            delete(client, memory.admin, WANTED)
    stats = memory.admin.partitioned_stats(WANTED.name).values()
    assert not any(each.publishers for each in stats)
    delete(client, memory.admin, WANTED)
    assert topics.find(memory.admin, WANTED.topic) is None


def test_an_interrupted_expansion_is_finished_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    levels, longer = Levels([WEEK]), longer_levels(Levels([WEEK]), 9 * DAY)
    memory = MemoryPulsar()
    client, options = memory.client(), {"enable_delay_level_topic": True}
    producer = client.create_producer("orders", partition_strategy=levels.strategies, **options)
    description = producer.description

    set_properties = memory.admin.set_properties

    def fail(topic: TopicName, properties: Any) -> None:
        if DESCRIPTION_PROPERTY in properties:
            raise KeyboardInterrupt
        set_properties(topic, properties)

    monkeypatch.setattr(memory.admin, "set_properties", fail)
    with pytest.raises(KeyboardInterrupt):
        expand(memory.admin, "orders", 9 * DAY)
    monkeypatch.undo()
    assert memory.admin.partitioned_metadata(description.name).partitions == 8
    # No application uses an incomplete expansion.
    assert topics.describe(memory.admin, "orders") == description
    with pytest.raises(DelayTooLongError):
        producer.send(b"x", deliver_after=8 * DAY)
    with pytest.raises(LevelTopicError, match="was not finished"):
        topics.create(memory.admin, description)
    with pytest.raises(LevelTopicError, match=r"was not finished.* up to 9d by DAY"):
        expand(memory.admin, "orders", 8 * DAY)
    assert expand(memory.admin, "orders", 9 * DAY).levels == longer
    # An application with the shorter maximum uses the longer one, and with another one none.
    assert topics.create(memory.admin, description).levels == longer
    other = client.create_producer("orders", partition_strategy=levels.strategies, **options)
    other.send(b"x", deliver_after=8.5 * DAY)
    eight = longer_levels(levels, 8 * DAY).strategies
    with pytest.raises(StrategyMismatchError):
        client.create_producer("orders", partition_strategy=eight, **options)
    # What is in a partition of an expansion counts.
    memory.admin.expand(description.name, 10)
    plain = client.create_producer(description.name.partition(9).full)
    plain.send(b"x")
    for each in (plain, other, producer):
        each.close()
    with pytest.raises(StillPendingError, match="2 parked"):
        delete(client, memory.admin, description)
    assert delete(client, memory.admin, description, discard=2)["parked"] == 2
