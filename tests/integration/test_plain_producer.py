"""The producer in examples/plain_producer.py on a real broker, with a mover and a dispatcher."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from delaylevel.model.envelope import EXPIRES, ID
from delaylevel.model.level_topic import FinalWindow
from delaylevel.model.outcome import OUTCOME
from delaylevel.model.strategy import Levels, PartitionStrategy
from examples.plain_producer import PlainProducer
from support.world import RealWorld

pytestmark = pytest.mark.broker

SECONDS = Levels(
    PartitionStrategy(
        partition_by=timedelta(seconds=3),
        maximum_delay=timedelta(seconds=15),
        lead=timedelta(seconds=1),
    )
)


def test_its_messages_are_delivered_and_one_is_cancelled(world: RealWorld) -> None:
    description = world.level_topic(SECONDS, final_window=FinalWindow.TRACKER)
    (orders,) = description.targets
    consumer = world.plain_client.subscribe(orders, "application")
    admin_url = world.admin.admin_url
    producer = PlainProducer(world.plain_client, admin_url, orders, description.topic)
    now_ms = time.time_ns() // 1_000_000
    due_ms = {b"%d" % number: now_ms + 300 + number * 800 for number in range(9)}
    due_ms[b"9"] = now_ms + 12_000  # on a busy machine, its cancellation must be in time
    for body, at_ms in due_ms.items():
        own = {"n": body.decode(), "delaylevel.id": "not its own"}
        producer.send(
            body, at_ms, "k" * (at_ms % 2), message_id=f"order {own['n']}", properties=own
        )
    producer.send(b"now", properties={"n": "now"})
    producer.send(b"moved", now_ms + 2000, message_id="moved", replaces="order 9", expires=2**46)
    producer.cancel("order 9", due_ms[b"9"], "k" * (due_ms[b"9"] % 2))
    with world.moving(description), world.serving(description):
        found = {}
        for _ in range(11):
            message = consumer.receive(20_000)
            consumer.acknowledge(message)
            found[message.data()] = message.properties()
            assert due_ms.get(message.data(), 0) <= time.time_ns() // 1_000_000
        assert set(found) == {*due_ms, b"now", b"moved"} - {b"9"}
        assert found[b"now"] == {"n": "now"}
        assert (found[b"3"]["n"], found[b"3"][ID], found[b"moved"][ID]) == ("3", "order 3", "moved")
        assert EXPIRES not in found[b"moved"]
        outcomes = description.outcomes_topic.full
        world.eventually(lambda: world.stored(outcomes), "the outcome")
    (outcome,) = world.stored(outcomes)
    assert (outcome.properties[ID], outcome.properties[OUTCOME]) == ("order 9", "cancelled")
