"""Nothing that a producer was told is stored is lost with a level topic, on both Pulsars."""

from __future__ import annotations

import itertools
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel import topics
from delaylevel.errors import LevelTopicError, StillPendingError
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.topics import lifecycle
from support.world import World

LEVELS = Levels(PartitionStrategy(maximum_delay=timedelta(days=4)))
FAR = timedelta(days=2)


@pytest.fixture
def description(world: World) -> LevelTopicDescription:
    topic = world.topic("orders")
    return topics.create(
        world.admin, LevelTopicDescription(f"{topic}-delay-level", LEVELS, (topic,))
    )


def send(world: World, description: LevelTopicDescription) -> str:
    """Send a message by a short-lived producer; return the error, or nothing if it is stored."""
    partition = description.level_topic(0).partition(1).full
    try:
        with closing(world.client().create_producer(partition, send_timeout_millis=5000)) as made:
            made.send(b"x")
    except pulsar.PulsarException as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize("step", ["closed_to_producers", "pending_entries", "delete"])
def test_what_is_stored_is_counted_or_refused(
    world: World, description: LevelTopicDescription, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Producers come and go at each step of a deletion: before it, or after what it has counted."""
    told: list[str] = []
    owner: Any = world.admin if step == "delete" else lifecycle
    real = getattr(owner, step)

    def called(*arguments: Any, **options: Any) -> Any:
        counted = real(*arguments, **options) if step == "pending_entries" else None
        if not told:
            told.append(send(world, description))
        return real(*arguments, **options) if counted is None else counted

    monkeypatch.setattr(owner, step, called)
    if step == "closed_to_producers":
        with pytest.raises(StillPendingError, match="1 parked"):
            lifecycle.delete(world.client(), world.admin, description)
        assert told == [""]
    else:
        assert lifecycle.delete(world.client(), world.admin, description).total() == 0
        assert told[0], "it was refused"
        assert topics.find(world.admin, description.topic) is None


def test_a_refused_deletion_leaves_the_level_topic_as_it_was(
    world: World, description: LevelTopicDescription
) -> None:
    client = world.client()
    with client.create_producer(description.targets[0], enable_delay_level_topic=True) as producer:
        producer.send(b"1", deliver_after=FAR)
        with pytest.raises(LevelTopicError, match="in use"):
            lifecycle.delete(client, world.admin, description, discard=1)
        producer.send(b"2", deliver_after=FAR)
    with pytest.raises(StillPendingError, match="not 3"):
        lifecycle.delete(client, world.admin, description, discard=3)
    with client.create_producer(description.targets[0], enable_delay_level_topic=True) as producer:
        producer.send(b"3", deliver_after=FAR)
    assert lifecycle.delete(client, world.admin, description, discard=3)["parked"] == 3


@pytest.mark.parametrize("step", ["terminate", "delete"])
def test_an_interrupted_deletion_lets_nobody_in_and_is_finished_by_the_next(
    world: World, description: LevelTopicDescription, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    real, calls = getattr(world.admin, step), itertools.count()

    def called(*arguments: Any, **options: Any) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt
        real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(world.admin, step, called)
        with pytest.raises(KeyboardInterrupt):
            lifecycle.delete(world.client(), world.admin, description)
    topic, words = description.targets[0], "deletion was not finished: finish it with"
    with pytest.raises(LevelTopicError, match=words):
        topics.create(world.admin, description)
    with pytest.raises(LevelTopicError, match=words):
        world.client().create_producer(topic, enable_delay_level_topic=True)
    (listed,) = topics.list_level_topics(world.admin, description.name.namespace_path)
    assert words in str(listed.problem)
    found = topics.describe(world.admin, topic, unfinished=True)
    assert lifecycle.delete(world.client(), world.admin, found).total() == 0
    assert topics.create(world.admin, description) == description


@pytest.mark.parametrize("other", ["without a window", "without hours"])
def test_a_producer_sends_nothing_to_what_is_no_part_of_a_new_level_topic(
    world: World, other: str
) -> None:
    """The broker would create that partition again, and delete what is stored there."""
    topic = world.topic("orders")
    hours = PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(days=1))
    levels = Levels([*LEVELS.strategies, hours])
    known = topics.create(
        world.admin,
        LevelTopicDescription(f"{topic}-delay-level", levels, (topic,), window_partitions=1),
    )
    if other == "without hours":
        later, lost, delay = replace(known, levels=LEVELS), known.level_topic(1), 6
    else:
        later, lost = replace(known, final_window=FinalWindow.BROKER), known.window_topic
        delay = 0
    client = world.client()
    with client.create_producer(
        topic, enable_delay_level_topic=True, delay_level_topic=known.topic
    ) as producer:
        lifecycle.delete(client, world.admin, known)
        topics.create(world.admin, later)
        with pytest.raises(LevelTopicError, match=r"was replaced by another one .* not sent"):
            producer.send(b"lost", deliver_after=timedelta(hours=delay, minutes=30))
    assert not [index for index in range(24) if world.admin.topic_exists(lost.partition(index))]
