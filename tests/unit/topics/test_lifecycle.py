"""Tests of expansion, draining and deletion in memory, exact to the millisecond."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel import topics
from delaylevel.errors import (
    BrokerError,
    BrokerUnreachableError,
    DelayTooLongError,
    InvalidStrategyError,
    LevelTopicError,
    StillPendingError,
    StrategyMismatchError,
)
from delaylevel.model.level_topic import DESCRIPTION_PROPERTY
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.mover.drain import drain
from delaylevel.testing import MemoryPulsar
from delaylevel.topics import lifecycle
from support.fakes import describe
from support.seeds import seeds

DAY = timedelta(days=1)
WEEK = PartitionStrategy(partition_by=PartitionBy.DAY, maximum_delay=7 * DAY)
HOURS = PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=DAY)


@pytest.mark.parametrize("overflow", ["reject", "recirculate"])
@pytest.mark.parametrize("seed", seeds(1))
def test_an_expansion_at_any_time_loses_and_delays_nothing(seed: int, overflow: str) -> None:
    choose = random.Random(seed)
    first = PartitionStrategy(
        partition_by=PartitionBy.DAY,
        maximum_delay=7 * DAY,
        overflow="recirculate" if overflow == "recirculate" else "reject",
    )
    with MemoryPulsar() as memory:
        levels = Levels([first, HOURS])
        old, new = (
            memory.client().create_producer(
                "orders", enable_delay_level_topic=True, partition_strategy=levels.strategies
            )
            for _ in range(2)
        )
        maximum, dues = 7, {}
        for step in range(40):
            if step == 15:
                longer = lifecycle.longer_levels(levels, 20 * DAY, {HOURS.unit: 2 * DAY})
                lifecycle.expand(memory.admin, "orders", longer)
                maximum = 20
                # The new producer refreshes at once. The old one refreshes after its first refusal.
                new._cache._refresh_once()
                assert new.description.levels == longer
            producer = choose.choice((old, new))
            longest = 7 if producer is old else maximum
            if overflow == "recirculate":
                longest = 40
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


def test_a_level_topic_can_be_drained_and_deleted() -> None:
    with MemoryPulsar() as memory:
        client = memory.client()
        producer = client.create_producer(
            "orders",
            enable_delay_level_topic=True,
            partition_strategy=WEEK,
            final_window="broker",
        )
        for days in (2, 3, 6):
            producer.send(b"%d" % days, deliver_after=days * DAY)
        producer.close()
        description = topics.describe(memory.admin, "orders")
        assert drain(client, memory.admin, description, clock=memory.clock).handed_off == 3
        assert lifecycle.delete(memory.client(), memory.admin, description).total == 0
        assert memory.level_topics() == []
        memory.advance(7 * DAY)
        assert [item.data for item in memory.delivered("orders")] == [b"2", b"3", b"6"]
        for item in memory.delivered("orders"):
            assert int(item.at.timestamp() * 1000) == int(item.properties["delaylevel.due"])


def test_impossible_expansions_are_refused() -> None:
    levels = Levels([WEEK, HOURS])
    longer = lifecycle.longer_levels(levels, 9 * DAY, {HOURS.unit: 2 * DAY})
    assert [item.partitions for item in longer] == [8, 47]
    for maximum, finer, words in (
        (6 * DAY, {}, "cannot be made shorter"),
        (7 * DAY, {}, "already has these levels"),
        (None, {DAY / 2: 2 * DAY}, "no level with a unit of 12h"),
        (4000 * DAY, {}, "more than the limit"),
    ):
        with pytest.raises(InvalidStrategyError, match=words):
            lifecycle.longer_levels(levels, maximum, finer)


@pytest.mark.parametrize("failure", [pulsar.Timeout("no answer"), BrokerUnreachableError("away")])
def test_a_deletion_that_fails_keeps_no_partition_closed(failure: Exception) -> None:
    memory = MemoryPulsar()
    description = topics.create(memory.admin, describe())
    names = [
        member.topic.partition(index)
        for member in description.members()
        for index in range(member.partitions)
    ]
    client = memory.client()
    real = client.create_producer

    def failing(topic: str, **options: Any) -> Any:
        if topic == names[1].full:
            raise failure
        return real(topic, **options)

    client.create_producer = failing  # type: ignore[method-assign]
    with pytest.raises(BrokerError):
        lifecycle.delete(client, memory.admin, description)
    assert not [name for name in names if memory.admin.partition_stats(name).publishers]
    client.create_producer = real  # type: ignore[method-assign]
    lifecycle.delete(client, memory.admin, description)
    assert topics.find(memory.admin, description.topic) is None


def test_an_interrupted_expansion_is_finished_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    levels, longer = Levels([WEEK]), lifecycle.longer_levels(Levels([WEEK]), 9 * DAY)
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
        lifecycle.expand(memory.admin, "orders", longer)
    monkeypatch.undo()
    assert memory.admin.partitioned_metadata(description.name).partitions == 8
    # No application uses an incomplete expansion.
    assert topics.describe(memory.admin, "orders") == description
    with pytest.raises(DelayTooLongError):
        producer.send(b"x", deliver_after=8 * DAY)
    for again in (
        lambda: topics.create(memory.admin, description),
        lambda: lifecycle.expand(memory.admin, "orders", lifecycle.longer_levels(levels, 8 * DAY)),
    ):
        with pytest.raises(LevelTopicError, match="was not finished"):
            again()
    assert lifecycle.expand(memory.admin, "orders", longer).levels == longer
    # An application with the shorter maximum uses the longer one, and with another one none.
    assert topics.create(memory.admin, description).levels == longer
    other = client.create_producer("orders", partition_strategy=levels.strategies, **options)
    other.send(b"x", deliver_after=8.5 * DAY)
    eight = lifecycle.longer_levels(levels, 8 * DAY).strategies
    with pytest.raises(StrategyMismatchError):
        client.create_producer("orders", partition_strategy=eight, **options)
    # What is in a partition of an expansion counts.
    memory.admin.expand(description.name, 10)
    plain = client.create_producer(description.name.partition(9).full)
    plain.send(b"x")
    for each in (plain, other, producer):
        each.close()
    with pytest.raises(StillPendingError, match="2 parked"):
        lifecycle.delete(client, memory.admin, description)
    assert lifecycle.delete(client, memory.admin, description, discard=2).parked == 2
