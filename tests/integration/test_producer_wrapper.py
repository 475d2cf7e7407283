"""Tests of clients and their producers on a real broker: sending, refusals, and closing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pulsar
import pulsar.asyncio
import pytest
from pulsar.schema import JsonSchema, Record, String

from delaylevel import topics
from delaylevel.asyncio import DelayLevelClient as AsyncClient
from delaylevel.cluster.connection.settings import Connection
from delaylevel.errors import LevelTopicError
from delaylevel.model.envelope import COMPRESSION, DUE, TARGET
from delaylevel.model.level_topic import LevelTopicDescription, default_level_topic
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.producer.client import DelayLevelClient, wrap
from support.world import QUIET, RealWorld

DAYS = PartitionStrategy(partition_by=PartitionBy.DAY, maximum_delay=timedelta(days=3))
HOURS = PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=4))
LONG = timedelta(hours=2)


class Order(Record):
    note = String()


def test_without_an_admin_url_the_level_topic_is_found_by_its_partitions(
    connection: Connection, world: RealWorld, orders: str
) -> None:
    wanted = LevelTopicDescription(
        default_level_topic(orders), Levels(HOURS), (orders,), window_partitions=7
    )
    topics.create(world.admin, wanted)
    client = DelayLevelClient(connection.service_url)
    options: dict[str, Any] = {"enable_delay_level_topic": True, "partition_strategy": HOURS}
    try:
        with client.create_producer(orders, **options) as producer:
            assert producer.description.window_partitions == 7
            producer.send(b"parked", deliver_after=LONG)
            for number in range(20):
                key, soon = f"{number}", timedelta(minutes=30)
                producer.send_async(key.encode(), None, None, key, deliver_after=soon)
        assert [m.value for m in world.stored(wanted.topic)] == [b"parked"]
        for index in range(7):
            found = world.stored(wanted.window_topic.partition(index).full)
            assert {wanted.window_partition(each.key, "") for each in found} <= {index}
        # A topic that does not exist, or has a wrong number of partitions, is refused.
        with pytest.raises(LevelTopicError, match="has 3 partitions"):
            client.create_producer(orders, **{**options, "partition_strategy": DAYS})
        with pytest.raises(LevelTopicError, match="does not exist"):
            client.create_producer(f"{orders}-2", **options)
        world.admin.delete(wanted.window_topic)
        with pytest.raises(LevelTopicError, match="final_window='broker'"):
            client.create_producer(orders, **options)
    finally:
        client.close()


def test_wrap_a_producer_that_exists(world: RealWorld, connection: Connection, orders: str) -> None:
    """A producer of one partition parks for the whole topic."""
    world.admin.create_partitioned(TopicName.parse(orders), 2)
    partition = f"{orders}-partition-1"
    plain = world.plain_client.create_producer(
        partition, producer_name="mine", initial_sequence_id=41, schema=JsonSchema(Order)
    )
    plain.send(Order(note="before"))
    wrapped = wrap(
        plain, world.plain_client, partition_strategy=HOURS, admin_url=connection.admin_url
    )
    assert (wrapped.topic(), wrapped.producer_name()) == (partition, "mine")
    wrapped.send(Order(note="straight"))
    wrapped.send(Order(note="parked"), deliver_after=LONG)
    assert wrapped.last_sequence_id() == 43
    wrapped.close()
    assert not plain.is_connected()

    straight = [json.loads(m.value or b"") for m in world.stored(partition)]
    assert straight == [{"note": "before"}, {"note": "straight"}]
    (parked,) = world.stored(default_level_topic(orders))
    assert json.loads(parked.value or b"") == {"note": "parked"}
    assert parked.properties["delaylevel.target"] == orders
    assert parked.properties["delaylevel.schema"].startswith("JSON:")


def test_messages_without_a_payload_are_not_lost_by_their_compression(
    world: RealWorld, clock: Any
) -> None:
    """The client drops those that ZLib compresses outside of a batch."""
    description = world.level_topic(Levels(HOURS))
    (orders,), empty = description.targets, [b"", None]
    zlib: dict[str, Any] = {
        "compression_type": pulsar.CompressionType.ZLib,
        "batching_enabled": False,
    }
    client = world.client(clock)
    with client.create_producer(orders, enable_delay_level_topic=True, **zlib) as producer:
        for body in empty:
            producer.send(body, deliver_after=LONG)
    assert [each.value for each in world.stored(description.topic)] == empty
    # Producers in other languages name ZLib for them, and the final window has no batches.
    plain = world.plain_client.create_producer(description.level_topic(0).partition(0).full)
    due = {DUE: str(clock.now_ms() + LONG // timedelta(milliseconds=1)), TARGET: orders}
    for body in empty:
        plain.send(body, {**due, COMPRESSION: "ZLib"})
    plain.close()
    clock.advance(LONG // timedelta(milliseconds=1) - 60_000)
    assert world.mover(description, clock).run_once().window == 4
    found = [each.value for each in world.stored(orders)]
    assert sorted(found, key=repr) == sorted(2 * empty, key=repr)


# -- clients


def test_a_second_close_is_refused_as_by_the_plain_client(connection: Connection) -> None:
    ours = DelayLevelClient.from_connection(connection, logger=QUIET)
    for client in (pulsar.Client(connection.service_url, logger=QUIET), ours):
        client.close()
        with pytest.raises(pulsar.AlreadyClosed):
            client.close()
        client.shutdown()

    async def asynchronous() -> None:
        plain = pulsar.asyncio.Client(connection.service_url, logger=QUIET)
        await plain.close()
        async with AsyncClient.from_connection(connection, logger=QUIET) as ours:
            await asyncio.to_thread(ours.admin.topic_exists, TopicName.parse("x"))
            pools = ours.admin._rest._pool.pools
            assert len(pools) == 1
        assert len(pools) == 0
        for client in (plain, ours):
            with pytest.raises(pulsar.asyncio.PulsarException) as refused:
                await client.close()
            assert refused.value.error() == pulsar.Result.AlreadyClosed

    asyncio.run(asyncio.wait_for(asynchronous(), 120))


# --- replacing pulsar.Client ---------------------------------------------------------------

PATCHED = """
import asyncio, os, sys, warnings
warnings.simplefilter("error", UserWarning)
from datetime import timedelta
import pulsar, pulsar.asyncio
import delaylevel, delaylevel.asyncio
pulsar.Client = delaylevel.DelayLevelClient
pulsar.asyncio.Client = delaylevel.asyncio.DelayLevelClient
service_url, admin_url, topic = sys.argv[1:]
quiet = pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull)
later = timedelta(days=2)

