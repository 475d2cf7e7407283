"""Tests of messages with fields that are not UTF-8, on a real broker.

A Java client sets the ordering key. The Java client cannot set such a key or property, but the C++
client can: here, the builder of the Python client's core, which is the C++ client.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import _pulsar
import pulsar
import pytest
from click.testing import Result

from delaylevel import topics
from delaylevel.cluster.connection.settings import Connection
from delaylevel.dispatcher import Dispatcher, DispatchSettings
from delaylevel.doctor import State, examine
from delaylevel.functions.relay import Relay
from delaylevel.inspection import Inspector
from delaylevel.model.clock import SystemClock
from delaylevel.model.envelope import SchemaRef
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow, LevelTopicDescription, Mover
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.mover import dead_letters
from support.background import Serving
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
        bytes_keys(topic, "ordering", BAD, b"ordering", properties)
        producer.send(b"second", properties=properties, partition_key="k")
        bad(b"key", partition_key=BAD)
        producer.send(b"third", properties=properties, partition_key="k")
        bad(b"properties", partition_key="k", properties={**properties, "mine": BAD})
        producer.send(b"last", properties=properties, partition_key="k")
        producer.close()

    return publish


def filled(world: RealWorld, fill: Fill, clock: Any) -> tuple[LevelTopicDescription, str, int]:
    """Return a level topic, one of its partitions that is filled, and the due time in ms."""
    description = world.level_topic(HOURS)
    topic = description.name.partition(1).full
    due_ms = clock.now_ms() + HOUR
    fill(topic, due_ms, "orders")
    return description, topic, due_ms


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


def test_a_mover_delivers_the_others_and_the_views_show_all(
    world: RealWorld, fill: Fill, invoke: Callable[..., Result], clock: Any
) -> None:
    description, topic, due_ms = filled(world, fill, clock)

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


def test_dead_letters_are_shown_and_a_replay_refuses_them(
    world: RealWorld, fill: Fill, invoke: Callable[..., Result], clock: Any
) -> None:
    description, topic, due_ms = filled(world, fill, clock)
    clock.advance(5 * HOUR)
    world.mover(description, clock).run_once()

    listed = invoke("dlq", "list", description.topic, "-o", "jsonl")
    lines = [json.loads(line) for line in listed.stdout.splitlines()]
    assert {line["reason"] for line in lines} == {ORDERING_KEY, KEY, PROPERTIES}
    for line in lines:
        shown = invoke("dlq", "show", description.topic, line["id"])
        assert shown.exit_code == 0
        assert line["reason"] in shown.stdout
    refused = {ORDERING_KEY: 1, KEY: 1, PROPERTIES: 1}
    for options in ({}, {"target": description.targets[0], "due_ms": due_ms}):
        report = dead_letters.replay(
            world.plain_client, world.admin, description, lambda _: True, **options
        )
        assert (report.replayed, report.refused) == (0, refused)
    check_dead_letters(world, description, topic, due_ms)
    assert dead_letters.discard(
        world.plain_client, world.admin, description, lambda item: item.reason == KEY, 1
    )
    assert len(list(dead_letters.dead_letters(world.plain_client, world.admin, description))) == 2


def test_the_dispatcher(world: RealWorld, fill: Fill, tmp_path: Path) -> None:
    description = world.level_topic(HOURS, final_window=FinalWindow.TRACKER, window_partitions=1)
    topic = description.window_topic.partition(0).full
    due_ms = SystemClock().now_ms() + 1000
    fill(topic, due_ms, "orders")
    dispatcher = Dispatcher(
        world.plain_client,
        world.admin,
        [description.topic],
        DispatchSettings(directory=tmp_path / "spill", checkpoint_ms=200),
    )
    with Serving(dispatcher) as serving:
        world.eventually(lambda: serving.total("released") == len(READABLE), "the release of all")
        world.eventually(
            lambda: (
                not world.admin.partition_stats(TopicName.parse(topic))
                .subscriptions[SUBSCRIPTION]
                .backlog_entries
            ),
            "the acknowledgement of all",
        )
        assert serving.total("dead") == 3
    assert [message.value for message in world.stored(description.targets[0])] == READABLE
    check_dead_letters(world, description, topic, due_ms)


def test_the_function(world: RealWorld, fill: Fill) -> None:
    description = world.level_topic(HOURS, mover=Mover.FUNCTION)
    topic = description.name.partition(1).full
    due_ms = SystemClock().now_ms() - 1000
    fill(topic, due_ms, "orders")
    consumer = world.plain_client.subscribe(topic, SUBSCRIPTION, pulsar.ConsumerType.Shared)
    relay = Relay(world.plain_client, world.admin, description, consumer)
    with closing(relay):
        for _ in range(7):
            relay.offer(consumer.receive(30_000))

        def acknowledged() -> bool:
            relay.poll()
            return not relay.unacknowledged

        world.eventually(acknowledged, "the acknowledgement of all")
        report = relay.take_report()
    assert not report.given_back
    assert report.due == len(READABLE)
    assert report.dead == {ORDERING_KEY: 1, KEY: 1, PROPERTIES: 1}
    assert [message.value for message in world.stored(description.targets[0])] == READABLE
    check_dead_letters(world, description, topic, due_ms)


@pytest.mark.spark
def test_the_spark_job_with_steps_and_the_pending_dataframe(
    world: RealWorld, fill: Fill, spark: Any, connection: Connection, tmp_path: Path
) -> None:
    from delaylevel.spark_sync import SparkSyncJob, SyncSettings, pending

    description = world.level_topic(SECONDS)
    topic = description.name.partition(0).full
    due_ms = SystemClock().now_ms()
    fill(topic, due_ms, "orders")
    rows = {bytes(row["value"]): row for row in pending(spark, connection, description.topic)
            .collect()}  # fmt: skip
    assert rows.keys() == {*READABLE, b"ordering", b"key", b"properties"}
    assert rows[b"key"]["key"] == rows[b"ordering"]["ordering_key"] == "\ufffd\ufffdA"
    assert rows[b"properties"]["properties"]["delaylevel.unreadable"] == PROPERTIES
    assert rows[b"properties"]["due"] is None
    settings = SyncSettings(
        (description.topic,), once=True, checkpoint=str(tmp_path / "checkpoint")
    )

    def moved() -> bool:
        SparkSyncJob(connection, settings, spark=spark, steps=lambda frame: frame).run()
        return not world.backlog(description)

    world.eventually(moved, "the hand-off of all", 120)
    check_dead_letters(world, description, topic, due_ms)
    assert [message.value for message in world.stored(description.targets[0])] == READABLE


# -- keys that are bytes


@pytest.fixture
def separated(
    world: RealWorld, bytes_keys: Callable[..., None]
) -> Callable[..., LevelTopicDescription]:
    """``separated()``: a level topic with the targets "orders" and "pairs", a KeyValue topic."""

    def make(**values: Any) -> LevelTopicDescription:
        bytes_keys(world.topic("pairs"), "separated", b"k", b"v", {})
        world.plain_client.create_producer(world.topic("orders")).close()
        targets = tuple(world.topic(name) for name in ("orders", "pairs"))
        return topics.create(
            world.admin,
            LevelTopicDescription(f"{targets[0]}-delay-level", HOURS, targets, **values),
        )

    return make


def test_messages_of_a_key_value_schema_are_dead_letters_and_block_nothing(
    world: RealWorld,
    separated: Callable[..., LevelTopicDescription],
    parked: Callable[..., dict[str, str]],
    bytes_keys: Callable[..., None],
    tmp_path: Path,
) -> None:
    description = separated(final_window=FinalWindow.TRACKER, window_partitions=1)
    topic = description.window_topic.partition(0).full
    now_ms = SystemClock().now_ms()
    schema = {"delaylevel.schema": str(SchemaRef.of("KEY_VALUE", '{"key":"","value":""}'))}
    bytes_keys(topic, "key", b"k1", b"first", parked(now_ms))
    bytes_keys(topic, "key", b"k2", b"pair", parked(now_ms, "pairs", **schema))
    bytes_keys(topic, "key", b"k3", b"last", parked(now_ms))
    dispatcher = Dispatcher(
        world.plain_client,
        world.admin,
        [description.topic],
        DispatchSettings(directory=tmp_path / "spill", checkpoint_ms=200),
    )
    with Serving(dispatcher) as serving:
        world.eventually(lambda: serving.total("released") == 2, "the release of the others")
        world.eventually(lambda: serving.total("dead") == 1, "the dead letter")
    (letter,) = world.stored(description.dead_letter_topic.full)
    assert letter.value == b"pair"
    assert "KEY_VALUE" in letter.properties["delaylevel.reason"]
    assert [message.value for message in world.stored(world.topic("pairs"))] == [b"v"]


def test_a_key_given_as_bytes_arrives_as_its_base64_text(
    world: RealWorld,
    bytes_keys: Callable[..., None],
    parked: Callable[..., dict[str, str]],
    clock: Any,
) -> None:
    # The limit that README.md names: the client can neither read nor set the mark of such a key.
    description = world.level_topic(HOURS)
    bytes_keys(description.name.partition(1).full, "key", BAD, b"body", parked(clock.now_ms()))
    clock.advance(5 * HOUR)
    world.mover(description, clock).run_once()
    (message,) = world.stored(description.targets[0])
    assert (message.key, message.value) == (ENCODED, b"body")


def test_the_doctor_finds_a_key_value_topic(
    connection: Connection, separated: Callable[..., LevelTopicDescription]
) -> None:
    description = separated()
    found = {item.check: item for item in examine(connection, description.topic)}
    assert found["target schemas"].state is State.FAILED
    assert "pairs has a KeyValue schema (SEPARATED)" in found["target schemas"].says
