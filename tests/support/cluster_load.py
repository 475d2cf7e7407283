"""A load on a cluster that shows how long each part is interrupted by a fault.

All messages that become due are stored before the fault. So the lateness of a message is that of
the parts behind it, whatever becomes of its producer.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import pulsar

from delaylevel import topics, wrap
from delaylevel.cluster.connection.settings import Connection
from delaylevel.errors import BrokerError
from delaylevel.model.clock import SystemClock
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.status import status
from support.world import QUIET, RealWorld, eventually

now_ms = SystemClock().now_ms

# Messages go to the window at once, or through a level.
WINDOW_ONLY = Levels(
    [PartitionStrategy(partition_by=timedelta(minutes=20), maximum_delay=timedelta(hours=1))]
)
ONE_LEVEL = Levels(
    [PartitionStrategy(partition_by=timedelta(seconds=5), maximum_delay=timedelta(minutes=4))]
)
KEYS = 16
# The payload of messages that show that every part works.
_PROBE = b"probe"
_START_S = 180.0
_LEAD_S = 20.0
_STEP_MS = 100


class Gaps:
    """The longest time between two successes of a part, in s."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin to measure."""
        self._last_s, self.longest_s, self.count = time.monotonic(), 0.0, 0

    def succeeded(self) -> None:
        """Note a success."""
        now_s = time.monotonic()
        self.longest_s = max(self.longest_s, now_s - self._last_s)
        self._last_s = now_s
        self.count += 1


class Effect(NamedTuple):
    """The effect of a fault on the messages of one target, or partition of it.

    Attributes:
        worst_s: worst lateness.
        disordered: number of messages behind a later one with the same key.
        early_ms: the earliest arrival before a due time.
    """

    worst_s: float
    arrived: int
    copies: int
    disordered: int
    early_ms: int


class Arrivals:
    """The messages that a topic has received.

    Attributes:
        flows: True once a probe has arrived, which does not count.

    A reader that is disconnected is replaced at once: the client itself would wait longer after
    each attempt. The former one is left alone, as its close may take for ever.
    """

    def __init__(self, connection: Connection, topic: str, stop: threading.Event) -> None:
        short = {"operation_timeout_seconds": 10, "connection_timeout_ms": 2_000}
        self._open_client = partial(connection.open_client, logger=QUIET, **short)
        self._topic = topic
        self._stop = stop
        self._last: Any = pulsar.MessageId.earliest
        self._readers: list[Any] = [self._open()]
        self.flows = False
        self.copies: Counter[str] = Counter()
        self._order: dict[str, list[int]] = defaultdict(list)  # by key
        self._late_ms = [0]
        self.thread = threading.Thread(target=self._run, name=f"arrivals {topic}", daemon=True)
        self.thread.start()

    def _open(self) -> Any:
        return self._open_client().create_reader(self._topic, self._last)

    def _run(self) -> None:
        while not self._stop.is_set():
            reader = self._readers[-1]
            try:
                message = reader.read_next(200)
            except pulsar.PulsarException:
                if not reader.is_connected():
                    with contextlib.suppress(pulsar.PulsarException):
                        self._readers.append(self._open())
                continue
            self._last = message.message_id()
            if message.data() == _PROBE:
                self.flows = True
                continue
            name = message.data().decode()
            if not self.copies[name]:
                self._order[message.partition_key()].append(int(name))
                self._late_ms.append(now_ms() - int(message.properties()["delaylevel.due"]))
            self.copies[name] += 1

    def effect(self) -> Effect:
        """Return what has arrived so far."""
        pairs = (pair for order in self._order.values() for pair in pairwise(order))
        return Effect(
            worst_s=max(self._late_ms) / 1000,
            arrived=len(self.copies),
            copies=sum(self.copies.values()) - len(self.copies),
            disordered=sum(earlier > later for earlier, later in pairs),
            early_ms=-min(self._late_ms),
        )