client = pulsar.Client(service_url, None, 20, admin_url=admin_url, logger=quiet)
assert type(client) is delaylevel.DelayLevelClient
producer = client.create_producer(topic, None, batching_enabled=True)
assert type(producer) is pulsar.Producer
producer.send(b"plain")
producer.close()
leveled = client.create_producer(topic, "mine", enable_delay_level_topic=True)
leveled.send(b"leveled", deliver_after=later)
for wrong in (dict(properties="x"), dict(topic=None), dict(unheard_of=1)):
    try:
        client.create_producer(**{"topic": topic, "enable_delay_level_topic": True, **wrong})
    except (TypeError, ValueError):
        pass
    else:
        raise SystemExit(wrong)
wrapped = delaylevel.wrap(client.create_producer(topic), client, plain_producer=True)
wrapped.send(b"wrapped", deliver_after=later)
client.close()

async def main():
    async with pulsar.asyncio.Client(service_url, admin_url=admin_url, logger=quiet) as client:
        assert type(client) is delaylevel.asyncio.DelayLevelClient
        producer = await client.create_producer(topic, send_timeout_millis=5000)
        assert type(producer) is pulsar.asyncio.Producer
        await producer.send(b"plain")
        leveled = await client.create_producer(topic, enable_delay_level_topic=True)
        await leveled.send(b"leveled", deliver_after=later)

asyncio.run(main())
print("done", flush=True)
# One process of pulsar.asyncio in ten aborts if Python shuts down right after the last callback.
os._exit(0)
"""


def test_our_clients_can_replace_the_plain_ones(run_code: Callable[..., str], orders: str) -> None:
    assert "done" in run_code(PATCHED, orders)
