"""Tests of the asyncio clients of the in-memory Pulsar."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pulsar
import pulsar.asyncio
import pytest

import delaylevel.asyncio
from delaylevel.cluster import threads
from delaylevel.errors import InvalidInputError
from delaylevel.inspection import Selection
from delaylevel.testing import MemoryPulsar

DAY, MINUTE = timedelta(days=1), timedelta(minutes=1)


def run(scenario: Callable[[MemoryPulsar, Any], Awaitable[None]]) -> None:
    """Run a test in an event loop, for a limited time, with a client."""

    async def limited() -> None:
        with MemoryPulsar() as memory:
            await asyncio.wait_for(scenario(memory, memory.asyncio_client()), 120)

    asyncio.run(limited())


@pytest.mark.parametrize("busy", [False, True])
def test_a_task_that_waits_for_messages_runs_at_their_times(
    monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    """The messages that it sends meanwhile are delivered within the same advance."""

    def later(work: Callable[[], None]) -> None:
        threading.Timer(0.01, work).start()

    if busy:
        monkeypatch.setattr(threads, "in_thread", later)
    seen: list[tuple[bytes, timedelta]] = []

    async def scenario(memory: MemoryPulsar, client: Any) -> None:
        assert isinstance(client, delaylevel.asyncio.DelayLevelClient)
        consumer = await client.subscribe("orders", "billing", pulsar.ConsumerType.Shared)
        producer = await client.create_producer("orders", enable_delay_level_topic=True)

        async def work() -> None:
            while True:
                message = await consumer.receive()
                seen.append((message.data(), memory.clock.now() - begin))
                await consumer.acknowledge(message)
                if len(seen) < 4:
                    await producer.send(b"%d" % len(seen), deliver_after=DAY)

        begin = memory.clock.now()
        task = asyncio.ensure_future(work())
        assert isinstance(await producer.send(b"0", deliver_after=DAY), pulsar.MessageId)
        await memory.advance_async(10 * DAY)
        task.cancel()
        await producer.close()
        await consumer.close()
        with pytest.raises(pulsar.asyncio.PulsarException):
            await consumer.receive()

    run(scenario)
    assert seen == [(b"%d" % n, (n + 1) * DAY) for n in range(4)]


def test_a_reader_waits_too() -> None:
    async def scenario(memory: MemoryPulsar, client: Any) -> None:
        reader = await client.create_reader("orders", pulsar.MessageId.earliest)
        plain = await client.create_producer("orders")
        assert not await reader.has_message_available()
        waiting = asyncio.ensure_future(reader.read_next())
        await asyncio.sleep(0)
        await plain.send(b"x")
        assert (await waiting).data() == b"x"
        topic = "persistent://public/default/orders"
        assert await client.get_topic_partitions("orders") == [topic]
        await reader.close()

    run(scenario)


def test_errors_are_those_of_pulsar_asyncio() -> None:
    async def scenario(memory: MemoryPulsar, client: Any) -> None:
        await client.subscribe("orders", "one")
        with pytest.raises(pulsar.asyncio.PulsarException, match="ConsumerBusy"):
            await client.subscribe("orders", "one")
        plain = await client.create_producer("orders")
        with pytest.raises(pulsar.asyncio.PulsarException, match="MessageTooBig"):
            await plain.send(b"x" * (6 << 20))
        wrapped = await delaylevel.asyncio.wrap(plain, client, plain_producer=True)
        await wrapped.send(b"x", deliver_after=DAY)
        assert len(memory.pending("orders")) == 1

    run(scenario)


def test_what_is_pending() -> None:
    pytest.importorskip("duckdb")
    read: list[int] = []

    async def scenario(memory: MemoryPulsar, client: Any) -> None:
        producer = await client.create_producer("orders", enable_delay_level_topic=True)
        for number in range(4):
            later = 3 * DAY + number * MINUTE
            await producer.send(b"x" * number, deliver_after=later, message_id=f"m{number}")
        look = await delaylevel.asyncio.Inspector.open(client, "orders", tell=read.append)
        assert [row.id for row in await look.rows(limit=3)] == ["m0", "m1", "m2"]
        assert sum(read) >= 3
        (row,) = await look.find("m3", value=True)
        assert (row.size, row.value) == (3, b"xxx")
        assert len(await look.table(Selection(where="size > 1"), columns=["id"])) == 2
        assert (await look.average("size")).total == 6
        assert (await look.horizon(exact=True)).messages == 4
        with pytest.raises(InvalidInputError, match="carries no messages for"):
            await delaylevel.asyncio.Inspector.open(client, "orders", target="invoices")
        async with client:
            pass
        with pytest.raises(pulsar.asyncio.PulsarException, match="AlreadyClosed"):
            await client.create_producer("orders")

    run(scenario)
