"""A test of the deployed Function: a deletion keeps what is parked."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from delaylevel.cluster.connection.settings import Connection
from delaylevel.errors import LevelTopicError
from delaylevel.functions import deployment, health
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription
from support.world import RealWorld


def test_delete_keeps_parked_messages_and_a_new_deployment_moves_them(
    description: LevelTopicDescription,
    producer: Any,
    deployed: Callable[..., Any],
    world: RealWorld,
    connection: Connection,
) -> None:
    get = world.arrivals(description.targets[0])
    made = deployed(description)
    assert not made.updated
    producer.send(b"first", deliver_after=timedelta(seconds=1.5))
    get(1, 60)
    world.drained(description)  # acknowledgement follows arrival
    for number in range(20):
        producer.send(b"%d" % number, deliver_after=timedelta(seconds=8))
    deployment.delete(connection, description)
    # No mover runs, so these stay whatever their due times.
    for number in range(20, 40):
        producer.send(b"%d" % number, deliver_after=timedelta(seconds=4))
    assert world.backlog(description) >= 20
    for member in description.members():
        assert SUBSCRIPTION in world.admin.subscriptions(member.topic.partition(0))
    with pytest.raises(LevelTopicError, match="is not deployed"):
        deployment.delete(connection, description)
    with pytest.raises(LevelTopicError, match="is not deployed"):
        health.status(connection, world.admin, description, 0)
    assert not deployed(description).updated
    again = deployed(description, parallelism=2)
    assert again.updated
    found = get(40, 120)  # an instance that fails at its start is restarted after 30 s
    assert {item.message.data() for item in found} == {b"%d" % n for n in range(40)}
    at = health.status(connection, world.admin, description, SystemClock().now_ms())
    assert len(at.instances) == 2
