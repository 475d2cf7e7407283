"""Tests of messages with fields that are not UTF-8, on a real broker.

A Java client sets the ordering key. The Java client cannot set such a key or property, but the C++
client can: here, the builder of the Python client's core, which is the C++ client.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import _pulsar
import pytest
from click.testing import Result

from delaylevel.inspection import Inspector
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.mover import dead_letters
from support.world import RealWorld

HOUR = 3_600_000
HOURS = Levels(PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(hours=4)))
SECONDS = Levels(
    PartitionStrategy(partition_by=timedelta(seconds=1), maximum_delay=timedelta(seconds=5))
)
BAD = b"\xff\xfeA"
ENCODED = base64.b64encode(BAD).decode()
ORDERING_KEY = "the ordering key is not UTF-8"
KEY = "the key is not UTF-8"
PROPERTIES = "the properties are not UTF-8"
READABLE = [b"first", b"second", b"third", b"last"]

Fill = Callable[[str, int, str], None]


@pytest.fixture
def fill(
    world: RealWorld, bytes_keys: Callable[..., None], parked: Callable[..., dict[str, str]]
) -> Fill:
    """``fill(topic, due_ms, target)``: four readable messages around three unreadable ones."""

    def publish(topic: str, due_ms: int, target: str) -> None:
        properties = parked(due_ms, target, mine="1")
        producer = world.plain_client.create_producer(topic, batching_enabled=False)

        def bad(value: bytes, **fields: Any) -> None:
            builder = _pulsar.MessageBuilder().content(value)
            for name, field in {"properties": properties, **fields}.items():
                getattr(builder, name)(field)
            producer._producer.send(builder.build())

        producer.send(b"first", properties=properties, partition_key="k")
        bytes_keys(topic, "ordering", BAD, b"ordering", properties=properties)
        producer.send(b"second", properties=properties, partition_key="k")
        bad(b"key", partition_key=BAD)
        producer.send(b"third", properties=properties, partition_key="k")
        bad(b"properties", partition_key="k", properties={**properties, "mine": BAD})
        producer.send(b"last", properties=properties, partition_key="k")
        producer.close()

    return publish


def check_dead_letters(
    world: RealWorld, description: LevelTopicDescription, topic: str, due_ms: int
) -> None:
    """Check that the three unreadable messages are in the dead-letter topic."""
    found = world.stored(description.dead_letter_topic.full)
    assert {letter.value for letter in found} == {b"ordering", b"key", b"properties"}
    letters = {letter.value: letter for letter in found}
    ordering, key, properties = (letters[name] for name in (b"ordering", b"key", b"properties"))
    for letter, reason in ((ordering, ORDERING_KEY), (key, KEY), (properties, PROPERTIES)):
        assert letter.properties["delaylevel.reason"] == reason
        source = letter.properties["delaylevel.source"]
        assert source.startswith(topic.removeprefix("persistent://") + ":")
    for letter in (ordering, key):
        assert letter.properties["delaylevel.due"] == str(due_ms)
        assert letter.properties["mine"] == "1"
    assert ordering.properties["delaylevel.raw.ordering_key"] == ENCODED
    assert (ordering.key, ordering.ordering_key) == ("", "\ufffd\ufffdA")
    assert key.properties["delaylevel.raw.key"] == ENCODED
    assert (key.key, key.ordering_key) == ("\ufffd\ufffdA", "")
    assert properties.key == "k"
    assert "mine" not in properties.properties
    printed = base64.b64decode(properties.properties["delaylevel.raw.properties"])
    assert b"'mine':'" + BAD + b"'" in printed
    assert b"'delaylevel.due':'" in printed


def test_a_mover_delivers_the_others_views_show_all_and_a_replay_refuses_them(
    world: RealWorld, fill: Fill, invoke: Callable[..., Result], clock: Any
) -> None:
    description = world.level_topic(HOURS)
    topic, due_ms = description.name.partition(1).full, clock.now_ms() + HOUR
    fill(topic, due_ms, "orders")
    look = Inspector(world.plain_client, world.admin, description.targets[0])
    rows = {row.value: row for row in look.rows(value=True)}
    assert rows.keys() == {*READABLE, b"ordering", b"key", b"properties"}
    assert rows[b"ordering"].ordering_key == rows[b"key"].key == "\ufffd\ufffdA"
    assert rows[b"ordering"].due_ms == rows[b"key"].due_ms == due_ms
    assert rows[b"properties"].due_ms is None
    assert rows[b"properties"].properties["delaylevel.unreadable"] == PROPERTIES
    listed = invoke("pending", "list", description.topic, "-o", "jsonl")
    assert listed.exit_code == 0, listed.output
    assert len(listed.stdout.splitlines()) == 7
    for exact in ([], ["--exact"]):
        assert invoke("horizon", description.topic, *exact).exit_code == 0

    clock.advance(5 * HOUR)
    mover = world.mover(description, clock)
    report = mover.run_once()
    assert report.dead == {ORDERING_KEY: 1, KEY: 1, PROPERTIES: 1}
    assert report.due == len(READABLE)
    assert mover.run_once().total == 0
    assert [message.value for message in world.stored(description.targets[0])] == READABLE
    world.drained(description)
    check_dead_letters(world, description, topic, due_ms)
    listed = invoke("dlq", "list", description.topic, "-o", "jsonl")
    lines = [json.loads(line) for line in listed.stdout.splitlines()]
    assert {line["reason"] for line in lines} == {ORDERING_KEY, KEY, PROPERTIES}
    assert lines[0]["reason"] in invoke("dlq", "show", description.topic, lines[0]["id"]).stdout
    answer = dead_letters.replay(world.plain_client, world.admin, description, lambda _: True)
    assert not any(one.done for one in answer)
    assert Counter(one.reason for one in answer) == report.dead
    check_dead_letters(world, description, topic, due_ms)


def test_a_key_given_as_bytes_arrives_as_its_base64_text(
    world: RealWorld,
    bytes_keys: Callable[..., None],
    parked: Callable[..., dict[str, str]],
    clock: Any,
) -> None:
    # The limit that README.md names: the client can neither read nor set the mark of such a key.
    description = world.level_topic(HOURS)
    topic, properties = description.name.partition(1).full, parked(clock.now_ms())
    bytes_keys(topic, "key", BAD, b"body", properties=properties)
    clock.advance(5 * HOUR)
    world.mover(description, clock).run_once()
    (message,) = world.stored(description.targets[0])
    assert (message.key, message.value) == (ENCODED, b"body")
