"""The interruption of each part by each fault, with the default settings of Pulsar.

All topics are at the broker that gets the fault, and the addresses of both brokers are given, those
of this broker first. ``-s`` prints the table in docs/benchmarks.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.cluster import SESSION_MS, Cluster
from support.cluster_load import ClusterLoad, two_level_topics
from support.world import RealWorld

pytestmark = [pytest.mark.broker, pytest.mark.timeout(900)]

# The end of the messages is behind that of every interruption.
SECONDS = 75.0
# A broker's session, the other broker's takeover, and the pauses of clients and movers.
MOST_S = SESSION_MS / 1000 + 60
# A client notices that its broker hangs by its second request for a sign of life, one in 30 s.
NOTICE_S = 60.0
#: The table in docs/benchmarks.md, printed at the end.
TABLE = [
    "| fault | bookies | producer | mover | dispatcher | commands | not received | copies | load |",
    "|---|---|---|---|---|---|---|---|---|",
]


@pytest.fixture(scope="module", autouse=True)
def _table() -> Iterator[None]:
    yield
    print("", *TABLE, sep="\n")


def kill_broker(cluster: Cluster) -> None:
    cluster.broker_nodes[0].kill()


def suspend_broker(cluster: Cluster) -> None:
    cluster.broker_nodes[0].suspend()


def stop_broker(cluster: Cluster) -> None:
    cluster.broker_nodes[0].stop()


def kill_bookie(cluster: Cluster) -> None:
    cluster.bookie_nodes[0].kill()


def restart_zookeeper(cluster: Cluster) -> None:
    cluster.zookeeper.kill()
    cluster.zookeeper.start()


#: The faults, and their names in the table.
FAULTS = {
    kill_broker: "broker killed",
    suspend_broker: "broker suspended, and not resumed",
    stop_broker: "broker stopped with SIGTERM",
    kill_bookie: "a bookie killed",
    restart_zookeeper: "ZooKeeper killed and started",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_interrupts_each_part_only_for_a_while(
    cluster: Cluster,
    world: RealWorld,
    cli_process: Callable[..., Any],
    fault: Callable[[Cluster], None],
) -> None:
    described = two_level_topics(world.namespace)
    with ClusterLoad(world, cli_process, SECONDS, described) as load:
        released, moved = found = [*load.measure(lambda: fault(cluster), cluster.recover).values()]
        lost, gaps = load.lost, (load.publishing.longest_s, load.administration.longest_s)
    longest_s = gaps[0], moved.worst_s, released.worst_s, gaps[1]
    times = " | ".join(f"{each:.1f}" for each in longest_s)
    counts = f"{lost} | {released.copies + moved.copies} | {os.getloadavg()[0]:.0f}"
    TABLE.append(f"| {FAULTS[fault]} | {len(cluster.bookie_nodes)} | {times} | {counts} |")
    print(f"\n{TABLE[-1]}")
    assert (lost, max(each.early_ms for each in found) <= 0) == (0, True), found
    # Through a level, messages of one key may take two ways.
    assert not released.disordered, found
    most_s = MOST_S + (NOTICE_S if fault is suspend_broker else 0)
    assert max(longest_s) < most_s, found
