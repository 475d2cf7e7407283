"""Helpers that the tests of new targets share."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from delaylevel import topics
from delaylevel.model import envelope as env
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
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
