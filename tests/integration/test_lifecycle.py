"""A test of draining and deletion on a real broker."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from datetime import timedelta

import pytest
from click.testing import Result

from delaylevel.model.strategy import Levels, PartitionStrategy
from support.world import RealWorld

MINUTES = Levels(PartitionStrategy(partition_by="MINUTE", maximum_delay=timedelta(minutes=5)))


@pytest.fixture
def run(invoke: Callable[..., Result]) -> Callable[..., Result]:
    return functools.partial(invoke, "levels")


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
