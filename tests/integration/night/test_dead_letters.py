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
from click.testing import CliRunner

from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cli.main import cli
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.reader import read_range
from delaylevel.model.clock import SystemClock
from delaylevel.model.position import EARLIEST, source_partitions
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.mover import dead_letters as deadletters
from delaylevel.mover.forwarder import Forwarder
from delaylevel.topics import lifecycle
from support.world import RealWorld

MINUTES = Levels(PartitionStrategy(partition_by="MINUTE", maximum_delay=timedelta(minutes=5)))


def command(connection: Connection, *arguments: str) -> Any:
    """Run a command of the program, and return its JSON output."""
    address = ["--admin-url", connection.admin_url, "--service-url", connection.service_url]
    result = CliRunner().invoke(cli, [*address, *arguments, "-o", "json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def send_largest(world: RealWorld, topic: str, properties: dict[str, str]) -> bytes:
    """Send the largest payload that the client accepts; no compression makes it smaller."""
    noise = random.Random(7).randbytes(5 * 1024 * 1024)
    with contextlib.closing(world.plain_client.create_producer(topic)) as raw:
        for spare in range(sum(map(len, [*properties, *properties.values()])), 20_000):
            with contextlib.suppress(pulsar.MessageTooBig):
                raw.send(noise[:-spare], properties, partition_key="k", ordering_key="o")
                return noise[:-spare]
    raise AssertionError("no size fits")


def test_the_largest_letters_are_stored_shown_discarded_and_replayed(
    private_broker: Callable[..., EmbeddedBroker],
    started: Callable[[EmbeddedBroker], EmbeddedBroker],
) -> None:
    broker = private_broker()
    with contextlib.ExitStack() as stack:
        world = RealWorld(broker.connection, stack, "public/default")
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

        listed = command(broker.connection, "dlq", "list", target)
        assert sorted(row["size"] for row in listed) == [5, 5, len(body), len(body)]
        large = [row["id"] for row in listed if row["size"] > 5]
        shown = command(broker.connection, "dlq", "show", target, large[1])
        assert base64.b64decode(shown["value"]) == body
        assert shown["properties"] == mine
        small = [row for row in listed if row["size"] == 5]
        assert all("is not one of level topic" in row["reason"] for row in small)
        command(
            broker.connection, "dlq", "discard", target, large[1], small[1]["id"], "--count", "2"
        )
        world.eventually(
            lambda: lifecycle.pending_entries(world.admin, made).dead_letters == 2,
            "the acknowledgement of the discarded letters",
        )
    broker.stop()

    size = 6 * 1024 * 1024
    larger = {"maxMessageSize": size, "nettyMaxFrameSizeBytes": size + 100 * 1024}
    again = EmbeddedBroker(
        "test", directory=broker.directory, conf=larger, heap_mb=256, follow_parent=True
    )
    try:
        started(again)
        answer = command(
            again.connection,
            *(
                "dlq",
                "replay",
                target,
                "--all",
                "--new-target",
                target,
                "--at",
                "2020-01-01T00:00Z",
            ),
        )
        assert [row["outcome"] for row in answer] == ["delivered"] * 2
        with contextlib.ExitStack() as stack:
            world = RealWorld(again.connection, stack, "public/default")
            found, large = sorted(world.stored(target), key=lambda item: item.size)
            assert (found.value, large.value) == (b"small", body)
            assert (large.key, large.ordering_key) == ("k", "o")
            own = [name for name in large.properties if name.startswith("delaylevel.")]
            assert sorted(own) == ["delaylevel.due", "delaylevel.id", "delaylevel.target"]
            assert large.properties["mine"] == "red"
            assert list(deadletters.dead_letters(world.plain_client, world.admin, made)) == []
            world.eventually(
                lambda: not lifecycle.pending_entries(world.admin, made).dead_letters,
                "the acknowledgement of the replayed letters",
            )
    finally:
        again.stop()
