"""The demonstration: real messages through real levels, counted at every step.

It uses two levels with units of seconds, three business topics with different schemas, a mover
(the Spark job, or without PySpark the local one), a dispatcher for the final window, and consumers
(Exclusive and Shared) that compare every message with the one that was sent.
"""

from __future__ import annotations

import importlib.util
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pulsar
from pulsar.schema import BytesSchema, JsonSchema, Record, String, StringSchema

from delaylevel.cluster import logs
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.reader import read_range
from delaylevel.cluster.rest.admin import Admin
from delaylevel.dispatcher import Dispatcher, DispatchSettings
from delaylevel.errors import BrokerError
from delaylevel.model.clock import SystemClock
from delaylevel.model.envelope import ID, due_of
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Role
from delaylevel.model.position import EARLIEST
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.mover.service import MoverService
from delaylevel.producer.client import DelayLevelClient
from delaylevel.topics import registry as topics
from delaylevel.topics.status import pending_entries_in


def _level(unit_s: int, maximum_s: int, lead_s: int) -> PartitionStrategy:
    return PartitionStrategy(
        partition_by=timedelta(seconds=unit_s),
        maximum_delay=timedelta(seconds=maximum_s),
        lead=timedelta(seconds=lead_s),
    )


LEVELS = Levels([_level(10, 50, 4), _level(4, 12, 2)])
LONGEST_DELAY_S = 48
# A message that has not arrived by then counts as lost.
_TIMEOUT_S = 150.0
_LEVEL_TOPIC = "demo-delay-level"
_SEQUENCE = "sequence"


class Order(Record):  # type: ignore[misc, unused-ignore]
    """Value of the messages in the topic with a JSON schema."""

    customer = String()
    note = String()


_TOPICS: tuple[tuple[str, Any, Callable[[int], Any]], ...] = (
    # The first topic gets an Exclusive subscription, which the broker's own timer does not support.
    ("demo-reminders", BytesSchema(), lambda i: b"%03d" % (i % 1000)),
    ("demo-coupons", StringSchema(), lambda i: f"coupon {i} \u2713"),
    ("demo-orders", JsonSchema(Order), lambda i: Order(customer=f"c{i % 97}", note=f"order {i}")),
)


@dataclass(frozen=True)
class PartitionCount:
    """Numbers of messages that went through one partition of a level.

    Attributes:
        level: the name of the level; ``window``, ``held`` and ``dead-letter`` for those topics.
    """

    level: str
    partition: int
    from_producer: int
    from_mover: int


@dataclass
class Snapshot:
    """Progress of the demonstration.

    Attributes:
        pending: numbers of waiting entries, by (name of the level, partition).
        late_ms: the lateness of the last messages, ms, newest last.
    """

    phase: str
    total: int
    sent: int = 0
    delivered: int = 0
    pending: dict[tuple[str, int], int] = field(default_factory=dict)
    elapsed_s: float = 0.0
    late_ms: list[int] = field(default_factory=list)


@dataclass
class DemoResult:
    """Result of the demonstration.

    Attributes:
        undelayed: number of messages sent straight to a business topic, because they were due.
        late_ms: the lateness of all messages, ms, sorted; negative for early ones.
    """

    sent: int
    lost: int
    duplicated: int
    damaged: int
    early: int
    undelayed: int
    partitions: list[PartitionCount]
    late_ms: list[int]
    seconds: float

    @property
    def ok(self) -> bool:
        """True if no message was lost, duplicated, changed or early."""
        return not (self.lost or self.duplicated or self.damaged or self.early) and self.sent > 0

    def late_at(self, quantile: float) -> int:
        """Return a quantile (0 to 1) of the lateness in ms."""
        if not self.late_ms:
            return 0
        return self.late_ms[min(len(self.late_ms) - 1, int(quantile * len(self.late_ms)))]


class _Message(NamedTuple):
    """The parts of a message that must arrive as they were sent."""

    topic: str
    value: Any
    key: str
    event_ms: int
    due_ms: int | None


