"""Tests of scheduling and cancelling on a real broker, without a dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from delaylevel import DelayLevelClient, Outcome, OutcomeStatus
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.dispatcher.publishing.outcomes import expire_outcomes
from delaylevel.model import envelope as env
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from delaylevel.topics.outcomes import Outcomes
from support.proxy import Proxy
from support.world import QUIET, RealWorld
from support.world import eventually as wait_until

HOURS = Levels(PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=5)))
FAR = timedelta(hours=2, minutes=5)


@pytest.fixture
def orders(world: RealWorld) -> LevelTopicDescription:
    """A level topic that allows cancellations."""
    return world.level_topic(HOURS, final_window=FinalWindow.TRACKER)


@pytest.fixture
def producer(world: RealWorld, orders: LevelTopicDescription) -> Any:
    return world.producer(orders.targets[0], delay_level_topic=orders.topic)


def wait_for_readers(admin: Admin, orders: LevelTopicDescription, count: int) -> None:
    """Wait until the outcomes topic has a number of readers: they connect again at any time."""

    def readers() -> int:
        stats = admin.partition_stats(orders.outcomes_topic.partition(0))
        return sum(len(found.consumers) for found in stats.subscriptions.values())

    wait_until(lambda: readers() == count, f"{count} readers")


def test_outcomes_are_not_lost_when_the_topic_moves(
    producer: Any, world: RealWorld, admin: Admin, orders: LevelTopicDescription
) -> None:
    """A reader that starts at the symbolic end would start there again."""
    partition = orders.outcomes_topic.partition(0)
    decisions = world.plain_client.create_producer(partition.full, batching_enabled=False)
    first = producer.schedule(b"x", deliver_after=FAR)
    outcomes = Outcomes(world.plain_client, admin, orders)
    for _ in range(3):
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(outcomes.wait, outcomes.end(), {first.name}, 60)
            wait_for_readers(admin, orders, 1)
            admin.unload(partition)
            decided = Outcome(
                OutcomeStatus.CANCELLED, first.id, first.target, first.due_ms, world.clock.now_ms()
            )
            decisions.send(decided.payload(), decided.properties(), partition_key=first.id)
            assert waiting.result(90)[first.name].status is OutcomeStatus.CANCELLED
        wait_for_readers(admin, orders, 0)


def test_a_close_ends_the_wait(producer: Any, admin: Admin, orders: LevelTopicDescription) -> None:
    receipt = producer.schedule(b"x", deliver_after=FAR)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(producer.cancel, receipt, timeout=3600)
        wait_for_readers(admin, orders, 1)
        producer.close()
        assert waiting.result(60).status is OutcomeStatus.ACCEPTED
    wait_for_readers(admin, orders, 0)


def test_old_outcomes_are_deleted(world: RealWorld, orders: LevelTopicDescription) -> None:
    partition = orders.outcomes_topic.partition(0)
    producer = world.plain_client.create_producer(partition.full)
    producer.send(b"old")
    expire_outcomes(world.admin, orders)  # nothing is older than a day
    stats = world.admin.partition_stats

    def backlog() -> int:
        return stats(partition).subscriptions["delaylevel"].backlog_entries

    assert backlog() == 1

    def is_gone() -> bool:
        world.admin.expire_messages(partition, "delaylevel", 1)
        return not backlog()

    wait_until(is_gone, "the end of what is older than a second")


@pytest.fixture
def through_proxy(proxied: Connection, orders: LevelTopicDescription) -> Iterator[Any]:
    """A producer that reaches the broker through the proxy."""
    client = DelayLevelClient.from_connection(proxied, logger=QUIET)
    yield client.create_producer(
        orders.targets[0], enable_delay_level_topic=True, delay_level_topic=orders.topic
    )
    client.shutdown()


def test_a_message_that_the_client_sends_twice_has_one_id(
    through_proxy: Any, proxy: Proxy, orders: LevelTopicDescription, world: RealWorld
) -> None:
    """Its copies are at two positions: a position would identify only one of them."""
    through_proxy.schedule(b"first", deliver_after=FAR)
    proxy.hold_answers()
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(through_proxy.schedule, b"twice", deliver_after=FAR)

        def copies() -> list[Any]:
            return [found for found in world.stored(orders.topic) if found.value == b"twice"]

        wait_until(copies, "the message")
        proxy.cut()
        proxy.restore()
        receipt = sending.result(60)
    one, two = copies()
    assert one.position != two.position
    assert one.properties[env.ID] == two.properties[env.ID] == receipt.id
    assert receipt.place is not None
    assert receipt.place[1] == two.position.entry_start


PROGRAM = """
import sys
from datetime import timedelta
from delaylevel import DelayLevelClient
service, admin, topic, levels = sys.argv[1:]
client = DelayLevelClient(service, admin_url=admin)
options = dict(enable_delay_level_topic=True, delay_level_topic=levels)
producer = client.create_producer(topic, **options)
receipt = producer.schedule(b"x", deliver_after=timedelta(minutes=10))
print(producer.cancel(receipt, timeout=0.1).status)
"""


def test_a_process_that_has_waited_for_an_outcome_exits(
    run_code: Callable[..., str], orders: LevelTopicDescription
) -> None:
    for _ in range(3):
        assert "accepted" in run_code(PROGRAM, orders.targets[0], orders.topic).splitlines()
