"""Tests of the admin interface of a cluster while one of its brokers is away."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from delaylevel import topics
from delaylevel.cluster.rest.admin import Admin
from delaylevel.doctor import examine
from delaylevel.doctor.context import State
from delaylevel.errors import BrokerError, BrokerUnreachableError
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.topics.status import status
from support.cluster import Cluster
from support.world import RealWorld

pytestmark = [pytest.mark.broker]

LEVELS = Levels(
    [PartitionStrategy(partition_by=timedelta(minutes=1), maximum_delay=timedelta(minutes=3))]
)


def test_a_level_topic_is_there_when_its_creation_ends(cluster: Cluster, world: RealWorld) -> None:
    """The admin client asks one broker, and the other one owns the topics."""
    one, other = cluster.broker_nodes
    assert cluster.owner(world.topic("x")) is one
    with Admin(other.admin_url) as admin:
        for number in range(30):
            wanted = LevelTopicDescription(
                world.topic(f"orders-{number}-delay-level"), LEVELS, (world.topic("orders"),)
            )
            assert topics.create(admin, wanted) == wanted
            more = replace(wanted, targets=(*wanted.targets, world.topic("bills")))
            assert topics.create(admin, more).targets == more.targets


def stats(admin: Admin, description: LevelTopicDescription) -> bool:
    """Return True if the statistics of a level topic can be read, False while a broker is away."""
    try:
        status(admin, description, 0)
    except BrokerError:
        return False
    return True


def test_the_broker_that_is_away_is_named(cluster: Cluster, world: RealWorld) -> None:
    """The other broker redirects to it until the end of its ZooKeeper session."""
    description = world.level_topic(LEVELS)
    away, living = cluster.broker_nodes
    host = away.admin_url.removeprefix("http://")
    away.kill()
    with Admin(living.admin_url) as admin, pytest.raises(BrokerUnreachableError) as caught:
        admin.partition_stats(description.name.partition(0))
    assert caught.value.address == host
    assert f"the broker at {host} does not answer" in str(caught.value)
    connection = cluster.connection_to(living)
    found = list(examine(connection, description.topic))
    failed = [each for each in found if each.state is State.FAILED]
    assert [host in each.says for each in failed] == [True], failed
    assert any(each.state is State.SKIPPED and host in each.says for each in found)
    with Admin(living.admin_url) as admin:
        cluster.eventually(lambda: stats(admin, description), "a takeover", 90)
    assert not [each for each in examine(connection, description.topic) if host in each.says]
