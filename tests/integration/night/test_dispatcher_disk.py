"""Tests of the dispatcher on a real broker while its spill disk is full or broken."""

from __future__ import annotations

import functools
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from delaylevel.dispatcher import Dispatcher, DispatchSettings, pending
from delaylevel.model import envelope as env
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow, LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from delaylevel.structures.segments.file import append_to
from delaylevel.structures.segments.pending import PendingSegments
from support.background import Serving
from support.world import MakeLevelTopic, RealWorld

pytestmark = pytest.mark.broker

LEVELS = Levels(
    [PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=4))]
)
MESSAGES = 12_000


@pytest.fixture
def description(level_topic: MakeLevelTopic) -> LevelTopicDescription:
    return level_topic(LEVELS, final_window=FinalWindow.TRACKER, window_partitions=1)


@pytest.fixture
def serve(
    description: LevelTopicDescription,
    world: RealWorld,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[Callable[[Path], Any]], Serving]]:
    """``serve(opener)``: start a dispatcher with 1 MiB of memory, stopped at the end."""
    started: list[Serving] = []

    def make(opener: Callable[[Path], Any]) -> Serving:
        monkeypatch.setattr(
            pending, "PendingSegments", functools.partial(PendingSegments, opener=opener)
        )
        settings = DispatchSettings(tmp_path, checkpoint_ms=200, memory_bytes=1 << 20)
        dispatcher = Dispatcher(world.plain_client, world.admin, [description.topic], settings)
        started.append(Serving(dispatcher))
        return started[-1]

    yield make
    for each in started:
        each.stop()


def fill(world: RealWorld, description: LevelTopicDescription, begin_ms: int) -> None:
    """Write messages of 1 KB to the window, due within 6 s, the last ones first."""
    writer = world.plain_client.create_producer(
        description.window_topic.partition(0).full, block_if_queue_full=True
    )
    for number in range(MESSAGES):
        properties = {
            env.DUE: str(begin_ms + (MESSAGES - number) // 2),
            env.TARGET: description.targets[0],
            env.ID: str(number),
        }
        writer.send_async(bytes(1000), None, properties=properties)
    writer.flush()
    writer.close()


def assert_all_released(
    world: RealWorld, description: LevelTopicDescription, *, once: bool = True
) -> None:
    def backlog() -> int:
        return sum(
            stats.subscriptions[SUBSCRIPTION].backlog_entries
            for stats in world.admin.partitioned_stats(description.window_topic).values()
        )

    world.eventually(lambda: backlog() == 0, "the acknowledgement of all", 90)
    stored = Counter(m.properties[env.ID] for m in world.stored(description.targets[0]))
    assert stored.keys() == {str(number) for number in range(MESSAGES)}
    if once:
        assert stored.total() == MESSAGES


def test_the_dispatcher_starts_again_when_its_files_are_gone(
    description: LevelTopicDescription,
    serve: Callable[[Callable[[Path], Any]], Serving],
    world: RealWorld,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Delete all spill files, which other users cannot read, while they are in use."""
    fill(world, description, SystemClock().now_ms() + 6_000)
    serving = serve(append_to)
    world.eventually(
        lambda: sum(each.disk_bytes for each in serving.dispatcher.stats().values()) > 8_000_000,
        "the spill files",
        60,
    )
    (folder,) = tmp_path.glob("dispatcher-*")
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
    assert modes == {path: 0o700 if path.is_dir() else 0o600 for path in modes}
    assert 0o600 in modes.values()
    shutil.rmtree(folder)
    assert_all_released(world, description, once=False)
    assert "was changed by another program" in caplog.text
    assert "Traceback" not in caplog.text
