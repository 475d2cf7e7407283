"""Nothing that a producer was told is stored is lost with a level topic, on both Pulsars."""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel import topics
from delaylevel.errors import LevelTopicError, StillPendingError
from delaylevel.model.level_topic import LevelTopicDescription
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


@pytest.mark.parametrize("moment", ["entering", "counted", "deleting"])
def test_what_is_stored_is_counted_or_refused(
    world: World, description: LevelTopicDescription, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Producers come and go at each step of a deletion."""
    told: list[str] = []

    def before(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def called(*arguments: Any, **options: Any) -> Any:
            result = real(*arguments, **options) if moment == "counted" else None
            if not told:
                told.append(send(world, description))
            return result if moment == "counted" else real(*arguments, **options)

        monkeypatch.setattr(owner, name, called)

    if moment == "entering":
        before(lifecycle, "closed_to_producers")
    elif moment == "counted":
        before(lifecycle, "pending_entries")
    else:
        before(world.admin, "delete")
    client = world.client()
    if moment == "entering":
        with pytest.raises(StillPendingError, match="1 parked"):
            lifecycle.delete(client, world.admin, description)
        assert told == [""]
    else:
        assert lifecycle.delete(client, world.admin, description).total == 0
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
    assert lifecycle.delete(client, world.admin, description, discard=3).parked == 3
