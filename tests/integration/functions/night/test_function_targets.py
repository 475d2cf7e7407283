"""Tests of a failing target: only its messages are held, and acknowledgements have few gaps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.http import Rest
from delaylevel.model.clock import SystemClock
from delaylevel.model.envelope import ID, TARGET
from delaylevel.model.level_topic import SUBSCRIPTION, Mover
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from support.world import RealWorld

LEVELS = Levels(
    [PartitionStrategy(partition_by=timedelta(seconds=3), maximum_delay=timedelta(seconds=30))]
)
MESSAGES = 1500
MOST_RANGES = 100


def test_a_failing_target_does_not_stop_other_targets(
    world: RealWorld,
    deployed: Callable[..., Any],
    connection: Connection,
    parked: Callable[..., dict[str, str]],
) -> None:
    description = world.level_topic(
        LEVELS, targets=("bad", "good"), mover=Mover.FUNCTION, hold_pause_ms=4000
    )
    bad, good = description.targets
    rest = Rest(connection.admin_url)
    # A connected producer would recreate the deleted topic.
    world.set_policy("autoTopicCreation", {"allowAutoTopicCreation": False})
    deployed(description)
    options = {"enable_delay_level_topic": True, "delay_level_topic": description.topic}
    producers = [
        world.client().create_producer(target, block_if_queue_full=True, **options)
        for target in (bad, good)
    ]
    most = 0
    watching = threading.Event()

    def watch() -> None:
        """Look how many acknowledged ranges the broker keeps for a partition."""
        nonlocal most
        path = f"{description.name.rest_path}/partitioned-stats"
        while not watching.wait(0.1):
            for found in rest.get(path, perPartition="true")["partitions"].values():
                at = found["subscriptions"][SUBSCRIPTION]
                most = max(most, int(at["nonContiguousDeletedMessagesRanges"]))

    def ids(topic: str, target: str) -> dict[bytes | None, set[str]]:
        """Return the IDs of a target's messages in a topic, by body."""
        found: dict[bytes | None, set[str]] = {}
        for each in world.stored(topic):
            if each.properties[TARGET] == target:
                found.setdefault(each.value, set()).add(each.properties[ID])
        return found

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        # Due within a few seconds, alternating between the targets.
        for number in range(MESSAGES):
            delay = timedelta(milliseconds=4000 + 2 * number)
            for producer in producers:
                producer.send_async(b"%d" % number, None, deliver_after=delay)
        for producer in producers:
            producer.close()
        world.eventually(lambda: len(ids(good, good)) > 200, "the first messages")
        world.admin.delete(TopicName.parse(bad), force=True)
        world.eventually(lambda: len(ids(good, good)) == MESSAGES, "all of the other target")
        # At least one message comes after its target was deleted, however slow this test is.
        level = world.plain_client.create_producer(description.level_topic(0).partition(0).full)
        level.send(b"last", properties=parked(SystemClock().now_ms(), "bad"))
        held = description.held_topic.full
        world.eventually(lambda: b"last" in ids(held, bad), "held messages")
        rest.put(TopicName.parse(bad).rest_path)
        world.eventually(lambda: ids(held, bad).keys() <= ids(bad, bad).keys(), "the held ones")
        world.drained(description)
    finally:
        watching.set()
        watcher.join()
        rest.close()
    for target in (good, bad):
        assert {len(found) for found in ids(target, target).values()} == {1}, "copies share an ID"
    assert most < MOST_RANGES
    # The deletion of one topic makes no copies for the other. Only a send that got no answer for
    # seconds may be repeated; such a message is held.
    assert len(world.stored(good)) - MESSAGES <= len(ids(held, good))
