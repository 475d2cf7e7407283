"""Targets whose broker dies, while the level topic and other targets are at another one.

With the default session of Pulsar. ``-s`` prints the effect on each topic.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.topic_name import TopicName
from support.cluster import SESSION_MS, Cluster
from support.cluster_load import WINDOW_ONLY, ClusterLoad
from support.world import RealWorld

pytestmark = [pytest.mark.broker, pytest.mark.timeout(600)]

SECONDS = 60.0
# The end of the broker's session, the takeover, and then no more than a few seconds.
MOST_S = SESSION_MS / 1000 + 20
ON_TIME_S = 5.0


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
    with ClusterLoad(world, cli_process, SECONDS, [level_topic], delivery) as load:
        found = load.measure(cluster.broker_nodes[0].kill, cluster.recover)
        held = sum(world.admin.messages_in(level_topic.held_topic).values())
        lost = load.lost
    for part, effect in found.items():
        print(f"\n{delivery.value}, {part}: {effect.worst_s:.1f} s late, {effect.copies} copies")
    (other,) = (found[part] for part in found if part.endswith("-partition-1"))
    assert (held, lost) == (0, 0), found
    assert not any(effect.disordered for effect in found.values()), found
    assert max(effect.worst_s for effect in found.values()) < MOST_S, found
    assert found["near"].worst_s < ON_TIME_S < found["away"].worst_s, found
    if delivery is Delivery.EFFECTIVELY_ONCE:
        assert other.worst_s < ON_TIME_S, found
        assert not any(effect.copies for effect in found.values()), found
