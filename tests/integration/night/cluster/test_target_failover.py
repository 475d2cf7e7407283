"""Targets whose broker dies, while the level topic and other targets are at another one.

With the default session of Pulsar. ``-s`` prints the effect on each topic.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from delaylevel.model.delivery import Delivery
from support.cluster import DEFAULT_SESSION_MS, Cluster, cluster_in
from support.cluster_targets import target_load_on

pytestmark = [pytest.mark.broker, pytest.mark.timeout(600)]

SECONDS = 60.0
# The end of the broker's session, the takeover, and then no more than a few seconds.
MOST_S = DEFAULT_SESSION_MS / 1000 + 20
ON_TIME_S = 5.0


@pytest.fixture(scope="module")
def two_brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with Pulsar's default session."""
    with cluster_in(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.mark.parametrize("delivery", list(Delivery))
def test_messages_wait_for_the_broker_that_takes_over_and_delay_no_other_target(
    two_brokers: Cluster, tmp_path: Path, delivery: Delivery
) -> None:
    """They are not held: they would come later, and not in their order."""
    try:
        with target_load_on(two_brokers, tmp_path, delivery, SECONDS) as load:
            found = load.measure(load.failing.kill)
            held, lost = load.held, load.lost
    finally:
        two_brokers.recover()
    for part, effect in found.items():
        print(f"\n{delivery.value}, {part}: {effect.worst_s:.1f} s late, {effect.copies} copies")
    assert (held, lost) == (0, 0), found
    assert not any(effect.disordered for effect in found.values()), found
    assert max(effect.worst_s for effect in found.values()) < MOST_S, found
    assert found["near"].worst_s < ON_TIME_S, found
    if delivery is Delivery.EFFECTIVELY_ONCE:
        assert found["split, other partition"].worst_s < ON_TIME_S, found
        assert not any(effect.copies for effect in found.values()), found
