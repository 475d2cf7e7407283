"""The demonstration: real messages through real levels, counted at every step.

Two levels with units of seconds, three business topics with a schema each, the Spark sync job as
the mover, a dispatcher for the final window, and consumers (Exclusive and Shared) that check every
message against what was sent.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pulsar
from pulsar.schema import BytesSchema, JsonSchema, Record, String, StringSchema

from delaylevel.cluster import client_log as _clientlog
from delaylevel.cluster.admin import Admin
from delaylevel.cluster.connection import Connection
from delaylevel.cluster.reader import read_range
from delaylevel.dispatcher import Dispatcher, DispatchSettings
from delaylevel.errors import BrokerError
from delaylevel.model.clock import SystemClock
from delaylevel.model.envelope import ID, due_of
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Role
from delaylevel.model.position import EARLIEST
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.producer.client import DelayLevelClient
from delaylevel.topics import registry as topics
from delaylevel.topics.stats import pending_entries_in

LEVELS = Levels(
    [
        PartitionStrategy(
            partition_by=timedelta(seconds=10),
            maximum_delay=timedelta(seconds=50),
            lead=timedelta(seconds=4),
        ),
        PartitionStrategy(
            partition_by=timedelta(seconds=4),
            maximum_delay=timedelta(seconds=12),
            lead=timedelta(seconds=2),
        ),
    ]
)
LONGEST_DELAY_S = 48
_LEVEL_TOPIC = "demo-delay-level"
_SEQUENCE = "sequence"


class Order(Record):  # type: ignore[misc, unused-ignore]
    """A record for the topic with a JSON schema."""

    customer = String()
    note = String()


_TOPICS: tuple[tuple[str, Any, Callable[[int], Any]], ...] = (
    # This one has an Exclusive subscription, which the broker's own timer could not serve.
    ("demo-reminders", BytesSchema(), lambda i: b"%03d" % (i % 1000)),
    ("demo-coupons", StringSchema(), lambda i: f"coupon {i} \u2713"),
    ("demo-orders", JsonSchema(Order), lambda i: Order(customer=f"c{i % 97}", note=f"order {i}")),
)


@dataclass(frozen=True)
class PartitionCount:
    """What went through one partition of a level.

    Attributes:
        level: the unit, in words; ``window``, ``held`` and ``dead-letter`` for those topics.
        partition: its index.
        from_producer: how many messages the wrapper parked there.
        from_mover: how many a mover parked there.
    """

    level: str
    partition: int
    from_producer: int
    from_mover: int


@dataclass
class Snapshot:
    """How far the demonstration is.

    Attributes:
        phase: what happens now, in words.
        sent, delivered: messages so far.
        total: messages in all.
        pending: entries that wait, by (level's name, partition).
        elapsed_s: seconds since the first message.
        late_ms: the lateness of the last messages, in ms, newest last.
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
    """What the demonstration found.

    Attributes:
        sent: how many messages were sent.
        lost, duplicated, damaged: how many did not arrive, came again, or came changed.
        early: how many came before they were due.
        undelayed: how many were sent straight to a business topic, because they were due.
        partitions: what went through each partition.
        late_ms: every message's lateness in ms, sorted; negative for early ones.
        seconds: how long it took from the first message to the last.
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
        """Whether nothing was lost, duplicated, changed or early."""
        return not (self.lost or self.duplicated or self.damaged or self.early) and self.sent > 0

    def late_at(self, quantile: float) -> int:
        """Return a quantile (0 to 1) of the lateness in ms."""
        if not self.late_ms:
            return 0
        return self.late_ms[min(len(self.late_ms) - 1, int(quantile * len(self.late_ms)))]


@dataclass
class _Expected:
    topic: str
    value: Any
    key: str
    event_ms: int
    due_ms: int


class _Ledger:
    """What was sent and what came back; written by many threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.expected: dict[int, _Expected] = {}
        self.seen: Counter[int] = Counter()
        self.damaged: set[int] = set()
        self.late_ms: list[int] = []
        self.refused: Counter[str] = Counter()

    def received(self, topic: str, message: Any, now_ms: int) -> None:
        properties = message.properties()
        number = int(properties[_SEQUENCE])
        wanted = self.expected[number]
        same = (
            topic == wanted.topic
            and _plain(message.value()) == _plain(wanted.value)
            and message.partition_key() == wanted.key
            and message.event_timestamp() == wanted.event_ms
            and due_of(properties) == wanted.due_ms
        )
        with self.lock:
            self.seen[number] += 1
            if not same:
                self.damaged.add(number)
            self.late_ms.append(now_ms - wanted.due_ms)


def run(
    connection: Connection,
    checkpoint: Path,
    messages: int,
    show: Callable[[Snapshot], None],
    *,
    timeout_s: float = 150.0,
    seed: int = 1,
) -> DemoResult:
    """Send messages of mixed delays through two levels, and wait until all have come out.

    Args:
        connection: a cluster to itself: topics ``demo-*`` of ``public/default`` are used.
        checkpoint: a folder for the Spark job's checkpoint.
        messages: how many to send.
        show: called about twice a second with how far it is.
        timeout_s: after so many seconds what has not come is counted as lost.
        seed: of the delays.

    Raises:
        BrokerError: the job failed, or the broker refused messages.
    """
    snapshot = Snapshot("starting the Spark job", messages)
    show(snapshot)
    with contextlib.ExitStack() as stack:
        client = DelayLevelClient.from_connection(connection, logger=_clientlog.silent())
        stack.callback(client.close)
        admin = stack.enter_context(Admin.from_connection(connection))
        ledger = _Ledger()
        ended = threading.Event()
        for index, (topic, schema, _) in enumerate(_TOPICS):
            kind = pulsar.ConsumerType.Shared if index else pulsar.ConsumerType.Exclusive
            stack.enter_context(_consuming(client, topic, schema, kind, ledger, ended))
        description = _create(admin)
        job = stack.enter_context(_moving(connection, checkpoint, description))
        job.wait_ready(120)

        dispatcher = stack.enter_context(
            _dispatching(connection, description, checkpoint.with_name("window"))
        )

        started = time.monotonic()
        snapshot.phase = "sending"
        _send(client, messages, seed, ledger, snapshot, show)
        snapshot.phase = "waiting for what is due"
        deadline = started + timeout_s
        while len(ledger.seen) < messages and time.monotonic() < deadline:
            job.check()
            _look(admin, dispatcher, ledger, snapshot, started)
            show(snapshot)
            time.sleep(0.5)
        seconds = time.monotonic() - started
        # What would come twice comes within a moment of the first: a look at the queue's end.
        time.sleep(2.0)
        ended.set()
        _look(admin, dispatcher, ledger, snapshot, started)
        snapshot.phase = "counting"
        show(snapshot)
        return _result(client, admin, description, ledger, messages, seconds)


def _create(admin: Admin) -> LevelTopicDescription:
    return topics.create(
        admin,
        LevelTopicDescription(
            topic=_LEVEL_TOPIC,
            levels=LEVELS,
            targets=tuple(name for name, _, _ in _TOPICS),
            final_window=FinalWindow.TRACKER,
        ),
    )


def _send(
    client: DelayLevelClient,
    messages: int,
    seed: int,
    ledger: _Ledger,
    snapshot: Snapshot,
    show: Callable[[Snapshot], None],
) -> None:
    choose = random.Random(seed)
    clock = SystemClock()
    outcomes: dict[Any, Any] = {}
    with contextlib.ExitStack() as stack:
        producers = [
            stack.enter_context(
                client.create_producer(
                    topic,
                    enable_delay_level_topic=True,
                    delay_level_topic=_LEVEL_TOPIC,
                    schema=schema,
                    block_if_queue_full=True,
                    batching_enabled=True,
                )
            )
            for topic, schema, _ in _TOPICS
        ]
        for number in range(messages):
            which = number % len(_TOPICS)
            topic, _, make = _TOPICS[which]
            due_ms = clock.now_ms() + choose.randint(0, LONGEST_DELAY_S * 1000)
            wanted = _Expected(topic, make(number), f"key-{number % 11}", 1 + number, due_ms)
            ledger.expected[number] = wanted
            producers[which].send_async(
                wanted.value,
                outcomes.setdefault,
                properties={_SEQUENCE: str(number)},
                partition_key=wanted.key,
                event_timestamp=wanted.event_ms,
                deliver_at=due_ms,
            )
            snapshot.sent = number + 1
            if number % 500 == 0:
                show(snapshot)
        for producer in producers:
            producer.flush()
    refused = [str(outcome) for outcome in outcomes if outcome != pulsar.Result.Ok]
    if refused:
        raise BrokerError(f"the broker refused messages: {', '.join(refused)}")


@contextlib.contextmanager
def _consuming(
    client: Any, topic: str, schema: Any, kind: Any, ledger: _Ledger, ended: threading.Event
) -> Iterator[None]:
    consumer = client.subscribe(topic, "demo", consumer_type=kind, schema=schema)
    clock = SystemClock()

    def consume() -> None:
        while not ended.is_set():
            try:
                message = consumer.receive(timeout_millis=250)
            except pulsar.Timeout:
                continue
            ledger.received(topic, message, clock.now_ms())
            consumer.acknowledge(message)

    thread = threading.Thread(target=consume, name=f"consume-{topic}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        consumer.close()


class _Job:
    """The sync job in a thread, and its failure if it has one."""

    def __init__(self, job: Any) -> None:
        self._job = job
        self._failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="spark-sync")
        self.thread.start()

    def _run(self) -> None:
        try:
            self._job.run()
        except BaseException as error:  # handed to the thread that waits
            self._failure = error

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def wait_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._job.wait_ready(0.25):
            self.check()
            if time.monotonic() > deadline:
                raise BrokerError(f"the Spark job did not start within {timeout_s:.0f} s")

    def stop(self) -> None:
        self._job.stop()
        self.thread.join()


@contextlib.contextmanager
def _moving(
    connection: Connection, checkpoint: Path, description: LevelTopicDescription
) -> Iterator[_Job]:
    from delaylevel.spark_sync import SparkSyncJob, SyncSettings

    job = _Job(
        SparkSyncJob(
            connection,
            SyncSettings((description.topic,), checkpoint=str(checkpoint), trigger_ms=250),
        )
    )
    try:
        yield job
    finally:
        job.stop()


@contextlib.contextmanager
def _dispatching(
    connection: Connection, description: LevelTopicDescription, directory: Path
) -> Iterator[Dispatcher]:
    """Run a dispatcher in a thread, with a client of its own; return when it owns the window."""
    client = pulsar.Client(**connection.client_kwargs(), logger=_clientlog.silent())
    try:
        with Admin.from_connection(connection) as admin:
            settings = DispatchSettings(directory=directory)
            dispatcher = Dispatcher(client, admin, [description.topic], settings)
            thread = threading.Thread(target=dispatcher.run, name="dispatcher")
            thread.start()
            try:
                deadline = time.monotonic() + 60
                while not _releasing(dispatcher, description):
                    if time.monotonic() > deadline:
                        raise BrokerError("the dispatcher did not start within 60 s")
                    time.sleep(0.05)
                yield dispatcher
            finally:
                dispatcher.stop()
                thread.join()
    finally:
        client.close()


def _releasing(dispatcher: Dispatcher, description: LevelTopicDescription) -> bool:
    states = [figures.state for figures in dispatcher.figures().values()]
    return states == ["releasing"] * description.window_partitions


def _look(
    admin: Admin,
    dispatcher: Dispatcher,
    ledger: _Ledger,
    snapshot: Snapshot,
    started: float,
) -> None:
    (description,) = dispatcher.descriptions
    snapshot.elapsed_s = time.monotonic() - started
    snapshot.delivered = len(ledger.seen)
    snapshot.late_ms = ledger.late_ms[-500:]
    for level in description.levels:
        for index, stats in admin.partitioned_stats(description.level_topic(level.index)).items():
            snapshot.pending[level.name, index] = pending_entries_in(stats)
    for (_, index), figures in sorted(dispatcher.figures().items()):
        snapshot.pending[Role.WINDOW.value, index] = figures.pending


def _result(
    client: Any,
    admin: Admin,
    description: LevelTopicDescription,
    ledger: _Ledger,
    messages: int,
    seconds: float,
) -> DemoResult:
    partitions = _count_partitions(client, admin, description)
    parked = sum(p.from_producer for p in partitions if p.level not in (Role.DEAD_LETTER.value,))
    late_ms = sorted(ledger.late_ms)
    return DemoResult(
        sent=messages,
        lost=messages - len(ledger.seen),
        duplicated=sum(count - 1 for count in ledger.seen.values()),
        damaged=len(ledger.damaged),
        early=sum(1 for late in late_ms if late < 0),
        undelayed=messages - parked,
        partitions=partitions,
        late_ms=late_ms,
        seconds=seconds,
    )


def _count_partitions(
    client: Any, admin: Admin, description: LevelTopicDescription
) -> list[PartitionCount]:
    """Read every partition again from its beginning: what was acknowledged is still stored."""
    found = []
    for member in description.members():
        if member.role is Role.JOURNAL:
            continue
        name = (
            description.levels[member.level].name
            if member.role is Role.LEVEL
            else member.role.value
        )
        for index in range(member.partitions):
            topic = member.topic.partition(index)
            last = admin.last_message_id(topic)
            origins: Counter[bool] = Counter()
            if last is not None and last.entry >= 0:
                for message in read_range(client, topic.full, EARLIEST, last.next_entry):
                    origins[ID in message.properties] += 1
            found.append(PartitionCount(name, index, origins[False], origins[True]))
    return found


def _plain(value: Any) -> Any:
    return vars(value) if isinstance(value, Record) else value
