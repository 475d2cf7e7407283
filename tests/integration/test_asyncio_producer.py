"""Tests of the asyncio producer on a real broker: openings, cancelled sends, closing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta

import pulsar
import pulsar.asyncio
import pytest

from delaylevel.asyncio import DelayLevelClient, Inspector
from delaylevel.cluster.client_parts.aio import open_producer
from delaylevel.cluster.connection.settings import Connection
from delaylevel.consumer import Listeners, ReceivedMessage
from delaylevel.model.level_topic import default_level_topic
from delaylevel.model.outcome import OutcomeStatus
from delaylevel.model.topic_name import TopicName
from support.world import HOURS, QUIET, RealWorld

LONG = timedelta(hours=1.5)


def test_a_message_alone_does_not_wait_for_a_batch(
    connection: Connection, world: RealWorld, orders: str
) -> None:
    async def test() -> None:
        options = {"batching_max_publish_delay_ms": 4000, "max_pending_messages": 5000}
        async with DelayLevelClient.from_connection(connection, logger=QUIET) as client:
            producer = await client.create_producer(
                orders, enable_delay_level_topic=True, partition_strategy=HOURS, **options
            )
            started = time.monotonic()
            for _ in range(20):
                await producer.send(b"alone", deliver_after=LONG)
            await asyncio.gather(*(producer.send(b"x", deliver_after=LONG) for _ in range(1000)))
            assert time.monotonic() - started < 60  # each of them would wait for four seconds
            await producer.close()

    asyncio.run(test())
    found = world.stored(default_level_topic(orders))
    assert len(found) == 1020
    # 20 single ones; the others filled batches, of at most 1,000 messages or 128 KiB.
    assert len({(message.ledger, message.entry) for message in found}) <= 25


@pytest.mark.parametrize("way", ["gather", "batches"])
def test_flushes_and_the_clients_batch_timer_do_not_lock_each_other(
    run_code: Callable[..., str], orders: str, way: str
) -> None:
    """The client's flush_async hangs here: see `delaylevel.producer.aio.flush`."""
    code = """
import asyncio, sys
from datetime import timedelta
from delaylevel.asyncio import DelayLevelClient
async def main():
    client = DelayLevelClient(sys.argv[1], admin_url=sys.argv[2])
    producer = await client.create_producer(
        sys.argv[3], enable_delay_level_topic=True, max_pending_messages=20000,
        batching_max_publish_delay_ms=1 if sys.argv[4] == "batches" else 10)
    async def work():
        for _ in range(30):
            await producer.send(b"x", deliver_after=timedelta(days=2))
            await producer.send(b"x")
            if sys.argv[4] == "gather":
                await asyncio.sleep(0)
    async def flush():
        while True:
            await producer.flush()
    flushing = asyncio.ensure_future(flush())
    await asyncio.gather(*(work() for _ in range(60)))
    flushing.cancel()
    await producer.close()
    await client.close()
asyncio.run(main())
"""
    run_code(code, orders, way)


def test_an_event_loop_may_end_during_an_opening(run_code: Callable[..., str], orders: str) -> None:
    """The client's own callback ends the process here."""
    code = """
import asyncio, sys, time
from datetime import timedelta
from delaylevel.asyncio import DelayLevelClient
kept = []
async def main():
    client = DelayLevelClient(sys.argv[1], admin_url=sys.argv[2])
    producer = await client.create_producer(sys.argv[3], enable_delay_level_topic=True)
    kept.extend((client, producer))
    producer._cache.check_exists = lambda: None
    asyncio.ensure_future(producer.send(b"1", deliver_after=timedelta(days=2)))
    for _ in range(3):
        await asyncio.sleep(0)
asyncio.run(main())
async def again():
    client, _ = kept
    producer = await client.create_producer(sys.argv[3], enable_delay_level_topic=True)
    await producer.send(b"2", deliver_after=timedelta(days=2))
    await producer.close()
    await client.close()
time.sleep(1)
asyncio.run(again())
print("alive")
"""
    assert run_code(code, orders).endswith("alive\n")


def test_an_opening_that_is_cancelled_leaves_no_producer(
    connection: Connection, world: RealWorld, orders: str
) -> None:
    name = TopicName.parse(orders)

    async def test() -> None:
        client = pulsar.asyncio.Client(connection.service_url, logger=QUIET)
        for _ in range(5):
            opening = asyncio.ensure_future(open_producer(client, orders))
            await asyncio.sleep(0)
            opening.cancel()
            await asyncio.wait([opening])
        assert opening.cancelled()
        last = await client.create_producer(orders)  # created after the others

        def only_the_last() -> bool:
            found = world.admin.partition_stats(name).publishers
            return [each.name for each in found] == [last.producer_name()]

        await asyncio.to_thread(world.eventually, only_the_last)
        await client.close()

    asyncio.run(test())


def test_the_client_for_threads_has_the_same_connections(
    connection: Connection, orders: str
) -> None:
    async def test() -> None:
        async with DelayLevelClient.from_connection(connection) as client:
            producer = await client.create_producer(orders, enable_delay_level_topic=True)
            receipt = await producer.schedule(b"later", deliver_after=LONG, partition_key="k")
            look = await Inspector.open(client, orders)
            assert [row.id for row in await look.rows()] == [receipt.id]
            handled = asyncio.Event()
            app = Listeners(client.synchronous())

            @app.on(orders, subscription="app")
            async def handle(message: ReceivedMessage) -> None:
                if message.data == b"now":
                    handled.set()

            async with app:
                await producer.send(b"now")
                await asyncio.wait_for(handled.wait(), 30)
            outcome = await producer.cancel(receipt)
            assert outcome.status is OutcomeStatus.ACCEPTED
            assert await look.rows() == []
            assert (await look.horizon()).messages == 0

    asyncio.run(test())
