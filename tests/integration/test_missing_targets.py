"""Tests of deleted business topics, and of the policies for their messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from click.testing import Result

from delaylevel import topics
from delaylevel.model.level_topic import LevelTopicDescription, MissingTarget
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.mover import dead_letters as deadletters
from support.world import RealWorld

MINUTES = Levels(PartitionStrategy(partition_by="MINUTE", maximum_delay=timedelta(minutes=4)))


@pytest.fixture
def half_gone(world: RealWorld, clock: Any) -> Callable[..., LevelTopicDescription]:
    """``half_gone(policy)``: five ready messages for each of two targets; the first is deleted."""

    def make(policy: MissingTarget) -> LevelTopicDescription:
        made = world.level_topic(
            MINUTES, ("gone", "there"), on_missing_target=policy, hold_pause_ms=3_600_000
        )
        client = world.client(clock)
        for target in made.targets:
            with client.create_producer(
                target, enable_delay_level_topic=True, delay_level_topic=made.topic
            ) as producer:
                for number in range(5):
                    producer.send(b"%d" % number, deliver_after=timedelta(minutes=2))
        world.admin.delete(TopicName.parse(made.targets[0]), force=True)
        clock.advance(130_000)
        return made

    return make


def bodies(found: list[Any]) -> list[bytes]:
    return sorted(item.value or b"" for item in found)


FIVE = [b"%d" % number for number in range(5)]


def test_dead_letters_are_replayed_when_their_target_returns(
    world: RealWorld, half_gone: Callable[..., LevelTopicDescription], clock: Any
) -> None:
    description = half_gone(MissingTarget.DEAD_LETTER)
    gone, there = description.targets
    report = world.mover(description, clock).run_once()
    assert (report.due, sum(report.dead.values()), report.held) == (5, 5, {})
    assert bodies(world.stored(there)) == FIVE
    world.drained(description)
    letters = list(deadletters.dead_letters(world.plain_client, world.admin, description))
    assert bodies([letter.message for letter in letters]) == FIVE
    assert {letter.reason for letter in letters} == {f"target {gone} does not exist"}
    assert not world.admin.topic_exists(TopicName.parse(gone))

    ids = sorted(letter.message.properties["delaylevel.id"] for letter in letters)
    world.plain_client.create_producer(gone).close()
    again = deadletters.replay(
        world.plain_client, world.admin, description, lambda _: True, clock=clock
    )
    assert again.forwarded.due == 5
    assert bodies(world.stored(gone)) == FIVE
    assert sorted(item.properties["delaylevel.id"] for item in world.stored(gone)) == ids


def test_a_changed_policy_applies_to_held_messages(
    world: RealWorld,
    invoke: Callable[..., Result],
    half_gone: Callable[..., LevelTopicDescription],
    clock: Any,
) -> None:
    description = half_gone(MissingTarget.HOLD)
    gone, there = description.targets
    moving = world.mover(description, clock)
    report = moving.run_once()
    assert (report.due, report.held[gone]) == (5, 5)
    assert bodies(world.stored(there)) == FIVE
    answer = invoke("levels", "set", there, "--on-missing-target", "dead-letter", "-o", "json")
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["on_missing_target"] == "dead-letter"
    # Another call to create does not reset the policy.
    assert topics.create(world.admin, description).on_missing_target is MissingTarget.DEAD_LETTER
    clock.advance(3_700_000)
    report = moving.run_once()
    assert (sum(report.dead.values()), report.held) == (5, {})
    world.drained(description)
