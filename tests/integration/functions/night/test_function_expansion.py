"""Tests of the expansion of a level topic while its Function runs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from delaylevel.model.level_topic import Mover
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.topics import lifecycle
from support.world import RealWorld

pytestmark = [pytest.mark.broker, pytest.mark.timeout(300)]

UNIT = timedelta(seconds=2)
LEVELS = Levels(PartitionStrategy(partition_by=UNIT, maximum_delay=3 * UNIT))


def test_a_running_function_moves_messages_of_new_partitions(
    world: RealWorld, deployed: Callable[..., Any]
) -> None:
    description = world.level_topic(LEVELS, mover=Mover.FUNCTION)
    get = world.arrivals(description.targets[0])
    deployed(description)
    producer = world.client().create_producer(
        description.targets[0], enable_delay_level_topic=True, mover=Mover.FUNCTION
    )
    producer.send(b"first", deliver_after=UNIT)
    assert get(1, 90)[0].message.data() == b"first"
    longer = lifecycle.longer_levels(LEVELS, 8 * UNIT)
    expanded = lifecycle.expand(world.admin, description.topic, longer)
    sent = []
    for number in range(1, 8):
        body = f"{number}".encode()
        producer.send(body, deliver_after=UNIT * number)
        sent.append(body)
    # The instance's client looks for new partitions once a minute.
    found = get(len(sent), 150)
    world.drained(expanded)
    producer.close()
    assert sorted(item.message.data() for item in found) == sorted(sent)
