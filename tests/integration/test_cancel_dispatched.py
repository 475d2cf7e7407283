"""Tests of scheduling and cancelling from the producer to the dispatcher, on a real broker."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from delaylevel import OutcomeStatus
from delaylevel.dispatcher.publishing.outcomes import expire_outcomes
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from support.fakes import JumpingClock
from support.world import RealWorld

LEVELS = Levels(
    PartitionStrategy(partition_by=timedelta(minutes=1), maximum_delay=timedelta(minutes=5))
)
# In the window, and in the last partition of the level. The tests skip the time until the due time.
NEAR, FAR = timedelta(seconds=45), timedelta(minutes=4, seconds=55)
GRACE_MS = 500
Arrivals = Callable[..., list[Any]]
each_delivery = pytest.mark.parametrize("delivery", list(Delivery), indirect=True)


@pytest.fixture
def delivery(request: pytest.FixtureRequest, world: RealWorld) -> Delivery:
    delivery = getattr(request, "param", Delivery.EFFECTIVELY_ONCE)
    if delivery is Delivery.EFFECTIVELY_ONCE:
        world.deduplicate()
    return Delivery(delivery)


@pytest.fixture
def orders(delivery: Delivery, world: RealWorld, jumping: JumpingClock) -> LevelTopicDescription:
    """A level topic that allows cancellations, with a dispatcher."""
    description = world.level_topic(LEVELS, final_window=FinalWindow.TRACKER)
    world.serving(description, jumping, delivery=delivery, cancel_grace_ms=GRACE_MS)
    return description


@pytest.fixture
def producer(orders: LevelTopicDescription, world: RealWorld, jumping: JumpingClock) -> Any:
    return world.client(jumping).create_producer(
        orders.targets[0], enable_delay_level_topic=True, delay_level_topic=orders.topic
    )


@pytest.fixture
def arrivals(orders: LevelTopicDescription, world: RealWorld) -> Arrivals:
    return world.arrivals(orders.targets[0])


def pass_by(clock: JumpingClock, due_ms: int) -> None:
    """Let time pass until a due time."""
    clock.advance(max(0, due_ms - clock.now_ms()))


@each_delivery
def test_the_outcome_agrees_with_what_arrives(
    producer: Any, arrivals: Arrivals, jumping: JumpingClock
) -> None:
    taken = [producer.schedule(b"never", partition_key=key, deliver_after=NEAR) for key in "ab"]
    kept = producer.schedule(b"kept", partition_key="a", deliver_after=NEAR)
    for receipt in taken:
        outcome = producer.cancel(str(receipt), timeout=60)
        assert (outcome.status, outcome.id) == (OutcomeStatus.CANCELLED, receipt.id)
    assert producer.cancel(taken[0], timeout=60).status is OutcomeStatus.CANCELLED  # again
    pass_by(jumping, kept.due_ms)
    assert [arrival.message.data() for arrival in arrivals(1)] == [b"kept"]
    late = producer.cancel(kept, timeout=60)
    assert late.status is OutcomeStatus.TOO_LATE
    if late.released_ms is not None:
        assert kept.due_ms <= late.released_ms <= jumping.now_ms()
    assert producer.outcome(kept) == late
    due_ms = jumping.now_ms()
    nobody = producer.cancel(message_id="nobody", deliver_at=due_ms, timeout=60)
    assert nobody.status is OutcomeStatus.UNKNOWN
    # Everything that is due by now has arrived.
    last = producer.schedule(b"last", deliver_after=NEAR)
    pass_by(jumping, last.due_ms)
    assert [arrival.message.data() for arrival in arrivals(1)] == [b"last"]


def test_a_message_is_cancelled_while_it_is_in_a_level(
    producer: Any,
    arrivals: Arrivals,
    orders: LevelTopicDescription,
    world: RealWorld,
    jumping: JumpingClock,
) -> None:
    receipt = producer.schedule(b"never", deliver_after=FAR)
    producer.schedule(b"kept", deliver_after=FAR)
    assert producer.cancel(receipt).status is OutcomeStatus.ACCEPTED
    assert len(world.stored(orders.topic)) == 3
    moving = world.mover(orders, jumping)
    pass_by(jumping, receipt.due_ms - 50_000)
    world.eventually(lambda: moving.run_once() and producer.outcome(receipt), "the outcome")
    outcome = producer.outcome(receipt)
    assert outcome.status is OutcomeStatus.CANCELLED
    assert outcome.decided_ms < receipt.due_ms
    pass_by(jumping, receipt.due_ms)
    assert [arrival.message.data() for arrival in arrivals(1)] == [b"kept"]


def test_old_outcomes_are_deleted(world: RealWorld) -> None:
    description = world.level_topic(LEVELS, final_window=FinalWindow.TRACKER)
    partition = description.outcomes_topic.partition(0)
    producer = world.plain_client.create_producer(partition.full)
    producer.send(b"old")
    expire_outcomes(world.admin, description)  # nothing is older than a day
    stats = world.admin.partition_stats

    def backlog() -> int:
        return stats(partition).subscriptions["delaylevel"].backlog_entries

    assert backlog() == 1

    def is_gone() -> bool:
        world.admin.expire_messages(partition, "delaylevel", 1)
        return not backlog()

    world.eventually(is_gone, "the end of what is older than a second")