def run(
    connection: Connection, checkpoint: Path, messages: int, show: Callable[[Snapshot], None]
) -> DemoResult:
    """Send messages with different delays through two levels, and wait until all are delivered.

    Args:
        connection: a cluster for this demonstration alone: it uses the topics ``demo-*`` of
            ``public/default``.
        checkpoint: the folder of the Spark job's checkpoint; the window's files are next to it.
    """
    with ExitStack() as stack:
        logger = logs.silent()
        client = DelayLevelClient.from_connection(connection, logger=logger)
        stack.callback(client.close)
        admin = stack.enter_context(Admin.from_connection(connection))
        takes = "10 to 30 seconds" if has_spark() else "some seconds"
        snapshot = Snapshot(f"starting the {mover_name()}, which takes {takes}", messages)
        show(snapshot)
        demo = _Demonstration(client, admin, snapshot, show)
        for index, (topic, schema, _) in enumerate(_TOPICS):
            kind = pulsar.ConsumerType.Shared if index else pulsar.ConsumerType.Exclusive
            consumer = client.subscribe(topic, "demo", consumer_type=kind, schema=schema)
            stack.callback(consumer.close)
            consume = partial(demo.consume, topic, consumer)
            stack.enter_context(_running(f"consume-{topic}", consume, demo.ended.set))
        description = topics.create(
            admin,
            LevelTopicDescription(
                topic=_LEVEL_TOPIC,
                levels=LEVELS,
                targets=tuple(name for name, _, _ in _TOPICS),
                final_window=FinalWindow.TRACKER,
            ),
        )
        mover, is_moving = _mover(stack, connection, description.topic, checkpoint)
        moving = stack.enter_context(_running("mover", mover.run, mover.stop))
        _wait(moving, f"the {mover_name()}", is_moving, 120)
        snapshot.phase = "starting the dispatcher"
        show(snapshot)
        # The dispatcher works in a thread, with a client and an admin client of its own.
        open_client = partial(connection.open_client, logger=logger)
        dispatcher = Dispatcher(
            stack.enter_context(closing(open_client())),
            stack.enter_context(Admin.from_connection(connection)),
            [description.topic],
            DispatchSettings(directory=checkpoint.with_name("window")),
            target_client=open_client,
        )
        releasing = stack.enter_context(_running("dispatcher", dispatcher.run, dispatcher.stop))
        _wait(releasing, "the dispatcher", lambda: _is_releasing(dispatcher, description), 60)

        started = time.monotonic()
        snapshot.phase = "sending"
        demo.send(random.Random(1))
        snapshot.phase = "waiting for due messages"
        while len(demo.seen) < messages and time.monotonic() < started + _TIMEOUT_S:
            if moving.done():
                moving.result()  # raises its failure
            demo.look(dispatcher, started)
            show(snapshot)
            time.sleep(0.5)
        seconds = time.monotonic() - started
        # A duplicate arrives within moments of the original: wait for the end of the queues.
        time.sleep(2.0)
        demo.ended.set()
        demo.look(dispatcher, started)
        snapshot.phase = "counting"
        show(snapshot)
        return demo.result(description, seconds)


def has_spark() -> bool:
    """Return whether PySpark is installed, so that the mover is the Spark job."""
    return importlib.util.find_spec("pyspark") is not None


def mover_name() -> str:
    """Return the name of the mover that the demonstration uses."""
    return "Spark job" if has_spark() else "local mover"


def _mover(
    stack: ExitStack, connection: Connection, topic: str, checkpoint: Path
) -> tuple[Any, Callable[[], bool]]:
    """Return a mover with ``run`` and ``stop``, and a function that tells if it moves."""
    if has_spark():
        from delaylevel.spark_sync import SparkSyncJob, SyncSettings

        settings = SyncSettings((topic,), checkpoint=str(checkpoint), trigger_ms=250)
        job = SparkSyncJob(connection, settings)
        return job, lambda: job.wait_ready(0.25)
    open_client = partial(connection.open_client, logger=logs.silent())
    client = stack.enter_context(closing(open_client()))
    admin = stack.enter_context(Admin.from_connection(connection))
    mover = MoverService(client, admin, [topic], trigger_ms=250, target_client=open_client)
    return mover, lambda: mover.stats()[topic].state == "moving"


