"""Targets whose broker dies, while the level topic and other targets are at another one.

With the default session of Pulsar. ``-s`` prints the effect on each topic.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from delaylevel import topics
from delaylevel.cluster.port import TopicPolicies
from delaylevel.cluster.rest.admin import Admin
from delaylevel.model import envelope as env
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.topic_name import TopicName
from support.cluster import DEFAULT_SESSION_MS, Cluster, cluster_in
from support.cluster_load import KEYS, PROBE, WINDOW_ONLY, Arrivals, Processes, now_ms
from support.world import eventually, quiet_client


@dataclass(frozen=True)
class TargetEffect:
    """The effect of a fault on one topic, or one partition.

    Attributes:
        worst_s: worst lateness of a message.
        arrived, copies, disordered: as for :class:`cluster_load.Interruption`.
    """

    worst_s: float
    arrived: int
    copies: int
    disordered: int


class TargetLoad:
    """A dispatcher with three targets, and consumers of them.

    ``near`` is at the broker that lives, ``away`` at the other one, and ``split`` has a partition
    at each of them: 0 at the broker that gets the fault.

    Args:
        directory: folder for logs and spill files.
        seconds: time over which the messages become due, after `LEAD_S`.

    Attributes:
        failing, living: the broker that gets the fault, and the other one.
        parts: full names of the topics and partitions, by their names in the output.
        arrivals: messages that have arrived, by the same names.
        processes: the mover and the dispatcher.
    """

    LEAD_S = 10.0
    STEP_MS = 100

    def __init__(
        self, cluster: Cluster, directory: Path, delivery: Delivery, seconds: float
    ) -> None:
        self._cluster = cluster
        self.processes = Processes(cluster.connection, directory)
        self._directory = directory
        self._delivery = delivery
        self._count = int(seconds * 1000 / self.STEP_MS)
        self._stop = threading.Event()
        self._suffix = uuid.uuid4().hex[:8]
        self.failing, self.living = cluster.broker_nodes

    def __enter__(self) -> TargetLoad:
        connection = self._cluster.connection
        self._admin = Admin.from_connection(connection)
        self._client = quiet_client(connection)
        home = self._namespace("home", self.living)
        away = self._namespace("away", self.failing)
        near, gone = f"persistent://{home}/near", f"persistent://{away}/away"
        split = self._split_topic()
        self.parts = {
            "near": near,
            "away": gone,
            "split, failing partition": f"{split}-partition-0",
            "split, other partition": f"{split}-partition-1",
        }
        for topic in (near, gone):
            self._client.subscribe(topic, "keep").close()
        self._admin.create_subscription(TopicName.parse(split), "keep")
        if self._delivery is Delivery.EFFECTIVELY_ONCE:
            for topic in (near, gone, split):
                policies = TopicPolicies(deduplication=True)
                self._admin.set_topic_policies(TopicName.parse(topic), policies)
            for topic in self.parts.values():
                name = TopicName.parse(topic)
                deduplicates = lambda name=name: self._admin.partition_stats(name).deduplication  # noqa: E731
                eventually(deduplicates, "deduplication")
        targets = (near, gone, split)
        name = f"persistent://{home}/level-delay-level"
        self.description = LevelTopicDescription(
            name, WINDOW_ONLY, targets, final_window=FinalWindow.TRACKER, window_partitions=1
        )
        topics.create(self._admin, self.description)
        self.arrivals = {
            part: Arrivals(connection, topic, self._stop) for part, topic in self.parts.items()
        }
        spill = str(self._directory / "spill")
        delivery = str(self._delivery.value)
        self.processes.run("run", name, "--spill-dir", spill, "--delivery", delivery)
        self._producer = self._client.create_producer(
            self.description.window_topic.partition(0).full, block_if_queue_full=True
        )
        self._probe(targets)
        self._store(targets)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for each in self.arrivals.values():
            each.thread.join(20)
        self.processes.kill()
        self._client.shutdown()
        self._admin.close()

    def _namespace(self, name: str, broker: Any) -> str:
        full = f"public/{name}-{self._suffix}"
        self._cluster.create_namespace(full, bundles=1)
        self._cluster.place(full, broker)
        return full

    def _split_topic(self) -> str:
        """Return a topic with two partitions, of which each broker has one."""
        namespace = f"public/split-{self._suffix}"
        self._cluster.create_namespace(namespace, bundles=8)
        for number in range(100):
            topic = f"persistent://{namespace}/split-{number}"
            bundles = [self._cluster.bundle(f"{topic}-partition-{index}") for index in range(2)]
            if len(set(bundles)) == 2:
                break
        self._admin.create_partitioned(TopicName.parse(topic), 2)
        for bundle, broker in zip(bundles, self._cluster.broker_nodes, strict=True):
            self._cluster.place_bundle(namespace, bundle, broker)
        return topic

    def _store(self, targets: tuple[str, ...]) -> None:
        """Store all messages in the window."""
        self.begin_ms = now_ms() + int(self.LEAD_S * 1000)
        for number in range(self._count):
            for target in targets:
                due_ms = self.begin_ms + number * self.STEP_MS
                self._send(str(number).encode(), target, due_ms, number)
        self._producer.flush()

    def _probe(self, targets: tuple[str, ...]) -> None:
        """Wait until messages for all partitions have arrived."""
        for number in range(KEYS):
            for target in targets:
                self._send(PROBE, target, now_ms(), number)
        self._producer.flush()
        for part, arrivals in self.arrivals.items():
            eventually(lambda arrivals=arrivals: arrivals.flows, f"a probe at {part}", 180)

    def _send(self, payload: bytes, target: str, due_ms: int, number: int) -> None:
        name = TopicName.parse(target).local
        properties = {
            env.DUE: str(due_ms),
            env.TARGET: target,
            env.ID: f"{name}-{payload.decode()}-{number}",
        }
        self._producer.send_async(
            payload, lambda *_: None, properties=properties, partition_key=str(number % KEYS)
        )

    def measure(self, fault: Callable[[], Any]) -> dict[str, TargetEffect]:
        """Cause a fault; return its effect on each part once everything has arrived."""
        eventually(lambda: now_ms() > self.begin_ms + 5_000, "a due time", self.LEAD_S + 60)
        for part, arrivals in self.arrivals.items():
            assert arrivals.copies, f"nothing arrived at {part} before the fault"
            assert arrivals.worst_ms < 10_000, f"{part} was not on time before the fault"
        fault()
        with contextlib.suppress(AssertionError):
            eventually(lambda: self._arrived() == 3 * self._count, "everything", 240)
        return {part: _effect(arrivals) for part, arrivals in self.arrivals.items()}

    @property
    def held(self) -> int:
        """Number of messages that were held."""
        return sum(self._admin.messages_in(self.description.held_topic).values())

    @property
    def lost(self) -> int:
        """Number of messages that have not arrived."""
        return 3 * self._count - self._arrived()

    def _arrived(self) -> int:
        return sum(len(each.copies) for each in self.arrivals.values())


def _effect(arrivals: Arrivals) -> TargetEffect:
    return TargetEffect(
        worst_s=arrivals.worst_ms / 1000,
        arrived=len(arrivals.copies),
        copies=sum(arrivals.copies.values()) - len(arrivals.copies),
        disordered=sum(
            earlier > later
            for order in arrivals.order.values()
            for earlier, later in pairwise(order)
        ),
    )


@contextlib.contextmanager
def target_load_on(*arguments: Any) -> Iterator[TargetLoad]:
    """Yield a running `TargetLoad`; the arguments are its own."""
    load = TargetLoad(*arguments)
    try:
        with load:
            yield load
    finally:
        load.processes.kill()  # also if it could not be entered


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
