"""Tests of targets that are added while movers and dispatchers run: their messages arrive."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from delaylevel.dispatcher import Dispatcher, DispatchSettings
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from support.background import Moving, Serving
from support.new_targets import BRIEF, TOTAL, arrived, dead, send_to_new_targets
from support.world import RealWorld

pytestmark = pytest.mark.broker


HOURS = Levels([PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=4))])


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


def test_the_local_mover_delivers_to_targets_that_were_added_just_now(world: RealWorld) -> None:
    description = world.level_topic(BRIEF)
    with Moving(world.mover(description)):
        names = send_to_new_targets(world, description, timedelta(milliseconds=500))
        world.eventually(
            lambda: arrived(world, names) + len(dead(world, description)) >= TOTAL, "all messages"
        )
    assert dead(world, description) == []
    assert arrived(world, names) == TOTAL
