"""Tests of the asyncio producer on a real broker: openings, cancelled sends, closing."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pulsar
import pulsar.asyncio

from delaylevel.asyncio import DelayLevelClient
from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cluster.client_parts.aio import open_producer
from delaylevel.cluster.connection.settings import Connection
from delaylevel.model.strategy import PartitionBy, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from support.world import QUIET, RealWorld

HOURS = PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=4))
LONG, LONGER, LONGEST = timedelta(hours=1.5), timedelta(hours=2.5), timedelta(hours=3.5)


def result_of(outcome: Any) -> Any:
    assert isinstance(outcome, pulsar.asyncio.PulsarException), outcome
    return outcome.error()


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


def test_a_broker_that_goes_away(private_broker: Callable[..., EmbeddedBroker]) -> None:
    broker = private_broker()
    topic = "persistent://public/default/orders"
    gaps: list[float] = []

    async def watch() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()

    async def test() -> None:
        async with DelayLevelClient.from_connection(broker.connection, logger=QUIET) as client:
            producer = await client.create_producer(
                topic,
                enable_delay_level_topic=True,
                partition_strategy=HOURS,
                send_timeout_millis=2000,
            )
            await producer.send(b"1", deliver_after=LONG)
            watching = asyncio.ensure_future(watch())
            await asyncio.to_thread(broker.kill)
            started = time.monotonic()
            outcomes = await asyncio.gather(
                producer.send(b"2", deliver_after=LONG),  # its producer is open
                producer.send(b"3", deliver_after=LONGER),
                producer.send(b"4", deliver_after=LONGER),
                producer.flush(),
                return_exceptions=True,
            )
            assert 1.5 < time.monotonic() - started < 8
            assert {result_of(outcome) for outcome in outcomes} == {pulsar.Result.Timeout}
            assert not producer.is_connected()

            # A close waits for what waits, up to the send timeout.
            waiting = asyncio.ensure_future(producer.send(b"5", deliver_after=LONGEST))
            await asyncio.sleep(0)
            await producer.close()
            assert result_of(waiting.exception()) == pulsar.Result.Timeout
            watching.cancel()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the timeout is short
        asyncio.run(test())
    assert max(gaps) < 1.5
