"""Tests of dead letters on a real broker: list, show, replay and discard."""

from __future__ import annotations

import base64
import contextlib
import json
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pulsar
from click.testing import Result

from delaylevel.cluster.reader import read_range
from delaylevel.model.clock import SystemClock
from delaylevel.model.position import EARLIEST, source_partitions
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.mover.forwarder import Forwarder
from delaylevel.topics import lifecycle
from support.world import RealWorld

MINUTES = Levels(PartitionStrategy(partition_by="MINUTE", maximum_delay=timedelta(minutes=5)))


def send_largest(world: RealWorld, topic: str, properties: dict[str, str]) -> bytes:
    """Send the largest payload that the client accepts; no compression makes it smaller."""
    noise = random.Random(7).randbytes(5 * 1024 * 1024)
    with contextlib.closing(world.plain_client.create_producer(topic)) as raw:
        for spare in range(sum(map(len, [*properties, *properties.values()])), 20_000):
            with contextlib.suppress(pulsar.MessageTooBig):
                raw.send(noise[:-spare], properties, partition_key="k", ordering_key="o")
                return noise[:-spare]
    raise AssertionError("no size fits")


def test_the_largest_letters_are_stored_shown_and_discarded(
    world: RealWorld, invoke: Callable[..., Result]
) -> None:
    def dlq(*arguments: str) -> Any:
        result = invoke("dlq", *arguments, "-o", "json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    made = world.level_topic(MINUTES)
    target = made.targets[0]
    world.plain_client.subscribe(target, "kept").close()
    mine = {"mine": "red"}
    source = source_partitions(made)[0]
    # Without an ID, which the next hop adds, it just fits. It has no room for a reason.
    properties = {"delaylevel.due": "1000", "delaylevel.target": f"{target}-unknown", **mine}
    body = send_largest(world, source.topic, properties)
    with contextlib.closing(world.plain_client.create_producer(source.topic)) as raw:
        raw.send(b"small", properties)
    last = world.admin.last_message_id(source.name)
    assert last is not None
    with contextlib.closing(Forwarder(world.plain_client, world.admin, made)) as forwarder:
        for _ in range(2):
            found = read_range(world.plain_client, source.topic, EARLIEST, last.next_entry)
            forwarder.forward_all(source, found, SystemClock().now_ms)
            assert forwarder.flush().dead.total() == 2
    assert lifecycle.pending_entries(world.admin, made).dead_letters == 4

    listed = dlq("list", target)
    assert sorted(row["size"] for row in listed) == [5, 5, len(body), len(body)]
    large = [row["id"] for row in listed if row["size"] > 5]
    shown = dlq("show", target, large[1])
    assert base64.b64decode(shown["value"]) == body
    assert shown["properties"] == mine
    small = [row for row in listed if row["size"] == 5]
    assert all("is not one of level topic" in row["reason"] for row in small)
    dlq("discard", target, large[1], small[1]["id"], "--count", "2")
    world.eventually(
        lambda: lifecycle.pending_entries(world.admin, made).dead_letters == 2,
        "the acknowledgement of the discarded letters",
    )
