"""Tests of the asyncio producer on a real broker: openings, cancelled sends, closing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from delaylevel.broker.embedded import EmbeddedBroker
from support.asyncio_producer import LONG, LONGER, orders, producer_of  # noqa: F401


def test_an_opening_waits_for_a_broker_that_comes_back(
    private_broker: Callable[..., EmbeddedBroker],
) -> None:
    broker = private_broker()
    topic = "persistent://public/default/orders"

    async def test() -> list[Any]:
        async with producer_of(broker.connection, topic, send_timeout_millis=280_000) as producer:
            await producer.send(b"0", deliver_after=LONGER)
            await asyncio.to_thread(broker.kill)
            sends = [
                asyncio.ensure_future(producer.send(b"%d" % number, deliver_after=LONG))
                for number in range(20)
            ]
            await asyncio.sleep(0.5)
            assert not any(sent.done() for sent in sends)
            await asyncio.to_thread(broker.start)
            found = await asyncio.gather(*sends)
            await producer.close()
            return [(where.ledger_id(), where.entry_id(), where.batch_index()) for where in found]

    positions = asyncio.run(test())
    assert positions == sorted(positions)
    assert len(set(positions)) == 20
