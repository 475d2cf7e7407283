"""Tests of dead letters on a real broker: list, show, replay and discard."""

from __future__ import annotations

import base64
import contextlib
import json
import random
from collections.abc import Callable
from typing import Any

from click.testing import CliRunner

from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cli.main import cli
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.own_producers import DeadLetterTopic
from delaylevel.model.message import ParkedMessage
from delaylevel.mover import dead_letters as deadletters
from delaylevel.topics import lifecycle
from support.dead_letters import MINUTES
from support.world import RealWorld


def command(connection: Connection, *arguments: str) -> Any:
    """Run a command of the program, and return its JSON output."""
    address = ["--admin-url", connection.admin_url, "--service-url", connection.service_url]
    result = CliRunner().invoke(cli, [*address, *arguments, "-o", "json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_largest_letters_are_stored_in_chunks_shown_discarded_and_replayed(
    private_broker: Callable[..., EmbeddedBroker],
    started: Callable[[EmbeddedBroker], EmbeddedBroker],
) -> None:
    body = random.Random(7).randbytes(5 * 1024 * 1024 - 10)
    broker = private_broker()
    with contextlib.ExitStack() as stack:
        world = RealWorld(broker.connection, stack, "public/default")
        made = world.level_topic(MINUTES)
        target = made.targets[0]
        # The due time is over, so that a replay publishes to the target itself.
        properties = {"delaylevel.due": "1000", "delaylevel.target": target, "mine": "x" * 9000}
        letters = DeadLetterTopic(world.plain_client, deadletters.source_of(made).topic)
        for name in ("first", "second"):
            own = {**properties, "delaylevel.id": name, "delaylevel.reason": "too large"}
            message = ParkedMessage(7, 1, -1, 0, "k", "o", 5, properties, body)
            letters.store([(message, own, None), (message._replace(value=b"small"), own, None)])
        letters.close()
        assert lifecycle.pending_entries(world.admin, made).dead_letters == 2 * (1 + 6)

        listed = command(broker.connection, "dlq", "list", target)
        assert [row["size"] for row in listed] == [5, len(body)] * 2
        shown = command(broker.connection, "dlq", "show", target, listed[3]["id"])
        assert base64.b64decode(shown["value"]) == body
        assert shown["properties"]["delaylevel.id"] == "second"
        assert (shown["key"], shown["event_ms"], shown["reason"]) == ("k", 5, "too large")
        ids = [listed[2]["id"], listed[3]["id"]]
        command(broker.connection, "dlq", "discard", target, *ids, "--count", "2")
        world.eventually(
            lambda: lifecycle.pending_entries(world.admin, made).dead_letters == 1 + 6,
            "the acknowledgement of the discarded chunks",
        )
    broker.stop()

    size = 6 * 1024 * 1024
    larger = {"maxMessageSize": size, "nettyMaxFrameSizeBytes": size + 100 * 1024}
    again = EmbeddedBroker(
        "test", directory=broker.directory, conf=larger, heap_mb=256, follow_parent=True
    )
    try:
        started(again)
        answer = command(again.connection, "dlq", "replay", target, "--all")
        assert [row["outcome"] for row in answer] == ["delivered"] * 2
        with contextlib.ExitStack() as stack:
            world = RealWorld(again.connection, stack, "public/default")
            small, large = sorted(world.stored(target), key=lambda item: item.size)
            assert (small.value, large.value) == (b"small", body)
            assert (large.key, large.ordering_key, large.event_ms) == ("k", "o", 5)
            assert large.properties == {
                "delaylevel.due": "1000",
                "delaylevel.id": "first",
                "delaylevel.target": target,
                "mine": "x" * 9000,
            }
            assert list(deadletters.dead_letters(world.plain_client, world.admin, made)) == []
            world.eventually(
                lambda: not lifecycle.pending_entries(world.admin, made).dead_letters,
                "the acknowledgement of all chunks",
            )
    finally:
        again.stop()
