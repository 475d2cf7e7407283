"""The demonstration: messages through two levels and a window, each compared where it arrives."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pulsar
from pulsar.schema import BytesSchema, JsonSchema, Record, String

from delaylevel.cluster import logs
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.dispatcher import DispatchSettings
from delaylevel.errors import BrokerError
from delaylevel.model.clock import SystemClock
from delaylevel.model.envelope import due_of
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.producer.client import DelayLevelClient
from delaylevel.run.service import LocalService
from delaylevel.topics import registry as topics


def _level(unit_s: int, maximum_s: int, lead_s: int) -> PartitionStrategy:
    unit, maximum, lead = (timedelta(seconds=value) for value in (unit_s, maximum_s, lead_s))
    return PartitionStrategy(partition_by=unit, maximum_delay=maximum, lead=lead)


LEVELS = Levels([_level(10, 50, 4), _level(4, 12, 2)])
_LONGEST_DELAY_MS = 48_000
_START_S = 60.0
# What has not arrived by then counts as lost.
_TIMEOUT_S = 150.0
# A duplicate arrives within moments of the original.
_DUPLICATES_S = 2.0
_NUMBER = "number"


class Order(Record):  # type: ignore[misc, unused-ignore]
    """Value of the messages in the topic with a JSON schema."""

    customer = String()


# Topic, subscription type and schema. The broker's own timer does not support the first type.
_TOPICS: tuple[tuple[str, Any, Any], ...] = (
    ("demo-reminders", pulsar.ConsumerType.Exclusive, BytesSchema()),
    ("demo-orders", pulsar.ConsumerType.Shared, JsonSchema(Order)),
)


@dataclass
class Demonstration:
    """The messages of the demonstration; consumers write it from several threads.

    Attributes:
        total: number of messages to send.
        sent: topic, value, key and due time of each message, by its number.
        seen: number of arrivals of each message.
        changed: numbers of the messages that did not arrive as they were sent.
        late_ms: lateness of the arrivals, negative for early ones.
        window: number of messages in the final window.
        moved, released: number of messages that the mover, and the dispatcher, have passed on.
    """

    total: int
    phase: str = "starting mover and dispatcher"
    seconds: float = 0.0
    sent: dict[int, tuple[str, Any, str, int]] = field(default_factory=dict)
    seen: Counter[int] = field(default_factory=Counter)
    changed: set[int] = field(default_factory=set)
    late_ms: list[int] = field(default_factory=list)
    window: int = 0
    moved: int = 0
    released: int = 0

    @property
    def lost(self) -> int:
        """Number of messages that have not arrived."""
        return self.total - len(self.seen)

    @property
    def duplicated(self) -> int:
        """Number of arrivals after the first one of a message."""
        return self.seen.total() - len(self.seen)

    @property
    def early(self) -> int:
        """Number of arrivals before the due time."""
        return sum(late < 0 for late in self.late_ms)

    @property
    def ok(self) -> bool:
        """True if every message has arrived once, unchanged, and not early."""
        return not (self.lost or self.duplicated or self.changed or self.early)

    def late_at(self, quantile: float) -> int:
        """Return a quantile (0 to 1) of the lateness, ms; 0 without messages."""
        late = sorted(self.late_ms)
        return late[min(len(late) - 1, int(quantile * len(late)))] if late else 0


def run(
    connection: Connection, folder: Path, messages: int, show: Callable[[Demonstration], None]
) -> Demonstration:
    """Send messages with random delays, and wait until all are delivered.

    Args:
        connection: a cluster for this demonstration alone: it uses the topics ``demo-*`` of
            ``public/default``.
        folder: for the files of the window.
        show: called with the progress, about twice a second.
    """
    demo = Demonstration(messages)
    show(demo)
    ended = threading.Event()
    with ExitStack() as stack:
        open_client = partial(connection.open_client, logger=logs.silent())
        client = DelayLevelClient.from_connection(connection, logger=logs.silent())
        stack.callback(client.close)
        admin = stack.enter_context(Admin.from_connection(connection))
        consumers = [
            client.subscribe(topic, "demo", consumer_type=kind, schema=schema)
            for topic, kind, schema in _TOPICS
        ]
        described = topics.create(
            admin,
            LevelTopicDescription(
                topic="demo-delay-level", levels=LEVELS, targets=tuple(t for t, *_ in _TOPICS)
            ),
        )
        settings = DispatchSettings(directory=folder)
        service = LocalService(open_client, admin, [described.topic], settings, trigger_ms=250)
        # It waits for its threads when the callbacks below have ended them.
        pool = stack.enter_context(ThreadPoolExecutor(1 + len(consumers), "demo"))
        stack.callback(ended.set)
        stack.callback(service.stop)
        threads = [pool.submit(service.run)]
        threads += [pool.submit(_consume, demo, consumer, ended) for consumer in consumers]

        def look() -> None:
            for thread in threads:
                if thread.done():
                    thread.result()  # raises its failure
            _look(demo, service)
            show(demo)
            time.sleep(0.5)

        deadline_s = time.monotonic() + _START_S
        while not all(check.ok for check in service.start_checks()):
            if time.monotonic() > deadline_s:
                raise BrokerError(f"mover and dispatcher did not start within {_START_S:.0f} s")
            look()
        demo.phase = "sending"
        started_s = time.monotonic()
        _send(demo, client, described.topic, lambda: show(demo))
        demo.phase = "waiting for due messages"
        while demo.lost and demo.seconds < _TIMEOUT_S:
            look()
            demo.seconds = time.monotonic() - started_s
        time.sleep(_DUPLICATES_S)
        demo.phase = "done"
        look()
    return demo


def _send(
    demo: Demonstration, client: DelayLevelClient, level_topic: str, show: Callable[[], None]
) -> None:
    """Send all messages, to one topic after the other."""
    choose, clock = random.Random(1), SystemClock()
    refused: set[str] = set()

    def confirmed(result: Any, _: Any) -> None:
        if result != pulsar.Result.Ok:
            refused.add(str(result))

    producers = [
        client.create_producer(
            topic,
            enable_delay_level_topic=True,
            delay_level_topic=level_topic,
            schema=schema,
            block_if_queue_full=True,
            batching_enabled=True,
        )
        for topic, _, schema in _TOPICS
    ]
    for number in range(demo.total):
        index = number % len(_TOPICS)
        value: Any = Order(customer=f"c{number} \u2713") if index else b"%d" % number
        due_ms = clock.now_ms() + choose.randint(0, _LONGEST_DELAY_MS)
        key = f"key-{number % 11}"
        demo.sent[number] = _TOPICS[index][0], _plain(value), key, due_ms
        producers[index].send_async(
            value,
            confirmed,
            properties={_NUMBER: str(number)},
            partition_key=key,
            deliver_at=due_ms,
        )
        if number % 500 == 0:
            show()
    for producer in producers:
        producer.flush()
        producer.close()
    if refused:
        raise BrokerError(f"the broker refused messages: {', '.join(sorted(refused))}")


def _consume(demo: Demonstration, consumer: Any, ended: threading.Event) -> None:
    """Compare every message of a topic with the one that was sent, until the end."""
    clock = SystemClock()
    topic = consumer.topic().rpartition("/")[2]
    while not ended.is_set():
        try:
            message = consumer.receive(timeout_millis=250)
        except pulsar.Timeout:
            continue
        now_ms = clock.now_ms()
        properties = message.properties()
        number = int(properties[_NUMBER])
        found = topic, _plain(message.value()), message.partition_key(), due_of(properties)
        if found != demo.sent[number]:
            demo.changed.add(number)
        demo.late_ms.append(now_ms - demo.sent[number][-1])
        demo.seen[number] += 1  # of one topic, so no other thread has this number
        consumer.acknowledge(message)
    consumer.close()


def _look(demo: Demonstration, service: LocalService) -> None:
    """Update what waits, and what was passed on."""
    owners = [stats for each in service.dispatchers for stats in each.stats().values()]
    demo.window = sum(stats.pending + stats.in_flight for stats in owners)
    demo.moved = sum(s.report.total for each in service.movers for s in each.stats().values())
    demo.released = sum(each.released().total() for each in service.dispatchers)


def _plain(value: Any) -> Any:
    return vars(value) if isinstance(value, Record) else value
