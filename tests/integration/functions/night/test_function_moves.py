"""Tests of the deployed Function: messages arrive as sent; deploy, status, logs and delete work."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pulsar
import pytest
from pulsar.schema import AvroSchema, Integer, JsonSchema, Record, String, StringSchema

from delaylevel.cluster.connection.settings import Connection
from delaylevel.errors import LevelTopicError
from delaylevel.functions import deployment, health
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription, Mover
from delaylevel.model.strategy import Levels, PartitionStrategy
from support.function_moves import TWO_LEVELS, description, wrapped  # noqa: F401  # noqa: F401
from support.world import RealWorld

SHORT = PartitionStrategy(partition_by=timedelta(seconds=2), maximum_delay=timedelta(seconds=8))


class Order(Record):  # type: ignore[misc]
    name = String()
    count = Integer()


def test_schemas_arrive_as_they_were_sent(world: RealWorld, deployed: Callable[..., Any]) -> None:
    kinds: dict[str, tuple[Any, Any]] = {
        "avro": (AvroSchema(Order), Order(name="a", count=7)),
        "json": (JsonSchema(Order), Order(name="b", count=8)),
        "string": (StringSchema(), "007"),
    }
    levels = Levels([SHORT])
    names = [f"{kind}-orders" for kind in kinds]
    first = world.level_topic(
        levels,
        targets=names,
        mover=Mover.FUNCTION,
        topic=f"persistent://{world.namespace}/typed-delay-level",
    )
    consumers = {}
    connected = world.client()
    for name, (schema, value) in zip(names, kinds.values(), strict=True):
        topic = f"persistent://{world.namespace}/{name}"
        consumers[topic] = world.plain_client.subscribe(
            topic, "app", consumer_type=pulsar.ConsumerType.Shared, schema=schema
        )
        producer = connected.create_producer(
            topic,
            enable_delay_level_topic=True,
            delay_level_topic=first.topic,
            partition_strategy=levels,
            schema=schema,
        )
        producer.send(value, deliver_after=timedelta(seconds=2.5))
        producer.send(
            None, partition_key="k", ordering_key="o", deliver_after=timedelta(seconds=2.5)
        )
    deployed(first)
    for topic, (_, value) in zip(consumers, kinds.values(), strict=True):
        found = [consumers[topic].receive(60_000) for _ in range(2)]
        (null,) = (message for message in found if message.has_null_value())
        (message,) = (message for message in found if not message.has_null_value())
        assert message.value() == value
        assert (null.data(), null.partition_key(), null.ordering_key()) == (b"", "k", "o")
        for item in found:
            assert item.schema_version() == (0).to_bytes(8, "big").decode()


def test_delete_keeps_parked_messages_and_a_new_deployment_moves_them(
    description: LevelTopicDescription,
    deployed: Callable[..., Any],
    world: RealWorld,
    connection: Connection,
) -> None:
    get = world.arrivals(description.targets[0])
    made = deployed(description)
    assert not made.updated
    producer = wrapped(world.client(), description)
    producer.send(b"first", deliver_after=timedelta(seconds=1.5))
    get(1, 60)
    world.drained(description)  # acknowledgement follows arrival
    for number in range(20):
        producer.send(b"%d" % number, deliver_after=timedelta(seconds=8))
    deployment.delete(connection, description, made.function)
    # No mover runs, so these stay whatever their due times.
    for number in range(20, 40):
        producer.send(b"%d" % number, deliver_after=timedelta(seconds=4))
    assert world.backlog(description) >= 20
    for member in description.members():
        assert SUBSCRIPTION in world.admin.subscriptions(member.topic.partition(0))
    with pytest.raises(LevelTopicError, match="is not deployed"):
        deployment.restart(connection, made.function)
    with pytest.raises(LevelTopicError, match="is not deployed"):
        health.status(connection, world.admin, description, made.function, 0)
    assert not deployed(description).updated
    again = deployed(description, parallelism=2)
    assert again.updated
    found = get(40, 120)  # an instance that fails at its start is restarted after 30 s
    assert {item.message.data() for item in found} == {b"%d" % n for n in range(40)}
    at = health.status(connection, world.admin, description, made.function, SystemClock().now_ms())
    assert len(at.instances) == 2
