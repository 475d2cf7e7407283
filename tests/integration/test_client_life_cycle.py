"""Tests of clients on a real broker: closing, and replacing ``pulsar.Client``."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pulsar
import pulsar.asyncio
import pytest

import delaylevel.asyncio
from delaylevel import DelayLevelClient, PartitionStrategy
from delaylevel.cluster.connection.settings import Connection
from delaylevel.model.topic_name import TopicName
from support.world import QUIET, RealWorld, eventually

DAYS = PartitionStrategy(maximum_delay=timedelta(days=3))
LEVELS: dict[str, Any] = {"enable_delay_level_topic": True, "partition_strategy": DAYS}


@pytest.fixture
def orders(namespace: str) -> str:
    return f"persistent://{namespace}/orders"


@asynccontextmanager
async def twin(connection: Connection) -> AsyncIterator[delaylevel.asyncio.DelayLevelClient]:
    client = delaylevel.asyncio.DelayLevelClient.from_connection(connection, logger=QUIET)
    async with client:
        yield client


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 120))


def test_the_business_producer_is_closed_if_a_later_step_fails(
    world: RealWorld, orders: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = world.client()

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("delaylevel.topics.registry.create", fail)
    with pytest.raises(KeyboardInterrupt):
        client.create_producer(orders, **LEVELS)
    stats = world.admin.partition_stats
    eventually(lambda: stats(TopicName.parse(orders)).publishers == (), "the end of the producer")


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
        async with twin(connection) as ours:
            await asyncio.to_thread(ours.admin.topic_exists, TopicName.parse("x"))
            pools = ours.admin._rest._pool.pools
            assert len(pools) == 1
        assert len(pools) == 0
        for client in (plain, ours):
            with pytest.raises(pulsar.asyncio.PulsarException) as refused:
                await client.close()
            assert refused.value.error() == pulsar.Result.AlreadyClosed

    run(asynchronous())


# --- replacing pulsar.Client ---------------------------------------------------------------

PATCHED = """
import asyncio, os, sys
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


def test_our_clients_can_replace_the_plain_ones(connection: Connection, orders: str) -> None:
    program = [sys.executable, "-W", "error::UserWarning", "-c", PATCHED]
    found = subprocess.run(
        [*program, connection.service_url, connection.admin_url, orders],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert "done" in found.stdout
