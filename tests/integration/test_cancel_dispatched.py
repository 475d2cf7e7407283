"""Tests of scheduling and cancelling from the producer to the dispatcher, on a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from delaylevel import OutcomeStatus
from delaylevel.cluster.connection.settings import Connection
from delaylevel.dispatcher import Dispatcher, DispatchSettings
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.producer.aio import AsyncDelayLevelClient
from support.background import Serving
from support.world import QUIET, MakeLevelTopic, RealWorld

LEVELS = Levels(
    PartitionStrategy(partition_by=timedelta(seconds=2), maximum_delay=timedelta(seconds=20))
)
FAR = timedelta(seconds=19)
GRACE_MS = 2_000
Arrivals = Callable[..., list[Any]]


@pytest.fixture(params=list(Delivery))
def delivery(request: pytest.FixtureRequest, world: RealWorld) -> Delivery:
    if request.param is Delivery.EFFECTIVELY_ONCE:
        world.deduplicate()
    return Delivery(request.param)


@pytest.fixture
def orders(
    delivery: Delivery, level_topic: MakeLevelTopic, world: RealWorld, tmp_path: Path
) -> Iterator[LevelTopicDescription]:
    """A level topic that allows cancellations, with a dispatcher."""
    description = level_topic(LEVELS, final_window=FinalWindow.TRACKER)
    settings = DispatchSettings(
        directory=tmp_path, delivery=delivery, checkpoint_ms=200, cancel_grace_ms=GRACE_MS
    )
    with ExitStack() as stack:
        dispatcher = Dispatcher(world.plain_client, world.admin, [description.topic], settings)
        stack.enter_context(Serving(dispatcher))
        yield description


@pytest.fixture
def producer(orders: LevelTopicDescription, world: RealWorld) -> Any:
    return world.client().create_producer(
        orders.targets[0], enable_delay_level_topic=True, delay_level_topic=orders.topic
    )


@pytest.fixture
def arrivals(orders: LevelTopicDescription, world: RealWorld) -> Arrivals:
    return world.arrivals(orders.targets[0])


def test_the_outcome_agrees_with_what_arrives(
    producer: Any, arrivals: Arrivals, world: RealWorld
) -> None:
    near = timedelta(seconds=1.5)
    taken = [producer.schedule(b"never", partition_key=key, deliver_after=near) for key in "ab"]
    kept = producer.schedule(b"kept", partition_key="a", deliver_after=near)
    for receipt in taken:
        outcome = producer.cancel(str(receipt), timeout=60)
        assert (outcome.status, outcome.id) == (OutcomeStatus.CANCELLED, receipt.id)
    assert producer.cancel(taken[0], timeout=60).status is OutcomeStatus.CANCELLED  # again
    assert [arrival.message.data() for arrival in arrivals(1)] == [b"kept"]
    late = producer.cancel(kept, timeout=60)
    assert late.status is OutcomeStatus.TOO_LATE
    if late.released_ms is not None:
        assert kept.due_ms <= late.released_ms <= world.clock.now_ms()
    assert producer.outcome(kept) == late
    due_ms = world.clock.now_ms()
    nobody = producer.cancel(message_id="nobody", deliver_at=due_ms, timeout=60)
    assert nobody.status is OutcomeStatus.UNKNOWN
    # Everything that is due by now has arrived.
    last = producer.schedule(b"last", deliver_after=timedelta(seconds=0.5))
    assert [arrival.message.data() for arrival in arrivals(1)] == [b"last"]
    assert last.due_ms > taken[-1].due_ms


def test_a_message_is_cancelled_while_it_is_in_a_level(
    producer: Any, arrivals: Arrivals, orders: LevelTopicDescription, world: RealWorld
) -> None:
    after = timedelta(seconds=5)
    receipt = producer.schedule(b"never", deliver_after=after)
    producer.schedule(b"kept", deliver_after=after)
    assert world.stored(orders.topic)
    with ThreadPoolExecutor(1) as pool:
        cancelling = pool.submit(producer.cancel, receipt, timeout=60)
        while not cancelling.done():
            # One mover until the message is due: without it, the grace passes on a busy machine.
            left_ms = receipt.due_ms - world.clock.now_ms()
            world.advance(timedelta(milliseconds=max(100, left_ms)))
        outcome = cancelling.result()
    assert outcome.status is OutcomeStatus.CANCELLED
    assert outcome.decided_ms is not None
    assert outcome.decided_ms < receipt.due_ms
    assert [arrival.message.data() for arrival in arrivals(1)] == [b"kept"]


def test_a_message_is_rescheduled_and_fired(producer: Any, arrivals: Arrivals) -> None:
    near = timedelta(seconds=1.9)
    moved = producer.reschedule(
        producer.schedule(b"moved", partition_key="k", deliver_after=near),
        deliver_after=timedelta(seconds=1),
        timeout=60,
    )
    assert moved.outcome.status is OutcomeStatus.CANCELLED
    fired = producer.fire_now(
        producer.schedule(b"fired", {"own": "1"}, deliver_after=near), timeout=60
    )
    assert fired.outcome.status is OutcomeStatus.CANCELLED
    found = {each.message.data(): each.message for each in arrivals(2)}
    assert set(found) == {b"moved", b"fired"}
    assert found[b"fired"].properties() == {
        "own": "1",
        "delaylevel.id": fired.receipt.id,
        "delaylevel.due": str(fired.receipt.due_ms),
        "delaylevel.target": fired.receipt.target,
    }
    assert found[b"moved"].partition_key() == "k"
    producer.schedule(b"last", deliver_after=near)
    assert [arrival.message.data() for arrival in arrivals(1)] == [b"last"]


def test_the_asyncio_producer_cancels(
    connection: Connection, orders: LevelTopicDescription, arrivals: Arrivals
) -> None:
    async def run() -> None:
        client = AsyncDelayLevelClient(
            connection.service_url, admin_url=connection.admin_url, logger=QUIET
        )
        producer = await client.create_producer(
            orders.targets[0], enable_delay_level_topic=True, delay_level_topic=orders.topic
        )
        near = timedelta(seconds=1.9)
        receipts = [await producer.schedule(b"never", deliver_after=near) for _ in range(5)]
        outcomes = await asyncio.gather(
            *(producer.cancel(receipt, timeout=60) for receipt in receipts)
        )
        assert {outcome.status for outcome in outcomes} == {OutcomeStatus.CANCELLED}
        await producer.schedule(b"last", deliver_after=near)
        await client.close()

    asyncio.run(run())
    assert [arrival.message.data() for arrival in arrivals(1)] == [b"last"]


def test_an_id_of_a_cancelled_message_is_remembered(
    producer: Any, arrivals: Arrivals, orders: LevelTopicDescription
) -> None:
    near = timedelta(seconds=1)
    receipt = producer.schedule(b"never", deliver_after=near, message_id="mine")
    assert producer.cancel(receipt, timeout=60).status is OutcomeStatus.CANCELLED
    producer.schedule(b"copy", deliver_after=near, message_id="mine")
    producer.schedule(b"last", deliver_after=1.9 * near, message_id="other")
    assert [arrival.message.data() for arrival in arrivals(1)] == [b"last"]
