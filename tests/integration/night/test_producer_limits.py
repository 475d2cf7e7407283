"""Tests of a producer's limits on a real broker: large messages, full queues, and late failures."""

from __future__ import annotations

import asyncio
import time
import uuid
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pulsar
import pytest
from pulsar.schema import JsonSchema, Record, String, StringSchema

from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cluster.connection.settings import Connection
from delaylevel.errors import BrokerError, MessageTooLargeError, UnconfirmedMessagesError
from delaylevel.model.envelope import Envelope
from delaylevel.model.level_topic import default_level_topic
from delaylevel.model.strategy import PartitionBy, PartitionStrategy
from delaylevel.mover import hop
from delaylevel.producer.aio import AsyncDelayLevelClient
from delaylevel.producer.client import DelayLevelClient, wrap
from support.world import QUIET, MakeClient, RealWorld, Stored

HOURS = PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=4))
LONG = timedelta(hours=2)
MIB = 1024 * 1024
ALMOST = 5 * MIB - 110


@pytest.fixture
def orders(namespace: str) -> str:
    return f"persistent://{namespace}/orders"


class Order(Record):
    note = String()


# -- large messages


def test_messages_that_no_hop_could_send_are_refused(
    dl_client: MakeClient, orders: str, stored: Stored
) -> None:
    client = dl_client()
    compressing = client.create_producer(
        orders,
        enable_delay_level_topic=True,
        partition_strategy=HOURS,
        compression_type=pulsar.CompressionType.LZ4,
    )
    plain = client.create_producer(orders, enable_delay_level_topic=True, batching_enabled=True)
    outcomes: list[Any] = []
    for producer, body in ((compressing, bytes(6 * MIB)), (plain, b"x" * ALMOST)):
        # A level, the window, and the fast path of both, which needs open producers.
        for after in (LONG, timedelta(minutes=5)):
            for _ in range(2):
                with pytest.raises(MessageTooLargeError, match=f"{len(body):,} bytes"):
                    producer.send(body, deliver_after=after)
                with pytest.raises(MessageTooLargeError):
                    producer.send_async(
                        body, lambda *got: outcomes.append(got), deliver_after=after
                    )
                with pytest.raises(MessageTooLargeError):
                    producer.send_async(body, None, deliver_after=after)
                producer.send(b"small", deliver_after=after)
        producer.flush()
        assert outcomes == []
    compressing.send(bytes(6 * MIB))  # undelayed, as with the plain client

    description = plain.description
    for topic in (description.topic, description.window_topic.full):
        found = stored(topic)
        assert [message.value for message in found] == [b"small"] * len(found)
    assert [len(message.value or b"") for message in stored(orders)] == [6 * MIB]


@pytest.mark.parametrize(
    ("schema", "content"),
    [(StringSchema(), "x" * ALMOST), (JsonSchema(Order), Order(note="x" * ALMOST))],
    ids=["string", "json"],
)
def test_encoded_payloads_are_measured(
    dl_client: MakeClient, orders: str, stored: Stored, schema: Any, content: Any
) -> None:
    producer = dl_client().create_producer(
        orders, schema=schema, enable_delay_level_topic=True, partition_strategy=HOURS
    )
    with pytest.raises(MessageTooLargeError):
        producer.send(content, deliver_after=LONG)
    assert stored(producer.description.topic) == []


def test_the_asyncio_twin_refuses_them_too(
    connection: Connection, orders: str, stored: Stored
) -> None:
    async def run() -> None:
        client = AsyncDelayLevelClient.from_connection(connection, logger=QUIET)
        producer = await client.create_producer(
            orders, enable_delay_level_topic=True, partition_strategy=HOURS
        )
        with pytest.raises(MessageTooLargeError):
            await producer.send(b"x" * ALMOST, deliver_after=LONG)
        await producer.close()
        with pytest.raises(pulsar.asyncio.PulsarException) as closed:
            await producer.send(b"x", deliver_after=LONG)
        assert closed.value.error() == pulsar.Result.AlreadyClosed
        await client.close()

    asyncio.run(run())
    assert stored(default_level_topic(orders)) == []


