"""Tests on a cluster of two brokers, with the default settings of Pulsar.

``-s`` prints the lines of the tables in docs/benchmarks.md.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from delaylevel import topics
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.cluster.targets.receivers import topic_stats
from delaylevel.errors import PrerequisiteError
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.topic_name import TopicName
from support.cluster import (
    ONE_LEVEL,
    SESSION_MS,
    WINDOW_ONLY,
    Cluster,
    ClusterLoad,
    two_level_topics,
)
from support.world import RealWorld

pytestmark = [pytest.mark.broker, pytest.mark.timeout(900)]

# A client notices that its broker hangs by its second request for a sign of life, one in 30 s.
NOTICE_S = 60.0
ON_TIME_S = 5.0
#: The faults, by their names in the table in docs/benchmarks.md.
FAULTS: dict[str, Callable[[Cluster], Any]] = {
    "broker killed": lambda on: on.broker_nodes[0].kill(),
    "broker suspended, and not resumed": lambda on: on.broker_nodes[0].suspend(),
    "broker stopped with SIGTERM": lambda on: on.broker_nodes[0].stop(),
    "a bookie killed": lambda on: on.bookie_nodes[0].kill(),
    "ZooKeeper killed and started": lambda on: (on.zookeeper.kill(), on.zookeeper.start()),
}


@pytest.fixture(scope="session")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    try:
        with Cluster(tmp_path_factory.mktemp("cluster")) as shared:
            yield shared
    except PrerequisiteError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture
def cluster(_shared: Cluster) -> Iterator[Cluster]:
    """The cluster that the tests share; at the end, everything runs again."""
    try:
        yield _shared
    finally:
        _shared.recover()


@pytest.fixture
def connection(cluster: Cluster) -> Connection:
    return cluster.connection


@pytest.fixture
def namespace(cluster: Cluster) -> str:
    """A new namespace, all of whose topics are at one broker: the first one."""
    name = f"public/test-{uuid.uuid4().hex[:12]}"
    cluster.create_namespace(name, bundles=1)
    cluster.place(name, cluster.broker_nodes[0])
    return name


@pytest.fixture
def world(connection: Connection, namespace: str) -> Iterator[RealWorld]:
    with ExitStack() as stack:
        yield RealWorld(connection, stack, namespace)


def test_a_level_topic_is_there_when_its_creation_ends(cluster: Cluster, world: RealWorld) -> None:
    """The admin client asks one broker, and the other one owns the topics."""
    one, other = cluster.broker_nodes
    assert cluster.owner(world.topic("x")) is one
    with Admin(other.admin_url) as admin:
        for number in range(30):
            wanted = LevelTopicDescription(
                world.topic(f"orders-{number}-delay-level"), ONE_LEVEL, (world.topic("orders"),)
            )
            assert topics.create(admin, wanted) == wanted
            more = replace(wanted, targets=(*wanted.targets, world.topic("bills")))
            assert topics.create(admin, more).targets == more.targets


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_interrupts_each_part_only_for_a_while(
    cluster: Cluster, world: RealWorld, cli_process: Callable[..., Any], fault: str
) -> None:
    """All topics are at the broker that gets the fault, and its address is given first."""
    described = two_level_topics(world.namespace)
    # The end of the messages, after 75 s, is behind that of every interruption.
    with ClusterLoad(world, cli_process, 75.0, described) as load:
        inject = partial(FAULTS[fault], cluster)
        released, moved = found = [*load.measure(inject, cluster.recover).values()]
        lost, gaps = load.lost, (load.publishing.longest_s, load.administration.longest_s)
    longest_s = gaps[0], moved.worst_s, released.worst_s, gaps[1]
    times = " | ".join(f"{each:.1f}" for each in longest_s)
    print(f"\n| {fault} | {times} | {lost} | {released.copies + moved.copies} |")
    assert (lost, max(each.early_ms for each in found) <= 0) == (0, True), found
    # Through a level, messages of one key may take two ways.
    assert not released.disordered, found
    # A broker's session, the other broker's takeover, and the pauses of clients and movers.
    most_s = SESSION_MS / 1000 + 60 + (NOTICE_S if "suspended" in fault else 0)
    assert max(longest_s) < most_s, found


def described(cluster: Cluster, world: RealWorld) -> LevelTopicDescription:
    """Return a level topic at the second broker, of which only one target is there, too.

    ``near`` is at this broker, ``away`` at the first one, and ``split`` has a partition at each of
    them: 0 at the first one.
    """
    failing, living = cluster.broker_nodes
    suffix = uuid.uuid4().hex[:8]
    home, away, both = (f"public/{name}-{suffix}" for name in ("home", "away", "split"))
    for namespace, broker in ((home, living), (away, failing)):
        cluster.create_namespace(namespace, bundles=1)
        cluster.place(namespace, broker)
    cluster.create_namespace(both, bundles=8)
    for number in range(100):
        split = f"persistent://{both}/split-{number}"
        bundles = [cluster.bundle(f"{split}-partition-{index}") for index in range(2)]
        if len(set(bundles)) == 2:
            break
    world.admin.create_partitioned(TopicName.parse(split), 2)
    for bundle, broker in zip(bundles, cluster.broker_nodes, strict=True):
        cluster.place_bundle(both, bundle, broker)
    targets = f"persistent://{home}/near", f"persistent://{away}/away", split
    return LevelTopicDescription(
        f"persistent://{home}/level-delay-level", WINDOW_ONLY, targets, window_partitions=1
    )


@pytest.mark.parametrize("delivery", list(Delivery))
def test_messages_wait_for_the_broker_that_takes_over_and_delay_no_other_target(
    cluster: Cluster, world: RealWorld, cli_process: Callable[..., Any], delivery: Delivery
) -> None:
    """They are not held: they would come later, and not in their order."""
    level_topic = described(cluster, world)
    with ClusterLoad(world, cli_process, 60.0, [level_topic], delivery) as load:
        found = load.measure(cluster.broker_nodes[0].kill, cluster.recover)
        stats = topic_stats(world.admin, level_topic.held_topic) or {}
        held = sum(each.messages_in for each in stats.values())
        lost = load.lost
    for part, effect in found.items():
        print(f"\n{delivery.value}, {part}: {effect.worst_s:.1f} s late, {effect.copies} copies")
    (other,) = (found[part] for part in found if part.endswith("-partition-1"))
    assert (held, lost) == (0, 0), found
    assert not any(effect.disordered for effect in found.values()), found
    # The end of the broker's session, the takeover, and then no more than a few seconds.
    assert max(effect.worst_s for effect in found.values()) < SESSION_MS / 1000 + 20, found
    assert found["near"].worst_s < ON_TIME_S < found["away"].worst_s, found
    if delivery is Delivery.EFFECTIVELY_ONCE:
        assert other.worst_s < ON_TIME_S, found
        assert not any(effect.copies for effect in found.values()), found
