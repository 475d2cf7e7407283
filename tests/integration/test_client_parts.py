"""Tests of the public replacements of the client's private parts, on a real broker."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pulsar
import pytest
from pulsar.schema import AvroSchema, Integer, Record
from without_parts import without

from delaylevel import PartitionStrategy
from delaylevel.asyncio import DelayLevelClient as AsyncDelayLevelClient
from delaylevel.cluster.client_parts.aio import open_producer, reading_client
from delaylevel.cluster.client_parts.parts import ClientPart
from delaylevel.cluster.connection import Connection
from delaylevel.errors import PrerequisiteError
from delaylevel.functions.relay import Relay
from delaylevel.model.level_topic import LevelTopicDescription, Mover
from delaylevel.model.strategy import Levels
from world import RealWorld, eventually

HOURS = PartitionStrategy(partition_by=timedelta(hours=1), maximum_delay=timedelta(hours=4))
#: Every part that has a public replacement.
REPLACED = tuple(part for part in ClientPart if part.instead)


class Price(Record):
    amount = Integer()


@pytest.fixture
def world(connection: Connection, namespace: str) -> Iterator[RealWorld]:
    with ExitStack() as stack:
        yield RealWorld(connection, stack, namespace)


def producer_of(world: RealWorld, topic: str, **options: Any) -> Any:
    return world.client().create_producer(
        world.topic(topic),
        enable_delay_level_topic=True,
        partition_strategy=HOURS,
        final_window="broker",
        **options,
    )


@pytest.mark.parametrize(
    "lost", [REPLACED, (ClientPart.PRODUCER,), (ClientPart.READER, ClientPart.MESSAGE)]
)
def test_messages_are_routed_read_and_forwarded_unchanged(
    world: RealWorld, monkeypatch: pytest.MonkeyPatch, lost: tuple[ClientPart, ...]
) -> None:
    """Routing and publishing, reading, and forwarding, with the parts as the only difference."""
    without(monkeypatch, *lost)
    schema = AvroSchema(Price)
    options = {"schema": schema} if ClientPart.SCHEMA in lost else {}
    producer = producer_of(world, "orders", **options)
    if options:
        bodies: list[Any] = [Price(amount=number) for number in range(20)]
    else:
        bodies = [b"%d" % number for number in range(20)]
    confirmed: list[Any] = []
    for number, body in enumerate(bodies):
        arguments: dict[str, Any] = {
            "deliver_after": timedelta(minutes=number * 10),
            "properties": {"number": f"{number}", "own": "ä"},
            "partition_key": f"key-{number}",
            "event_timestamp": 1000 + number,
        }
        if number % 2:
            producer.send_async(body, lambda result, _: confirmed.append(result), **arguments)
        else:
            producer.send(body, **arguments)
    producer.send(None, deliver_after=timedelta(hours=2), properties={"number": "20"})
    with pytest.raises((TypeError, ValueError)):
        producer.send(bodies[0], deliver_after=timedelta(hours=1), properties={"number": 1})
    producer.flush()
    assert confirmed == [pulsar.Result.Ok] * 10
    producer.close()

    consumer = world.plain_client.subscribe(
        world.topic("orders"),
        "app",
        pulsar.ConsumerType.Exclusive,  # it ignores deliver_at
        initial_position=pulsar.InitialPosition.Earliest,
        **({"schema": schema} if options else {}),
    )
    world.catch_up(timedelta(hours=5))
    found = {}
    while len(found) < 21:
        message = consumer.receive(20_000)
        found[int(message.properties()["number"])] = message
    for number, body in enumerate(bodies):
        message = found[number]
        value = message.value() if options else message.data()
        assert (value.amount if options else value) == (body.amount if options else body)
        assert message.properties()["own"] == "ä"
        assert message.partition_key() == f"key-{number}"
        assert message.event_timestamp() == 1000 + number
    assert found[20].has_null_value()
    with pytest.raises(pulsar.Timeout):
        consumer.receive(200)


def test_the_relay_of_the_function_forwards(
    world: RealWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, *REPLACED)
    description: LevelTopicDescription = world.level_topic(Levels([HOURS]), mover=Mover.FUNCTION)
    producer = world.client().create_producer(
        world.topic("orders"),
        enable_delay_level_topic=True,
        partition_strategy=HOURS,
        mover="function",
        final_window="broker",
    )
    level = f"{description.level_topic(0).full}-partition-0"
    consumer = world.plain_client.subscribe([level], "delaylevel", pulsar.ConsumerType.Shared)
    for number in range(5):
        producer.send(b"%d" % number, deliver_after=timedelta(minutes=70 + number))
    relay = Relay(world.client(), world.admin, description, consumer, clock=world.ahead(7_200_000))
    try:
        while True:
            try:
                relay.offer(consumer.receive(1500))
            except pulsar.Timeout:
                break
        eventually(lambda: relay.poll() or not relay.unacknowledged, "the confirmations", 30)
        assert relay.take_report().duplicates == 0
    finally:
        relay.close()
        consumer.close()


def test_asyncio_without_the_private_parts(
    world: RealWorld, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, *REPLACED, ClientPart.SHARED_CORE)
    logging.getLogger("pulsar").setLevel(logging.CRITICAL)

    async def send() -> tuple[int, Any]:
        async with AsyncDelayLevelClient(
            connection.service_url, admin_url=connection.admin_url
        ) as client:
            producer = await client.create_producer(
                world.topic("orders"),
                enable_delay_level_topic=True,
                partition_strategy=HOURS,
                final_window="broker",
            )
            sends = [
                producer.send(b"%d" % number, deliver_after=timedelta(minutes=number))
                for number in range(0, 200, 20)
            ]
            await asyncio.gather(*sends)
            await producer.flush()
            with pytest.raises((TypeError, ValueError)):
                await producer.send(b"", deliver_after=timedelta(hours=1), properties={"a": 1})
            unused = asyncio.ensure_future(open_producer(client, world.topic("others")))
            await asyncio.sleep(0)
            unused.cancel()
            reading = reading_client(client)
            with pytest.raises(PrerequisiteError, match=r"lacks.*SHARED_CORE"):
                reading.create_reader("orders")
            await producer.close()
            return sum(producer.sent().values()), reading

    count, _ = asyncio.run(send())
    assert count == 10
    level = world.topic("_orders-delay-level")
    assert len(world.stored(level)) == 7  # those with an hour or more
    assert threading.active_count() < 50
