"""A load on a cluster that shows how long each part is interrupted by a fault.

All messages that become due are stored before the fault. So the lateness of a message is that of
the parts behind it, whatever becomes of its producer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pulsar

from delaylevel import DelayLevelClient, topics, wrap
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.errors import BrokerError
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.status import status
from support.world import QUIET, eventually

now_ms = SystemClock().now_ms

# Messages go to the window at once, or through a level.
WINDOW_ONLY = Levels(
    [PartitionStrategy(partition_by=timedelta(minutes=20), maximum_delay=timedelta(hours=1))]
)
ONE_LEVEL = Levels(
    [PartitionStrategy(partition_by=timedelta(seconds=5), maximum_delay=timedelta(minutes=4))]
)
KEYS = 16
#: The payload of messages that show that every part works.
PROBE = b"probe"
_START_S = 180.0


class Gaps:
    """The longest time between two successes of a part, in s."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()
        self.longest_s = 0.0
        self.count = 0

    def succeeded(self) -> None:
        """Note a success."""
        now_s = time.monotonic()
        self.longest_s = max(self.longest_s, now_s - self._last_s)
        self._last_s = now_s
        self.count += 1

    def start(self) -> None:
        """Begin to measure."""
        self._last_s, self.longest_s, self.count = time.monotonic(), 0.0, 0


