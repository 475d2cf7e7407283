"""Tests of the warning that a level topic has no mover or no dispatcher, on a real broker."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from background import Serving
from delaylevel import PartitionBy, PartitionStrategy, topics
from delaylevel.dispatcher import Dispatcher, DispatchSettings
from delaylevel.model.level_topic import FinalWindow
from delaylevel.model.strategy import Levels
from delaylevel.producer import delivery_watch
from delaylevel.producer.delivery_watch import DeliveryWatches, missing_hosts
from world import MakeClient, MakeLevelTopic, RealWorld

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


def test_producer_warns_in_the_background(
    world: RealWorld,
    dl_client: MakeClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(delivery_watch, "CONFIRM_AFTER_S", 0.0)
    monkeypatch.setattr("delaylevel.producer.setup.WATCHES", DeliveryWatches(first_check_s=0.0))
    client = dl_client()
    orders = world.topic("orders")

    def create() -> Any:
        return client.create_producer(
            orders, enable_delay_level_topic=True, partition_strategy=HOURS
        )

    def lines() -> list[str]:
        name = delivery_watch.__name__
        return [item.getMessage() for item in caplog.records if item.name == name]

    with caplog.at_level(logging.WARNING), create(), create():
        world.eventually(lambda: len(lines()) == 2, "both warnings")
        level_topic = topics.describe(world.admin, orders).topic
    text = " ".join(lines())
    assert f"no mover is running for {orders}" in text
    assert f"`delaylevel mover run {level_topic}`" in text
    assert f"`delaylevel dispatcher run {level_topic}`" in text
    assert all(item.threadName != threading.main_thread().name for item in caplog.records)
