"""The order of asyncio sends to one partition while its producer is being opened."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from delaylevel.producer.async_partition import AsyncPartition


class Opened:
    """A producer that stores messages in the order of the calls."""

    def __init__(self) -> None:
        self.stored: list[bytes] = []
        self.flushed: list[int] = []

    async def send(self, body: bytes, **arguments: Any) -> None:
        self.stored.append(body)

    async def flush(self) -> None:
        self.flushed.append(len(self.stored))


# Steps of the event loop between the end of the opening and the second group of sends.
@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("flushes", [False, True])
def test_sends_at_the_end_of_an_opening_keep_their_order(steps: int, flushes: bool) -> None:
    producer = Opened()

    async def test() -> None:
        opened = asyncio.Event()

        async def open_producer() -> Opened:
            await opened.wait()
            return producer

        partition = AsyncPartition(open_producer, {}, lambda: None)
        sends = [asyncio.ensure_future(partition.send(b"%d" % number)) for number in range(5)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        opened.set()
        for _ in range(steps):
            await asyncio.sleep(0)
        if flushes:
            await partition.flush()
            assert producer.stored == [b"%d" % number for number in range(5)]
        sends += [asyncio.ensure_future(partition.send(b"%d" % number)) for number in range(5, 9)]
        await asyncio.gather(*sends)

    asyncio.run(test())
    assert producer.stored == [b"%d" % number for number in range(9)]