class Arrivals:
    """The messages that a target has received, and their lateness.

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
        self.order: dict[str, list[int]] = defaultdict(list)  # by key
        self.worst_ms = 0
        self.earliest_ms = 0
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
            if message.data() == PROBE:
                self.flows = True
                continue
            late_ms = now_ms() - int(message.properties()["delaylevel.due"])
            name = message.data().decode()
            if not self.copies[name]:
                self.order[message.partition_key()].append(int(name))
                self.worst_ms = max(self.worst_ms, late_ms)
                self.earliest_ms = min(self.earliest_ms, late_ms)
            self.copies[name] += 1


@dataclass(frozen=True)
class Interruption:
    """The effect of a fault.

    Attributes:
        publish_s: longest time without a confirmation of a message sent with ``wrap()``.
        release_s: worst lateness of a message that waited in the window.
        hand_off_s: worst lateness of a message that a mover had to hand off.
        admin_s: longest time without a success of ``describe`` and the statistics.
        lost, copies: numbers of messages.
        disordered: number of messages from the window behind a later one with the same key.
        early_ms: the earliest arrival before a due time, in ms.
    """

    publish_s: float
    release_s: float
    hand_off_s: float
    admin_s: float
    lost: int
    copies: int
    disordered: int
    early_ms: int


class Processes:
    """Commands of ours as processes of their own.

    Args:
        directory: folder for their logs.
    """

    def __init__(self, connection: Connection, directory: Path) -> None:
        self._connection = connection
        self._directory = directory
        self._running: list[subprocess.Popen[bytes]] = []

    def run(self, *arguments: str) -> None:
        """Start a command; its first argument is the name of its log."""
        log = self._directory / f"{arguments[0]}.log"
        with log.open("wb") as output:
            command = [sys.executable, "-m", "delaylevel"]
            command += ["--service-url", self._connection.service_url]
            command += ["--admin-url", self._connection.admin_url, *arguments]
            environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
            self._running.append(
                subprocess.Popen(command, stdout=output, stderr=output, env=environ)
            )

    def kill(self) -> None:
        """Kill all of them."""
        for process in self._running:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


class ClusterLoad:
    """A producer, a mover, dispatchers and consumers on one namespace of a cluster.

    Args:
        connection: the addresses that all parts use.
        namespace: full name of a namespace.
        directory: folder for logs and spill files.
        seconds: time over which the messages become due, after `LEAD_S`.

    Attributes:
        processes: the mover and the dispatcher.
    """

    LEAD_S = 20.0
    STEP_MS = 100

    def __init__(
        self, connection: Connection, namespace: str, directory: Path, seconds: float
    ) -> None:
        self._connection = connection
        self._namespace = namespace
        self._directory = directory
        self._stop = threading.Event()
        self.processes = Processes(connection, directory)
        self._threads: list[threading.Thread] = []
        self._count = int(seconds * 1000 / self.STEP_MS)
        self.publishing, self.administration = Gaps(), Gaps()

    # -- the parts

    def __enter__(self) -> ClusterLoad:
        self.client = DelayLevelClient.from_connection(self._connection, logger=QUIET)
        self._admin = Admin.from_connection(self._connection)
        for name, levels in (("released", WINDOW_ONLY), ("moved", ONE_LEVEL)):
            wanted = LevelTopicDescription(
                self.topic(f"{name}-delay-level"), levels, (self.topic(name),)
            )
            self._plain(name).close()
            self._admin.create_subscription(TopicName.parse(self.topic(name)), "keep")
            topics.create(self._admin, wanted)
        self.released = Arrivals(self._connection, self.topic("released"), self._stop)
        self.moved = Arrivals(self._connection, self.topic("moved"), self._stop)
        names = [self.topic("released"), self.topic("moved")]
        self.processes.run("run", *names, "--spill-dir", str(self._directory / "spill"))
        self._probe()
        self._store()
        for target in (self._publish, self._administer):
            self._threads.append(threading.Thread(target=target))
            self._threads[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for arrivals in (self.released, self.moved):
            arrivals.thread.join(10)
        self.processes.kill()
        self.client.shutdown()
        self._admin.close()

    def topic(self, name: str) -> str:
        """Return the full name of a topic in the namespace."""
        return f"persistent://{self._namespace}/{name}"

    def _plain(self, name: str) -> Any:
        return self.client.create_producer(self.topic(name))

    def _probe(self) -> None:
        """Wait until a message has passed all parts: on a busy machine they start slowly."""
        for name, arrivals in (("released", self.released), ("moved", self.moved)):
            producer = self.client.create_producer(self.topic(name), enable_delay_level_topic=True)
            producer.send(PROBE, deliver_after=timedelta(seconds=8))
            producer.close()
            eventually(lambda arrivals=arrivals: arrivals.flows, f"a probe of {name}", _START_S)

    def _store(self) -> None:
        """Store all messages that become due."""
        self.begin_ms = now_ms() + int(self.LEAD_S * 1000)
        for name in ("released", "moved"):
            producer = self.client.create_producer(
                self.topic(name),
                enable_delay_level_topic=True,
                batching_enabled=False,
                block_if_queue_full=True,
            )
            results: Counter[Any] = Counter()
            for number in range(self._count):
                due_ms = self.begin_ms + number * self.STEP_MS
                due = datetime.fromtimestamp(due_ms / 1000, timezone.utc)
                producer.send_async(
                    str(number).encode(),
                    lambda result, _, results=results: results.update([str(result)]),
                    partition_key=str(number % KEYS),
                    deliver_at=due,
                )
            producer.flush()
            assert results == {"Result.Ok": self._count} or sum(results.values()) == self._count
            producer.close()

    def _publish(self) -> None:
        """Send messages that are never due here, one every 50 ms."""
        plain = self._plain("released")
        producer = wrap(plain, self.client, admin=self._admin, block_if_queue_full=True)

        def confirmed(result: Any, _: Any) -> None:
            if result == pulsar.Result.Ok:
                self.publishing.succeeded()

        while not self._stop.wait(0.05):
            with contextlib.suppress(pulsar.PulsarException, BrokerError):
                producer.send_async(b"-1", confirmed, deliver_after=timedelta(minutes=50))
        producer.close()

    def _administer(self) -> None:
        """Do what commands do, every 200 ms."""
        while not self._stop.wait(0.2):
            with contextlib.suppress(BrokerError):
                described = topics.describe(self._admin, self.topic("moved"))
                status(self._admin, described, 0)
                self.administration.succeeded()

    # -- the fault

    def wait_until(self, seconds: float) -> None:
        """Wait until a time after the first due time."""
        at_ms = self.begin_ms + int(seconds * 1000)
        time.sleep(max(0, at_ms - now_ms()) / 1000)

    def measure(self, fault: Callable[[], Any], after: Callable[[], Any]) -> Interruption:
        """Cause a fault, and return its effect once everything has arrived.

        Args:
            fault: function that causes the fault.
            after: function that is called when everything has arrived.
        """
        self.wait_until(5)
        for arrivals in (self.released, self.moved):
            assert arrivals.copies, "nothing arrived before the fault"
            assert arrivals.worst_ms < 10_000, "not on time before the fault"
        self.publishing.start()
        self.administration.start()
        try:
            fault()
            for name, arrivals in (("released", self.released), ("moved", self.moved)):
                with contextlib.suppress(AssertionError):
                    eventually(
                        lambda arrivals=arrivals: len(arrivals.copies) == self._count, name, 300
                    )
            # The end of the interruption is a success.
            for gaps in (self.publishing, self.administration):
                count = gaps.count
                eventually(lambda gaps=gaps, count=count: gaps.count > count, "a success", 120)
        finally:
            after()
        both = (self.released, self.moved)
        return Interruption(
            publish_s=self.publishing.longest_s,
            release_s=self.released.worst_ms / 1000,
            hand_off_s=self.moved.worst_ms / 1000,
            admin_s=self.administration.longest_s,
            lost=sum(self._count - len(each.copies) for each in both),
            copies=sum(sum(each.copies.values()) - len(each.copies) for each in both),
            disordered=sum(
                earlier > later
                for order in self.released.order.values()
                for earlier, later in pairwise(order)
            ),
            early_ms=max(-each.earliest_ms for each in both),
        )


@contextlib.contextmanager
def load_on(*arguments: Any, **options: Any) -> Iterator[ClusterLoad]:
    """Yield a running `ClusterLoad`; the arguments are its own."""
    load = ClusterLoad(*arguments, **options)
    try:
        with load:
            yield load
    finally:
        load.processes.kill()  # also if it could not be entered
