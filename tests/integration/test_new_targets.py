"""Tests of targets that are added while movers and dispatchers run: their messages arrive."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from delaylevel import topics
from delaylevel.dispatcher import Dispatcher, DispatchSettings
from delaylevel.model import envelope as env
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from support.background import Moving, Serving
from support.world import RealWorld

BRIEF = Levels(
    PartitionStrategy(
        partition_by=timedelta(milliseconds=200), maximum_delay=timedelta(milliseconds=800)
    )
)
TARGETS, MESSAGES = 10, 7
TOTAL = TARGETS * MESSAGES


def send_to_new_targets(
    world: RealWorld, description: LevelTopicDescription, delay: timedelta
) -> list[str]:
    """Add targets one by one, and send messages to each at once; return the targets."""
    names = [world.topic(f"added-{number}") for number in range(TARGETS)]
    client = world.client()
    for name in names:
        world.plain_client.create_producer(name).close()
    for name in names:
        topics.create(world.admin, replace(description, targets=(*description.targets, name)))
        producer = client.create_producer(
            name, enable_delay_level_topic=True, delay_level_topic=description.topic
        )
        for number in range(MESSAGES):
            producer.send_async(b"%d" % number, None, deliver_after=delay)
        producer.flush()
    return names


def arrived(world: RealWorld, names: list[str]) -> int:
    return sum(len(world.stored(name)) for name in names)


def dead(world: RealWorld, description: LevelTopicDescription) -> list[str]:
    letters = world.stored(description.dead_letter_topic.partition(0).full)
    return [message.properties[env.REASON] for message in letters]


pytestmark = pytest.mark.broker


HOURS = Levels([PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=4))])


@contextlib.contextmanager
def dispatcher(world: RealWorld, directory: Path) -> Iterator[LevelTopicDescription]:
    description = world.level_topic(HOURS, final_window=FinalWindow.TRACKER)
    settings = DispatchSettings(directory=directory / "spill", checkpoint_ms=200)
    made = Dispatcher(world.plain_client, world.admin, [description.topic], settings)
    with Serving(made) as serving:
        wanted = list(range(description.window_partitions))
        world.eventually(lambda: serving.owned == wanted, "the takeover")
        yield description


@contextlib.contextmanager
def mover(world: RealWorld, _: Path) -> Iterator[LevelTopicDescription]:
    description = world.level_topic(BRIEF)
    with Moving(world.mover(description)):
        yield description


@pytest.mark.parametrize(
    "host", [dispatcher, mover, pytest.param("spark", marks=pytest.mark.spark)]
)
def test_targets_that_were_added_just_now_get_their_messages(
    world: RealWorld, request: pytest.FixtureRequest, tmp_path: Path, host: Any
) -> None:
    """A host that reads the description too rarely takes their messages for dead."""
    with contextlib.ExitStack() as stack:
        if host == "spark":
            description = world.level_topic(BRIEF)
            stack.enter_context(request.getfixturevalue("spark_job")(description)).ready()
        else:
            description = stack.enter_context(host(world, tmp_path))
        names = send_to_new_targets(world, description, timedelta(milliseconds=500))
        world.eventually(
            lambda: arrived(world, names) + len(dead(world, description)) >= TOTAL, "all messages"
        )
        assert dead(world, description) == []
        assert arrived(world, names) == TOTAL
