"""Tests of the dispatcher on a real broker: it releases messages once, in order, never early."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pulsar
import pytest
from pulsar.schema import JsonSchema, Record, String

from delaylevel.dispatcher.publishing.targets import java_string_hash
from delaylevel.errors import LevelTopicError
from delaylevel.model import envelope as env
from delaylevel.model.clock import SystemClock
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import Role
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from support.fakes import SkewedClock
from support.run import create
from support.world import RealWorld

pytestmark = pytest.mark.broker

LEVELS = Levels(
    [PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=4))]
)


@pytest.mark.parametrize("kind", [pulsar.ConsumerType.Exclusive, pulsar.ConsumerType.Shared])
def test_release_is_by_due_time_then_order_of_sending_and_never_early(
    kind: Any, world: RealWorld
) -> None:
    jumping = SkewedClock()
    description = create(world, LEVELS, window_partitions=1)
    consumer = world.plain_client.subscribe(description.targets[0], "application", kind)
    begin_ms = jumping.now_ms() + 300_000
    sent = []
    with world.producer(description.targets[0]) as producer:
        for number in range(300):
            due_ms = begin_ms + (number * 37 % 100) * 10
            sent.append((due_ms, number))
            producer.send_async(b"%d" % number, None, deliver_at=due_ms)
        producer.flush()
    serving = world.serving(description, jumping)
    world.eventually(lambda: serving.owned == [0], "the takeover")
    jumping.advance(begin_ms - jumping.now_ms())

    got = []
    for _ in sent:
        message = consumer.receive(60_000)
        now_ms = jumping.now_ms()
        due_ms = int(message.properties()[env.DUE])
        assert now_ms >= due_ms
        got.append((due_ms, int(message.data())))
        consumer.acknowledge(message)
    assert got == sorted(sent)
    world.drained(description, Role.WINDOW)
    assert serving.total("released") == 300


class Order(Record):  # type: ignore[misc] # pulsar's records are not typed
    """An order."""

    name = String()


@pytest.mark.parametrize("delivery", list(Delivery))
def test_every_field_of_a_message_arrives(delivery: Delivery, world: RealWorld) -> None:
    description = create(world, LEVELS, targets=("orders", "typed"))
    plain, typed = sorted(description.targets)
    if delivery is Delivery.EFFECTIVELY_ONCE:
        for topic in (plain, typed):
            world.deduplicate_topic(topic)
    world.serving(description, delivery=delivery)
    consumer = world.plain_client.subscribe(plain, "application")
    of_orders = world.plain_client.subscribe(typed, "application", schema=JsonSchema(Order))
    soon = timedelta(milliseconds=300)
    with world.producer(plain) as producer:
        producer.send(
            b"\x00\xff007",
            deliver_after=soon,
            partition_key="\u00e9",
            ordering_key="o",
            event_timestamp=1_577_836_800_000,
            properties={"a": "1", "b": ""},
        )
    typed_options = {"delay_level_topic": description.topic, "schema": JsonSchema(Order)}
    with world.producer(typed, **typed_options) as producer:
        producer.send(Order(name="first"), deliver_after=soon)

    message = consumer.receive(60_000)
    assert message.data() == b"\x00\xff007"
    assert (message.partition_key(), message.ordering_key()) == ("\u00e9", "o")
    assert message.event_timestamp() == 1_577_836_800_000
    properties = message.properties()
    assert properties.pop(env.ID)
    assert SystemClock().now_ms() >= int(properties.pop(env.DUE))
    assert properties == {"a": "1", "b": "", "delaylevel.target": plain}
    assert of_orders.receive(60_000).value().name == "first"


def test_with_deduplication_keys_keep_their_partition_and_no_message_comes_twice(
    world: RealWorld,
) -> None:
    target = f"persistent://{world.namespace}/spread"
    world.admin.create_partitioned(TopicName.parse(target), 3)
    description = create(world, LEVELS, targets=("spread",))
    with pytest.raises(LevelTopicError, match="set-deduplication --enable"):
        world.serving(description, delivery=Delivery.EFFECTIVELY_ONCE)
    world.deduplicate_topic(target)
    keys = [f"key-{number}" for number in range(30)] + ["\u00e9\u4e2d", "x" * 300]
    with world.producer(target) as producer:
        for turn in range(10):
            for key in keys:
                producer.send_async(
                    b"%d" % turn, None, partition_key=key, deliver_after=timedelta(seconds=1)
                )
        for number in range(60):
            producer.send_async(b"keyless %d" % number, None, deliver_after=timedelta(seconds=1))
        producer.flush()
    total = 10 * len(keys) + 60
    for _ in range(2):
        serving = world.serving(description, delivery=Delivery.EFFECTIVELY_ONCE)
        world.eventually(
            lambda: sum(len(world.stored(f"{target}-partition-{i}")) for i in range(3)) == total,
            "all sent messages",
            60,
        )
        serving.stop()

    turns: dict[str, list[bytes | None]] = {}
    for index in range(3):
        for message in world.stored(f"{target}-partition-{index}"):
            if message.key:
                assert index == java_string_hash(message.key) % 3
                turns.setdefault(message.key, []).append(message.value)
    assert turns == {key: [b"%d" % turn for turn in range(10)] for key in keys}
