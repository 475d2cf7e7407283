"""Tests of the warning that a level topic has no mover or no dispatcher, on a real broker."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from delaylevel import PartitionBy, PartitionStrategy
from delaylevel.dispatcher import Dispatcher, DispatchSettings
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow
from delaylevel.model.strategy import Levels
from delaylevel.producer.setup import missing_hosts
from delaylevel.topics import hosts
from delaylevel.topics.status import status
from support.background import Serving
from support.world import MakeLevelTopic, RealWorld

HOURS = PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=3))


def test_movers_and_dispatchers_are_seen_by_their_consumers_and_traces(
    world: RealWorld, level_topic: MakeLevelTopic, tmp_path: Path
) -> None:
    description = level_topic(Levels(HOURS), final_window=FinalWindow.TRACKER)

    def missing() -> dict[str, str]:
        now_ms = world.clock.now_ms()
        return missing_hosts(world.admin, description, description.targets[0], now_ms)

    assert set(missing()) == {"mover", "dispatcher"}
    settings = DispatchSettings(directory=tmp_path)
    dispatcher = Dispatcher(world.plain_client, world.admin, [description.topic], settings)
    with Serving(dispatcher):
        world.eventually(lambda: set(missing()) == {"mover"}, "the dispatcher's consumers")
        mover = world.mover(description)
        assert missing() == {}
        mover.close()
        # It moved nothing, but it was there: a job that runs at intervals.
        assert missing() == {}
    world.eventually(lambda: set(missing()) == {"dispatcher"}, "the end of the dispatcher")


def test_dispatcher_that_hangs_is_stale(world: RealWorld, level_topic: MakeLevelTopic) -> None:
    description = level_topic(Levels(HOURS), final_window=FinalWindow.TRACKER)
    orders = description.targets[0]
    with (
        world.client() as client,
        client.create_producer(orders, enable_delay_level_topic=True) as producer,
    ):
        producer.send(b"soon", deliver_after=timedelta(minutes=30))
    # A process that was suspended keeps its consumers for a while.
    hanging = world.plain_client.subscribe(
        description.window_topic.full, SUBSCRIPTION, consumer_name="hanging"
    )

    def found(later_ms: int) -> list[str]:
        rows = status(world.admin, description, 0).rows()
        now_ms = world.clock.now_ms() + later_ms
        missing = hosts.missing_hosts(world.admin, description, rows, "orders", now_ms)
        return [str(item) for item in missing if item.kind == "dispatcher"]

    world.eventually(lambda: not found(0), "the consumers")
    (line,) = found(description.levels[-1].near_due_ms + 3_600_000)
    assert line.startswith("the dispatcher of orders does not release messages: hanging")
    hanging.close()
