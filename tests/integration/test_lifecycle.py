"""Tests of expansion, draining and deletion on a real broker."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
from click.testing import Result

from delaylevel.errors import DelayTooLongError
from delaylevel.model.level_topic import SUBSCRIPTION
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.topics import lifecycle
from support.background import Moving
from support.world import RealWorld

UNIT = timedelta(milliseconds=300)
BRIEF = Levels(PartitionStrategy(partition_by=UNIT, maximum_delay=4 * UNIT))
MINUTES = Levels(PartitionStrategy(partition_by="MINUTE", maximum_delay=timedelta(minutes=5)))


@pytest.fixture
def run(invoke: Callable[..., Result]) -> Callable[..., Result]:
    return functools.partial(invoke, "levels")


# -- expanding


def test_an_expansion_of_a_level_topic_in_use_loses_nothing(
    world: RealWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delaylevel.topics.roster.LIFETIME_S", 0.05)
    description = world.level_topic(BRIEF)
    get = world.arrivals(description.targets[0])
    moving = Moving(world.mover(description))
    producer = world.client().create_producer(
        description.targets[0], enable_delay_level_topic=True, partition_strategy=BRIEF.strategies
    )
    done = threading.Event()
    sent: list[bytes] = []

    def send() -> None:
        while not done.wait(0.005):
            body = f"m{len(sent)}".encode()
            producer.send(body, deliver_after=UNIT * (1 + len(sent) % 3))
            sent.append(body)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(DelayTooLongError):
            producer.send(b"too long", deliver_after=9 * UNIT)
        expanded = lifecycle.expand(world.admin, description.topic, 10 * UNIT)
        monkeypatch.setattr("delaylevel.producer.level_topic_cache._REFUSED_EVERY_S", 0)
        for number in range(4, 10):
            body = f"long{number}".encode()
            producer.send(body, deliver_after=UNIT * number)
            sent.append(body)
    finally:
        done.set()
        sender.join()
    assert producer.description == expanded
    assert expanded.former == (BRIEF,)
    assert expanded.levels[0].partitions == 9
    for stats in world.admin.partitioned_stats(expanded.name).values():
        assert stats.subscriptions[SUBSCRIPTION].durable
    found = get(len(sent), seconds=60)
    moving.stop()
    assert sorted(item.message.data() for item in found) == sorted(sent)
    assert len({item.message.properties()["delaylevel.id"] for item in found}) == len(sent)
    producer.close()


# -- draining and deleting


def test_a_level_topic_is_deleted_only_when_nothing_is_pending(
    world: RealWorld, run: Callable[..., Result]
) -> None:
    description = world.level_topic(MINUTES)
    (orders,) = description.targets

    def refused(*arguments: str) -> str:
        answer = run(*arguments, orders)
        assert answer.exit_code == 1
        return answer.stderr

    with world.client().create_producer(orders, enable_delay_level_topic=True) as producer:
        for body in (b"x", b"y"):
            producer.send(body, deliver_after=timedelta(minutes=3))
        assert "in use" in refused("delete", "--discard", "2")
    assert "--discard 2" in refused("delete")
    assert "not 3" in refused("delete", "--discard", "3")
    with world.mover(description):
        assert "another mover" in refused("drain")
    consumer = world.plain_client.subscribe(orders, "one-by-one")
    assert f"one-by-one of {orders} (Exclusive)" in refused("drain")
    consumer.close()
    assert len(world.stored(description.topic)) == 2
    dues = {item.properties["delaylevel.due"] for item in world.stored(description.topic)}

    assert run("drain", orders, "--allow-early").exit_code == 0
    answer = run("delete", orders, "-o", "json")
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["deleted"]
    assert world.admin.list_partitioned_topics(world.namespace) == []
    found = world.stored(orders)
    assert [item.value for item in found] == [b"x", b"y"]
    assert {item.properties["delaylevel.due"] for item in found} == dues