@dataclass
class _Demonstration:
    """Record of sent and received messages; consumers write it from several threads."""

    client: DelayLevelClient
    admin: Admin
    snapshot: Snapshot
    show: Callable[[Snapshot], None]
    sent: dict[int, _Message] = field(default_factory=dict)
    seen: Counter[int] = field(default_factory=Counter)
    damaged: set[int] = field(default_factory=set)
    late_ms: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)

    def consume(self, topic: str, consumer: Any) -> None:
        """Compare every message of a topic with the one that was sent, until the end."""
        clock = SystemClock()
        while not self.ended.is_set():
            try:
                message = consumer.receive(timeout_millis=250)
            except pulsar.Timeout:
                continue
            now_ms = clock.now_ms()
            properties = message.properties()
            number = int(properties[_SEQUENCE])
            sent = self.sent[number]
            received = _Message(
                topic,
                _plain(message.value()),
                message.partition_key(),
                message.event_timestamp(),
                due_of(properties),
            )
            with self.lock:
                self.seen[number] += 1
                if received != sent:
                    self.damaged.add(number)
                self.late_ms.append(now_ms - (sent.due_ms or 0))
            consumer.acknowledge(message)

    def send(self, choose: random.Random) -> None:
        """Send all messages, each after a random delay to the next of the topics."""
        clock = SystemClock()
        outcomes: dict[Any, Any] = {}
        producers = [
            self.client.create_producer(
                topic,
                enable_delay_level_topic=True,
                delay_level_topic=_LEVEL_TOPIC,
                schema=schema,
                block_if_queue_full=True,
                batching_enabled=True,
            )
            for topic, schema, _ in _TOPICS
        ]
        for number in range(self.snapshot.total):
            index = number % len(_TOPICS)
            topic, _, make = _TOPICS[index]
            value = make(number)
            due_ms = clock.now_ms() + choose.randint(0, LONGEST_DELAY_S * 1000)
            sent = _Message(topic, _plain(value), f"key-{number % 11}", 1 + number, due_ms)
            self.sent[number] = sent
            producers[index].send_async(
                value,
                outcomes.setdefault,
                properties={_SEQUENCE: str(number)},
                partition_key=sent.key,
                event_timestamp=sent.event_ms,
                deliver_at=due_ms,
            )
            self.snapshot.sent = number + 1
            if number % 500 == 0:
                self.show(self.snapshot)
        for producer in producers:
            producer.flush()
            producer.close()
        refused = [str(outcome) for outcome in outcomes if outcome != pulsar.Result.Ok]
        if refused:
            raise BrokerError(f"the broker refused messages: {', '.join(refused)}")

    def look(self, dispatcher: Dispatcher, started: float) -> None:
        """Update the progress."""
        (description,) = dispatcher.descriptions
        snapshot = self.snapshot
        snapshot.elapsed_s = time.monotonic() - started
        snapshot.delivered = len(self.seen)
        snapshot.late_ms = self.late_ms[-500:]
        for level in description.levels:
            partitions = self.admin.partitioned_stats(description.level_topic(level.index))
            for index, stats in partitions.items():
                snapshot.pending[level.name, index] = pending_entries_in(stats)
        for (_, index), owned in sorted(dispatcher.stats().items()):
            snapshot.pending[Role.WINDOW.value, index] = owned.pending

    def result(self, description: LevelTopicDescription, seconds: float) -> DemoResult:
        """Return the result; count the messages of every partition."""
        messages = self.snapshot.total
        partitions = self._partition_counts(description)
        parked = sum(p.from_producer for p in partitions if p.level != Role.DEAD_LETTER.value)
        return DemoResult(
            sent=messages,
            lost=messages - len(self.seen),
            duplicated=sum(count - 1 for count in self.seen.values()),
            damaged=len(self.damaged),
            early=sum(late < 0 for late in self.late_ms),
            undelayed=messages - parked,
            partitions=partitions,
            late_ms=sorted(self.late_ms),
            seconds=seconds,
        )

    def _partition_counts(self, description: LevelTopicDescription) -> list[PartitionCount]:
        """Read every partition from its beginning: acknowledged messages are still stored."""
        found = []
        for member in description.members():
            if member.role is Role.JOURNAL:
                continue
            is_level = member.role is Role.LEVEL
            name = description.levels[member.level].name if is_level else member.role.value
            for index in range(member.partitions):
                topic = member.topic.partition(index)
                last = self.admin.last_message_id(topic)
                moved: Counter[bool] = Counter()
                if last is not None and last.entry >= 0:
                    for message in read_range(self.client, topic.full, EARLIEST, last.next_entry):
                        moved[ID in message.properties] += 1
                found.append(PartitionCount(name, index, moved[False], moved[True]))
        return found


def _plain(value: Any) -> Any:
    return vars(value) if isinstance(value, Record) else value


@contextmanager
def _running(
    name: str, function: Callable[[], None], stop: Callable[[], None]
) -> Iterator[Future[None]]:
    """Run a function in a thread; at the end, stop it and wait for it."""
    with ThreadPoolExecutor(1, name) as thread:
        try:
            yield thread.submit(function)
        finally:
            stop()


def _wait(future: Future[None], part: str, is_ready: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_ready():
        if future.done():
            future.result()  # raises its failure
        if time.monotonic() > deadline:
            raise BrokerError(f"{part} did not start within {timeout_s:.0f} s")
        time.sleep(0.05)


def _is_releasing(dispatcher: Dispatcher, description: LevelTopicDescription) -> bool:
    states = [owned.state for owned in dispatcher.stats().values()]
    return states == ["releasing"] * description.window_partitions