def test_the_largest_message_passes_every_hop(world: RealWorld, orders: str) -> None:
    own = {"customer": "7" * 200, "kind": "reminder"}
    producer = world.client().create_producer(
        orders, enable_delay_level_topic=True, partition_strategy=HOURS, batching_enabled=True
    )
    with pytest.raises(MessageTooLargeError) as refused:
        producer.send(b"x" * 5 * MIB, own, "key", "order", deliver_after=LONG)
    body = b"x" * (5 * MIB - (refused.value.size - refused.value.limit))
    producer.send(body, own, "key", "order", deliver_after=LONG)
    description = producer.description

    world.catch_up(LONG)  # level -> window, in a batch
    (found,) = world.stored(description.window_topic.full)
    assert (found.value, found.key, found.ordering_key) == (body, "key", "order")

    envelope = Envelope.read(found.properties)._replace(attempt=10**6)
    reason = "r" * 1024
    held = hop.set_aside(description, found, envelope, reason, 0)
    source = description.level_topic(0).partition(1).full
    dead = hop.dead_letter(description, found._replace(properties=held.properties), source, reason)
    for aside in (held, dead):
        copy = world.plain_client.create_producer(aside.topic, batching_enabled=True)
        copy.send(body, aside.properties, found.key, found.ordering_key, event_timestamp=2**60)
    assert [message.value for message in world.stored(held.topic)] == [body]
    assert [message.value for message in world.stored(dead.topic)] == [body]


# -- messages without a callback


def test_a_wrapped_producer_drops_nothing_when_a_queue_is_full(
    world: RealWorld, connection: Connection, orders: str
) -> None:
    plain = world.plain_client.create_producer(orders, block_if_queue_full=True)
    wrapped = wrap(
        plain,
        world.plain_client,
        partition_strategy=HOURS,
        admin_url=connection.admin_url,
        max_pending_messages=10,
    )
    for _ in range(2000):
        wrapped.send_async(b"x" * 100, None, deliver_after=LONG)
    wrapped.close()
    assert len(world.stored(default_level_topic(orders))) == 2000


@pytest.mark.parametrize("kind", ["create_producer", "wrap"])
def test_dropped_messages_are_counted_exactly_and_reported_once(
    world: RealWorld, connection: Connection, orders: str, kind: str
) -> None:
    client = world.client()
    if kind == "wrap":
        producer = wrap(
            client.create_producer(orders, max_pending_messages=10),
            client,
            partition_strategy=HOURS,
            block_if_queue_full=False,
            max_pending_messages=10,
        )
    else:
        producer = client.create_producer(
            orders, enable_delay_level_topic=True, partition_strategy=HOURS, max_pending_messages=10
        )
    for after in (LONG, timedelta(minutes=5), None):  # a level, the window, and straight
        for _ in range(500):
            producer.send_async(b"x" * 100, None, deliver_after=after)
    with pytest.raises(UnconfirmedMessagesError, match="ProducerQueueIsFull") as reported:
        producer.flush()
    assert isinstance(reported.value, pulsar.PulsarException)
    assert list(reported.value.reasons) == ["ProducerQueueIsFull"]
    description = producer.description
    kept = [world.stored(t) for t in (description.topic, description.window_topic.full, orders)]
    assert sum(map(len, kept)) + reported.value.count == 1500
    assert all(len(messages) < 500 for messages in kept)
    producer.flush()
    producer.close()


def test_messages_that_time_out_are_reported(
    private_broker: Callable[..., EmbeddedBroker],
) -> None:
    broker = private_broker()
    client = DelayLevelClient.from_connection(
        broker.connection, operation_timeout_seconds=3, logger=QUIET
    )
    topic = f"public/default/away-{uuid.uuid4().hex[:8]}"

    def create() -> Any:
        return client.create_producer(
            topic,
            enable_delay_level_topic=True,
            partition_strategy=HOURS,
            send_timeout_millis=2000,
        )

    deadline = time.monotonic() + 60
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while True:
            try:
                producer = create()
                producer.send(b"stored", deliver_after=LONG)
                break
            except (pulsar.PulsarException, BrokerError):
                assert time.monotonic() < deadline
    broker.kill()
    for _ in range(7):
        producer.send_async(b"unknown", None, deliver_after=LONG)
    producer.send_async(b"unknown, too", None)
    with pytest.raises(UnconfirmedMessagesError, match=r"8 messages .*Timeout: 8") as reported:
        producer.flush()
    assert "may be stored or not" in str(reported.value)
    client.shutdown()
