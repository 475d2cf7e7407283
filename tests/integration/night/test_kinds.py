"""Tests of unknown kinds and later formats on a real broker: dispatchers refuse them."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from delaylevel.dispatcher import Dispatcher, DispatchSettings
from delaylevel.dispatcher.status import DispatchReporter
from delaylevel.errors import UpgradeRequiredError
from delaylevel.model import envelope as env
from delaylevel.model.level_topic import (
    DESCRIPTION_PROPERTY,
    FinalWindow,
    LevelTopicDescription,
)
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.mover.dead_letters import dead_letters, replay
from delaylevel.topics import roster
from support.background import Serving
from support.world import MakeLevelTopic, RealWorld

pytestmark = pytest.mark.broker

LEVELS = Levels([PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(hours=3))])


@pytest.fixture
def description(level_topic: MakeLevelTopic) -> LevelTopicDescription:
    """A level topic with the final window "tracker"."""
    return level_topic(LEVELS, final_window=FinalWindow.TRACKER, window_partitions=1)


def dispatcher_for(
    world: RealWorld, description: LevelTopicDescription, directory: Path
) -> Dispatcher:
    settings = DispatchSettings(directory=directory, checkpoint_ms=200)
    return Dispatcher(world.plain_client, world.admin, [description.topic], settings)


@pytest.mark.parametrize("kind", ["teleport", "cancel"])
def test_a_dispatcher_never_delivers_a_record_of_an_unknown_kind(
    world: RealWorld,
    description: LevelTopicDescription,
    tmp_path: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A version that knows kinds, but not yet cancellations, is simulated.

    After an upgrade, a replay sends its dead letters on their way, and never delivers them either.
    """
    monkeypatch.setattr(env, "KINDS", frozenset())
    (target,) = description.targets
    window = description.window_topic.partition(0).full
    now_ms = world.clock.now_ms()
    producer = world.plain_client.create_producer(window)
    for name, due_ms in (("overdue", now_ms - 1000), ("soon", now_ms + 1000)):
        properties = {env.DUE: str(due_ms), env.TARGET: target, env.ID: name}
        producer.send(b"a record", properties={**properties, env.KIND: kind})
        producer.send(name.encode(), properties=properties)
    with Serving(dispatcher_for(world, description, tmp_path)):
        world.eventually(lambda: len(world.stored(target)) == 2, "both messages")
        stats = world.admin.partition_stats
        world.eventually(
            lambda: (
                not stats(description.window_topic.partition(0))
                .subscriptions["delaylevel"]
                .backlog_entries
            ),
            "the acknowledgement of everything",
        )
    assert [message.value for message in world.stored(target)] == [b"overdue", b"soon"]
    letters = list(dead_letters(world.plain_client, world.admin, description))
    assert {letter.message.properties[env.KIND] for letter in letters} == {kind}
    assert {letter.reason for letter in letters} == {
        f"delaylevel.kind is {kind!r}: this version does not know this kind of record"
    }
    assert len(letters) == 2
    if kind != "cancel":
        return
    monkeypatch.undo()
    report = replay(world.plain_client, world.admin, description, lambda _: True)
    assert (report.replayed, report.forwarded.window) == (2, 2)
    again = [message for message in world.stored(window) if env.REASON not in message.properties][
        -2:
    ]
    assert [message.properties for message in again] == [
        {**properties, env.ID: name, env.DUE: due, env.KIND: kind}
        for name, due in (("overdue", str(now_ms - 1000)), ("soon", str(now_ms + 1000)))
    ]


def test_a_dispatcher_gives_up_a_level_topic_that_is_described_in_a_later_format(
    world: RealWorld,
    description: LevelTopicDescription,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(roster, "LIFETIME_S", 0.2)
    monkeypatch.setattr("delaylevel.dispatcher.service.RESTING_S", 0.2)
    monkeypatch.setattr(roster, "_LOOK_S", 0.5)
    dispatcher = dispatcher_for(world, description, tmp_path / "first")
    with Serving(dispatcher) as serving:
        world.eventually(lambda: serving.owned == [0], "the window partition")
        stored = json.loads(description.to_json())
        later = {**stored, "version": 2}
        world.admin.set_properties(description.name, {DESCRIPTION_PROPERTY: json.dumps(later)})
        world.eventually(lambda: dispatcher.refused, "the refusal")
        assert "format 2" in dispatcher.refused[description.topic]
        # Another one could take over, because the partition is free.
        assert serving.owned == []
        assert dispatcher.groups() == ()
        (check,) = DispatchReporter(dispatcher).ready()
        assert (check.ok, "format 2" in check.text) == (False, True)
        (section,) = DispatchReporter(dispatcher).status()
        assert "format 2" in section.problems[0].problem
        with pytest.raises(UpgradeRequiredError, match="format 2"):
            dispatcher_for(world, description, tmp_path / "second")
        world.admin.set_properties(description.name, {DESCRIPTION_PROPERTY: description.to_json()})
        world.eventually(lambda: serving.owned == [0], "the window partition again")
        assert not dispatcher.refused
