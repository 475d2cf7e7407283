"""Tests of messages that are too large for the next topic, on the fast and the slow path."""

from __future__ import annotations

from contextlib import closing, suppress
from datetime import timedelta

import pulsar
import pytest

from delaylevel.cluster.reader import read_range
from delaylevel.errors import BatchTooLargeError
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import FinalWindow
from delaylevel.model.position import EARLIEST, source_partitions
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.mover.dead_letters import dead_letters
from delaylevel.mover.forwarder import Forwarder
from support.world import RealWorld

LEVELS = Levels(
    [
        PartitionStrategy(maximum_delay=timedelta(days=3)),
        PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(days=1)),
    ]
)
HOUR_MS = 3_600_000
LIMIT = 5 * 1024 * 1024


def send_largest(raw: pulsar.Producer, properties: dict[str, str], kind: str) -> None:
    """Send the largest message that the client accepts, to 10 bytes."""
    for size in range(LIMIT, 0, -10):
        try:
            if kind == "payload":
                raw.send(b"x" * size, properties)
            else:
                raw.send(b"small", {**properties, "header": "h" * size})
        except pulsar.MessageTooBig:
            continue
        return


@pytest.mark.parametrize(
    ("kind", "hours", "final_window"),
    [
        *(
            (kind, hours, FinalWindow.BROKER)
            for kind, hours in (("payload", 6), ("properties", 6), ("batch", 6), ("batch", 0))
        ),
        *((kind, 0, FinalWindow.TRACKER) for kind in ("payload", "properties", "batch")),
    ],
)
def test_only_a_message_that_is_too_large_becomes_a_dead_letter(
    world: RealWorld, kind: str, hours: int, final_window: FinalWindow
) -> None:
    description = world.level_topic(LEVELS, ("orders",), final_window=final_window)
    source = source_partitions(description)[0]
    due_ms = SystemClock().now_ms() + hours * HOUR_MS
    properties = {"delaylevel.due": str(due_ms), "delaylevel.target": description.targets[0]}
    with closing(world.plain_client.create_producer(source.topic)) as raw:
        for number in range(40):
            own = {**properties, "n": str(number)}
            value = b"small"
            if kind == "batch":
                own["header"] = "h" * 200_000  # 40 of them are larger than one message may be
            elif number == 20:
                # Without an id, which the next hop adds, it just fits.
                send_largest(raw, own, kind)
                continue
            raw.send(value, own)
    last = world.admin.last_message_id(source.name)
    assert last is not None
    with closing(Forwarder(world.plain_client, world.admin, description)) as forwarder:
        for _ in range(2):
            found = read_range(world.plain_client, source.topic, EARLIEST, last.next_entry)
            with suppress(BatchTooLargeError):
                count = forwarder.forward_all(source, found, SystemClock().now_ms)
                report = forwarder.flush()
                break
    assert count == report.total == 40
    letters = list(dead_letters(world.plain_client, world.admin, description))
    names = [letter.message.properties["n"] for letter in letters]
    assert names == ([] if kind == "batch" else ["20"])
    assert all("too large" in letter.reason for letter in letters)
    if hours:
        fine = [each.topic for each in source_partitions(description) if each.level == 1]
        stored = [message for topic in fine for message in world.stored(topic)]
    elif final_window is FinalWindow.TRACKER:
        stored = world.stored(description.window_topic.full)
    else:
        stored = world.stored(description.targets[0])
    assert sorted(int(message.properties["n"]) for message in stored) == [
        number for number in range(40) if str(number) not in names
    ]
