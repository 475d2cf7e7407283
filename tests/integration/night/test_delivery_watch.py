"""Tests of the warning that a level topic has no mover or no dispatcher, on a real broker."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from delaylevel import PartitionBy, PartitionStrategy, topics
from delaylevel.dispatcher import Dispatcher, DispatchSettings
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow
from delaylevel.model.strategy import Levels
from delaylevel.model.topic_name import TopicName
from delaylevel.producer import setup
from delaylevel.producer.setup import DeliveryWatches, missing_hosts
from delaylevel.topics import hosts
from delaylevel.topics.status import read_stats
from support.background import Serving
from support.world import MakeClient, MakeLevelTopic, RealWorld

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
    monkeypatch.setattr(setup, "CONFIRM_AFTER_S", 0.0)
    monkeypatch.setattr("delaylevel.producer.setup.WATCHES", DeliveryWatches(first_check_s=0.0))
    client = dl_client()
    orders = world.topic("orders")

    def create() -> Any:
        return client.create_producer(
            orders, enable_delay_level_topic=True, partition_strategy=HOURS
        )

    def lines() -> list[str]:
        name = setup.__name__
        return [item.getMessage() for item in caplog.records if item.name == name]

    with caplog.at_level(logging.WARNING), create(), create():
        world.eventually(lambda: len(lines()) == 2, "both warnings")
        level_topic = topics.describe(world.admin, orders).topic
    text = " ".join(lines())
    assert f"no mover is running for {orders}" in text
    assert "`delaylevel run " in text
    assert f"`delaylevel dispatcher run {level_topic}`" in text
    assert all(item.threadName != threading.main_thread().name for item in caplog.records)


def test_commands_say_that_nothing_is_delivered(
    world: RealWorld, level_topic: MakeLevelTopic, invoke: Callable[..., Result], tmp_path: Path
) -> None:
    description = level_topic(Levels(HOURS), final_window=FinalWindow.TRACKER)
    orders = TopicName.parse(description.targets[0]).short
    run = f"`delaylevel run {orders}`"
    neither = f"no mover and no dispatcher is running for {orders}: {run}"
    assert neither in invoke("send", orders, "hi", "--after", "2h").stderr
    assert "running" not in invoke("send", orders, "hi").stderr  # at once: nobody is needed
    assert neither in invoke("horizon", orders).stderr
    assert neither in invoke("pending", orders).stderr
    assert neither in invoke("levels", "list", world.namespace).stdout
    described = json.loads(invoke("levels", "describe", orders, "-o", "json").stdout)
    assert described["problems"] == [neither]

    def problems() -> Any:
        return json.loads(invoke("levels", "describe", orders, "-o", "json").stdout)["problems"]

    settings = DispatchSettings(directory=tmp_path)
    dispatcher = Dispatcher(world.plain_client, world.admin, [description.topic], settings)
    with Serving(dispatcher):
        only = [f"no mover is running for {orders}: {run}"]
        world.eventually(lambda: problems() == only, "the dispatcher's consumers")
        world.mover(description)
        assert problems() == []
        assert "running" not in invoke("pending", orders).stderr
    lone = [f"no dispatcher is running for {orders}: {run}"]
    world.eventually(lambda: problems() == lone, "the end of the dispatcher")


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
        rows = read_stats(world.admin, description).partitions
        now_ms = world.clock.now_ms() + later_ms
        missing = hosts.missing_hosts(world.admin, description, rows, "orders", now_ms)
        return [item.line for item in missing if item.kind == "dispatcher"]

    world.eventually(lambda: not found(0), "the consumers")
    (line,) = found(description.levels[-1].near_due_ms + 3_600_000)
    assert line.startswith("the dispatcher of orders does not release messages: hanging")
    hanging.close()