class ClusterLoad:
    """A producer, the process and the consumers of level topics on a cluster.

    Args:
        world: a namespace of the cluster, with the addresses that all parts use.
        cli_process: function that starts the program with arguments; the fixture of this name.
        seconds: time over which the messages become due.
        described: the level topics; their targets are created unless they exist.

    Attributes:
        publishing: confirmations of messages sent with ``wrap()`` to the first level topic.
        administration: successes of ``describe`` and the statistics of the last one.
        lost: number of messages that have not arrived, after `measure`.
    """

    def __init__(
        self,
        world: RealWorld,
        cli_process: Callable[..., Any],
        seconds: float,
        described: Sequence[LevelTopicDescription],
        delivery: Delivery = Delivery.AT_LEAST_ONCE,
    ) -> None:
        self._world, self._cli_process = world, cli_process
        self._described, self._delivery = described, delivery
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._count = int(seconds * 1000 / _STEP_MS)
        self._arrivals: dict[str, Arrivals] = {}
        self.publishing, self.administration = Gaps(), Gaps()

    # -- the parts

    def __enter__(self) -> ClusterLoad:
        self._client = self._world.client()
        for described in self._described:
            for target in described.targets:
                self._prepare(target)
            topics.create(self._world.admin, described)
        names = (each.topic for each in self._described)
        self._process = self._cli_process("run", *names, "--delivery", self._delivery.value)
        self._produce([_PROBE] * KEYS, lambda _: now_ms() + 8_000)
        for part, arrivals in self._arrivals.items():
            # On a busy machine they start slowly.
            eventually(lambda arrivals=arrivals: arrivals.flows, f"a probe of {part}", _START_S)
        self._begin_ms = now_ms() + int(_LEAD_S * 1000)
        bodies = [str(number).encode() for number in range(self._count)]
        self._produce(bodies, lambda number: self._begin_ms + number * _STEP_MS)
        for target in (self._publish, self._administer):
            self._threads.append(threading.Thread(target=target))
            self._threads[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for arrivals in self._arrivals.values():
            arrivals.thread.join(20)
        self._process.kill()

    def _prepare(self, target: str) -> None:
        self._client.create_producer(target).close()
        self._world.admin.create_subscription(TopicName.parse(target), "keep")
        if self._delivery is Delivery.EFFECTIVELY_ONCE:
            self._world.deduplicate_topic(target)
        for part in map(TopicName.parse, self._client.get_topic_partitions(target)):
            self._arrivals[part.local] = Arrivals(self._world.connection, part.full, self._stop)

    def _produce(self, bodies: Sequence[bytes], due_ms: Callable[[int], int]) -> None:
        """Store messages for all targets, each with its due time."""
        for described in self._described:
            for target in described.targets:
                failures: list[Any] = []
                producer = self._client.create_producer(
                    target,
                    enable_delay_level_topic=True,
                    delay_level_topic=described.topic,
                    batching_enabled=False,
                    block_if_queue_full=True,
                )
                for number, body in enumerate(bodies):
                    producer.send_async(
                        body,
                        lambda result, _, failures=failures: (
                            result == pulsar.Result.Ok or failures.append(result)
                        ),
                        partition_key=str(number % KEYS),
                        deliver_at=due_ms(number),
                    )
                producer.flush()
                assert not failures
                producer.close()

    def _publish(self) -> None:
        """Send messages that are never due here, one every 50 ms."""
        described = self._described[0]
        producer = wrap(
            self._client.create_producer(described.targets[0]),
            self._client,
            admin=self._world.admin,
            delay_level_topic=described.topic,
            plain_producer=True,
            block_if_queue_full=True,
        )

        def confirmed(result: Any, _: Any) -> None:
            if result == pulsar.Result.Ok:
                self.publishing.succeeded()

        while not self._stop.wait(0.05):
            with contextlib.suppress(pulsar.PulsarException, BrokerError):
                producer.send_async(b"-1", confirmed, deliver_after=timedelta(minutes=50))
        producer.close()

    def _administer(self) -> None:
        """Do what commands do, every 200 ms."""
        admin = self._world.admin
        while not self._stop.wait(0.2):
            with contextlib.suppress(BrokerError):
                status(admin, topics.describe(admin, self._described[-1].topic), 0)
                self.administration.succeeded()

    # -- the fault

    def measure(
        self, fault: Callable[[], Any], after: Callable[[], Any] = lambda: None
    ) -> dict[str, Effect]:
        """Cause a fault, and return its effect on each target or partition, by its local name.

        Args:
            after: function that is called when everything has arrived.
        """
        time.sleep(max(0, self._begin_ms + 5_000 - now_ms()) / 1000)
        for part, arrivals in self._arrivals.items():
            assert arrivals.copies, f"nothing arrived at {part} before the fault"
            assert arrivals.effect().worst_s < 10, f"{part} was not on time before the fault"
        both = self.publishing, self.administration
        for gaps in both:
            gaps.start()
        try:
            fault()
            with contextlib.suppress(AssertionError):
                eventually(lambda: not self.lost, "everything", 300)
            # The end of the interruption is a success.
            for gaps in both:
                count = gaps.count
                eventually(lambda gaps=gaps, count=count: gaps.count > count, "a success", 120)
        finally:
            after()
        return {part: arrivals.effect() for part, arrivals in self._arrivals.items()}

    @property
    def lost(self) -> int:
        """Number of messages that have not arrived."""
        arrived = sum(len(each.copies) for each in self._arrivals.values())
        return self._count * sum(len(each.targets) for each in self._described) - arrived


def two_level_topics(namespace: str) -> list[LevelTopicDescription]:
    """Return ``released``, whose messages wait in the window, and ``moved``, which has a level."""
    return [
        LevelTopicDescription(f"{target}-delay-level", levels, (target,))
        for target, levels in (
            (f"persistent://{namespace}/released", WINDOW_ONLY),
            (f"persistent://{namespace}/moved", ONE_LEVEL),
        )
    ]
