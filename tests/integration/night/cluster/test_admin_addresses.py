"""A test of the admin interface of a cluster, of which each broker owns some topics."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from delaylevel import topics
from delaylevel.cluster.rest.admin import Admin
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
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
