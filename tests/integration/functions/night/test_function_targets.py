"""Tests of a failing target: only its messages are held, and acknowledgements have few gaps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.http import Rest
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import LevelTopicDescription, Mover
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from support.world import RealWorld

LEVELS = Levels(
    [PartitionStrategy(partition_by=timedelta(seconds=3), maximum_delay=timedelta(seconds=30))]
)
MESSAGES = 1500
MOST_RANGES = 100


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_failing_target_does_not_stop_other_targets(
    when: str,
    world: RealWorld,
    deployed: Callable[..., Any],
    collector: Callable[[str], Any],
    connection: Connection,
    parked: Callable[..., dict[str, str]],
    ranges: Callable[[LevelTopicDescription], int],
) -> None:
    description = world.level_topic(
        LEVELS, targets=("bad", "good"), mover=Mover.FUNCTION, hold_pause_ms=4000
    )
    bad, good = description.targets
    # A connected producer would recreate the deleted topic.
    Rest(connection.admin_url).post(
        f"namespaces/{world.namespace}/autoTopicCreation", {"allowAutoTopicCreation": False}
    )
    deployed(description)
    good_got = collector(good)
    connected = world.client()
    producers = [
        connected.create_producer(
            target,
            enable_delay_level_topic=True,
            delay_level_topic=description.topic,
            partition_strategy=LEVELS,
            block_if_queue_full=True,
        )
        for target in (bad, good)
    ]
    if when == "before":
        world.admin.delete(TopicName.parse(bad), force=True)
    most = 0
    watching = threading.Event()

    def watch() -> None:
        nonlocal most
        while not watching.wait(0.1):
            most = max(most, ranges(description))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        outcomes: dict[Any, Any] = {}
        for number in range(MESSAGES):
            for producer in producers:
                producer.send_async(
                    b"%d" % number,
                    outcomes.setdefault,
                    # due within a few seconds, alternating between the targets
                    deliver_after=timedelta(milliseconds=4000 + 2 * number),
                )
        for producer in producers:
            producer.flush()
            producer.close()
        assert list(outcomes) == [pulsar.Result.Ok]
        if when == "meanwhile":
            world.eventually(lambda: len(good_got.ids) > 200, "the first arrivals")
            world.admin.delete(TopicName.parse(bad), force=True)
        world.eventually(lambda: len(good_got.ids) == MESSAGES, "all messages of the other target")
        # At least one message comes after its target was deleted, however slow this test is.
        level = world.plain_client.create_producer(description.level_topic(0).partition(0).full)
        level.send(b"last", properties=parked(SystemClock().now_ms(), "bad"))
        world.eventually(lambda: world.stored(description.held_topic.full), "held messages")

        Rest(connection.admin_url).put(TopicName.parse(bad).rest_path)
        bad_got = collector(bad)
        arrived_before = {
            item.value
            for item in world.stored(description.held_topic.full)
            if item.properties["delaylevel.target"] == bad
        }
        world.eventually(lambda: arrived_before <= set(bad_got.ids), "the held messages")
        world.drained(description)
    finally:
        watching.set()
        watcher.join()
    bad_got.check_identities()
    good_got.check_identities()
    if when == "before":
        # Each message is retried after its own pause.
        everything = {b"last", *(b"%d" % number for number in range(MESSAGES))}
        assert set(bad_got.ids) == everything
    assert most < MOST_RANGES
    # The deletion of one topic makes no copies for the other. Only a send that got no answer for
    # seconds may be repeated; such a message is held.
    unsure = sum(
        item.properties["delaylevel.target"] == good
        for item in world.stored(description.held_topic.full)
    )
    copies = len(world.stored(good)) - MESSAGES
    print(f"{when}: {copies} copies, {unsure} held, {most} ranges at most")
    assert copies <= unsure
    world.eventually(lambda: good_got.duplicates == copies, "every entry once")
