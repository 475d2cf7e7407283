"""Tests of targets that are added while movers and dispatchers run: their messages arrive."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from delaylevel.dispatcher import Dispatcher, DispatchSettings
from delaylevel.model import envelope as env
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.mover.local import LocalMover
from support.background import Moving, Serving
from support.new_targets import BRIEF, TOTAL, arrived, dead, send_to_new_targets
from support.world import RealWorld

pytestmark = pytest.mark.broker


HOURS = Levels([PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=4))])


class CountingAdmin:
    """An admin client that counts the reads of the properties of level topics."""

    def __init__(self, admin: Any) -> None:
        self._admin = admin
        self.reads = 0

    def __getattr__(self, name: str) -> Any:
        if name == "partitioned_metadata":
            self.reads += 1
        return getattr(self._admin, name)


@pytest.fixture
def serve(world: RealWorld, tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    """``serve(description, admin=None)``: start a dispatcher, stopped at the end."""
    with contextlib.ExitStack() as stack:

        def make(description: LevelTopicDescription, admin: Any = None) -> Serving:
            settings = DispatchSettings(directory=tmp_path / "spill", checkpoint_ms=200)
            dispatcher = Dispatcher(
                world.plain_client, admin or world.admin, [description.topic], settings
            )
            serving = stack.enter_context(Serving(dispatcher))
            wanted = list(range(description.window_partitions))
            world.eventually(lambda: serving.owned == wanted, "the takeover")
            return serving

        yield make


def test_a_dispatcher_delivers_to_targets_that_were_added_just_now(
    world: RealWorld, serve: Callable[..., Serving]
) -> None:
    description = world.level_topic(HOURS, final_window=FinalWindow.TRACKER)
    serve(description)
    names = send_to_new_targets(world, description, timedelta(milliseconds=300))
    world.eventually(
        lambda: arrived(world, names) + len(dead(world, description)) >= TOTAL, "all messages"
    )
    assert dead(world, description) == []
    assert arrived(world, names) == TOTAL


def test_unknown_targets_cause_few_reads_and_stop_no_other_message(
    world: RealWorld, serve: Callable[..., Serving]
) -> None:
    description = world.level_topic(HOURS, final_window=FinalWindow.TRACKER, window_partitions=1)
    target = description.targets[0]
    admin = CountingAdmin(world.admin)
    serving = serve(description, admin)
    get = world.arrivals(target)
    writer = world.plain_client.create_producer(
        description.window_topic.partition(0).full, block_if_queue_full=True
    )
    reads, begin_ms = admin.reads, SystemClock().now_ms()
    count = 3000
    for number in range(count):
        due = {env.DUE: str(SystemClock().now_ms() + 1500)}
        unknown = {**due, env.TARGET: f"{target}-unknown", env.ID: f"unknown-{number}"}
        writer.send_async(b"unknown", None, properties=unknown)
        if number % 30 == 0:
            known = {**due, env.TARGET: target, env.ID: f"known-{number}"}
            writer.send_async(b"known", None, properties=known)
    writer.flush()
    arrivals = get(100)
    assert {item.message.data() for item in arrivals} == {b"known"}
    world.eventually(lambda: len(dead(world, description)) >= count, "the dead letters")
    seconds = (SystemClock().now_ms() - begin_ms) / 1000
    letters = dead(world, description)
    assert len(letters) == count
    assert "is not one of level topic" in letters[0]
    assert admin.reads - reads <= 10 * seconds + 10  # two for each description
    assert serving.failure is None


def test_the_local_mover_delivers_to_targets_that_were_added_just_now(world: RealWorld) -> None:
    description = world.level_topic(BRIEF)
    with Moving(world.mover(description)):
        names = send_to_new_targets(world, description, timedelta(milliseconds=500))
        world.eventually(
            lambda: arrived(world, names) + len(dead(world, description)) >= TOTAL, "all messages"
        )
    assert dead(world, description) == []
    assert arrived(world, names) == TOTAL


def test_a_really_unknown_target_is_a_dead_letter_of_the_local_mover(world: RealWorld) -> None:
    description = world.level_topic(BRIEF)
    now_ms = SystemClock().now_ms()
    unknown = {env.DUE: str(now_ms), env.TARGET: world.topic("never")}
    for partition in range(description.levels[0].partitions):
        topic = description.name.partition(partition).full
        world.plain_client.create_producer(topic).send(b"unknown", properties=unknown)
    admin = CountingAdmin(world.admin)
    moving = LocalMover(world.plain_client, admin, description)  # type: ignore[arg-type]
    with moving:
        reads = admin.reads
        world.eventually(
            lambda: (moving.run_once().total and False) or len(dead(world, description)) == 3,
            "the dead letters",
        )
        assert not world.admin.topic_exists(TopicName.parse(world.topic("never")))
        assert admin.reads - reads <= 8
