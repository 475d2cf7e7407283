"""Tests of expansion, draining and deletion on a real broker."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
from click.testing import Result

from delaylevel.errors import (
    AlreadyRunningError,
    DelayTooLongError,
    LevelTopicError,
    StillPendingError,
)
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.mover.drain import drain
from delaylevel.producer.client import DelayLevelClient
from delaylevel.topics import lifecycle
from delaylevel.topics.subscriptions import early_subscriptions
from support.background import Moving
from support.world import RealWorld

UNIT = timedelta(milliseconds=300)
BRIEF = Levels(PartitionStrategy(partition_by=UNIT, maximum_delay=4 * UNIT))
MINUTES = Levels(PartitionStrategy(partition_by="MINUTE", maximum_delay=timedelta(minutes=5)))


@pytest.fixture
def run(invoke: Callable[..., Result]) -> Callable[..., Result]:
    return functools.partial(invoke, "levels")


def park(client: DelayLevelClient, description: LevelTopicDescription, **delays: timedelta) -> None:
    """Park messages for the first target: ``a=timedelta(minutes=2)`` has the body ``a``."""
    with client.create_producer(
        description.targets[0],
        enable_delay_level_topic=True,
        delay_level_topic=description.topic,
    ) as producer:
        for body, delay in delays.items():
            producer.send(body.encode(), deliver_after=delay)


# -- expanding


def test_an_expansion_of_a_level_topic_in_use_loses_nothing(
    world: RealWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delaylevel.topics.roster.LIFETIME_S", 0.05)
    description = world.level_topic(BRIEF)
    get = world.arrivals(description.targets[0])
    moving = Moving(world.mover(description))
    producer = world.client().create_producer(
        description.targets[0], enable_delay_level_topic=True, partition_strategy=BRIEF.strategies
    )
    done = threading.Event()
    sent: list[bytes] = []

    def send() -> None:
        while not done.wait(0.005):
            body = f"m{len(sent)}".encode()
            producer.send(body, deliver_after=UNIT * (1 + len(sent) % 3))
            sent.append(body)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(DelayTooLongError):
            producer.send(b"too long", deliver_after=9 * UNIT)
        longer = lifecycle.longer_levels(BRIEF, 10 * UNIT)
        expanded = lifecycle.expand(world.admin, description.topic, longer)
        monkeypatch.setattr("delaylevel.producer.level_topic_cache._REFUSED_EVERY_S", 0)
        for number in range(4, 10):
            body = f"long{number}".encode()
            producer.send(body, deliver_after=UNIT * number)
            sent.append(body)
    finally:
        done.set()
        sender.join()
    assert producer.description == expanded
    assert expanded.former == (BRIEF,)
    assert expanded.levels[0].partitions == 9
    for stats in world.admin.partitioned_stats(expanded.name).values():
        assert stats.subscriptions[SUBSCRIPTION].durable
    found = get(len(sent), seconds=60)
    moving.stop()
    assert sorted(item.message.data() for item in found) == sorted(sent)
    assert len({item.message.properties()["delaylevel.id"] for item in found}) == len(sent)
    producer.close()


# -- draining and deleting


def test_drained_messages_keep_their_due_times(world: RealWorld) -> None:
    description = world.level_topic(BRIEF)
    target = description.targets[0]
    get = world.arrivals(target)
    park(world.client(), description, soon=2 * UNIT, later=3.9 * UNIT)
    dues = {
        item.value: item.properties["delaylevel.due"] for item in world.stored(description.topic)
    }
    with world.mover(description), pytest.raises(AlreadyRunningError):
        drain(world.plain_client, world.admin, description)
    report = drain(world.plain_client, world.admin, description)
    assert (report.handed_off, report.held.total()) == (2, 0)
    assert lifecycle.pending_entries(world.admin, description).total == 0
    found = get(2, seconds=60)
    assert [item.message.data() for item in found] == [b"soon", b"later"]
    assert {item.message.data(): item.message.properties()["delaylevel.due"] for item in found} == (
        dues
    )
    # Early by at most the broker's tick, because the broker delayed them.
    assert all(item.late_ms > -1100 for item in found)


def test_a_subscription_that_ignores_due_times_stops_a_drain(world: RealWorld) -> None:
    description = world.level_topic(MINUTES)
    consumer = world.plain_client.subscribe(description.targets[0], "one-by-one")
    park(world.client(), description, x=timedelta(minutes=3))
    assert early_subscriptions(world.admin, description) == [
        f"one-by-one of {description.targets[0]} (Exclusive)"
    ]
    with pytest.raises(LevelTopicError, match="one-by-one"):
        drain(world.plain_client, world.admin, description)
    assert lifecycle.pending_entries(world.admin, description).parked == 1
    assert drain(world.plain_client, world.admin, description, allow_early=True).handed_off == 1
    assert len(world.stored(description.targets[0])) == 1
    consumer.close()


def test_a_level_topic_is_deleted_only_when_nothing_is_pending(
    world: RealWorld, run: Callable[..., Result]
) -> None:
    description = world.level_topic(MINUTES)
    park(world.client(), description, x=timedelta(minutes=3), y=timedelta(minutes=4))
    with pytest.raises(StillPendingError, match="2 parked") as refused:
        lifecycle.delete(world.plain_client, world.admin, description)
    assert refused.value.entries == 2
    with pytest.raises(StillPendingError, match="not 3"):
        lifecycle.delete(world.plain_client, world.admin, description, discard=3)
    producer = world.client().create_producer(description.targets[0], enable_delay_level_topic=True)
    producer.send(b"z", deliver_after=timedelta(minutes=2))
    with pytest.raises(LevelTopicError, match=r"in use.*producer"):
        lifecycle.delete(world.plain_client, world.admin, description, discard=3)
    assert len(world.stored(description.topic)) == 3

    refusal = run("delete", description.targets[0])
    assert refusal.exit_code == 1
    producer.close()
    refusal = run("delete", description.targets[0])
    assert refusal.exit_code == 1
    assert "--discard 3" in refusal.stderr
    assert run("drain", description.targets[0]).exit_code == 0
    answer = run("delete", description.targets[0], "-o", "json")
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout) == {
        "topic": description.topic,
        "deleted": True,
        "discarded_entries": 0,
    }
    assert world.admin.list_partitioned_topics(world.namespace) == []
    assert sorted(item.value or b"" for item in world.stored(description.targets[0])) == [
        b"x",
        b"y",
        b"z",
    ]
