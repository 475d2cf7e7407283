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

from delaylevel.cluster import logs
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.dispatcher import DispatchSettings
from delaylevel.errors import BrokerError
from delaylevel.model.clock import SystemClock
from delaylevel.model.envelope import due_of
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.producer.client import DelayLevelClient
from delaylevel.run.service import LocalService


def _level(unit_s: int, maximum_s: int, lead_s: int) -> PartitionStrategy:
    unit, maximum, lead = (timedelta(seconds=value) for value in (unit_s, maximum_s, lead_s))
    return PartitionStrategy(partition_by=unit, maximum_delay=maximum, lead=lead)


LEVELS = Levels([_level(10, 50, 4), _level(4, 12, 2)])
_TOPIC = "demo-reminders"
_LONGEST_DELAY_MS = 48_000
_START_S = 60.0
# What has not arrived by then counts as lost.
_TIMEOUT_S = 150.0
# A duplicate arrives within moments of the original.
_DUPLICATES_S = 2.0


@dataclass
class Demonstration:
    """The messages of the demonstration; the consumer writes it from a thread of its own."""

    total: int
    phase: str = "starting mover and dispatcher"
    seconds: float = 0.0
    sent: dict[int, tuple[str, int]] = field(default_factory=dict)  # key and due time, by number
    seen: Counter[int] = field(default_factory=Counter)  # arrivals of each
    changed: set[int] = field(default_factory=set)  # those that did not arrive as they were sent
    late_ms: list[int] = field(default_factory=list)  # negative for early ones

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
    """Send messages with random delays on an unused cluster, and wait until all are delivered."""
    demo = Demonstration(messages)
    ended = threading.Event()
    with ExitStack() as stack:
        client = DelayLevelClient.from_connection(connection, logger=logs.silent())
        stack.callback(client.close)
        admin = stack.enter_context(Admin.from_connection(connection))
        # The broker's own timer does not support this type of subscription.
        exclusive = pulsar.ConsumerType.Exclusive
        consumer = client.subscribe(_TOPIC, "demo", consumer_type=exclusive)
        producer = client.create_producer(
            _TOPIC,
            enable_delay_level_topic=True,
            partition_strategy=LEVELS,
            block_if_queue_full=True,
            batching_enabled=True,
        )
        open_client = partial(connection.open_client, logger=logs.silent())
        settings = DispatchSettings(directory=folder)
        service = LocalService(open_client, admin, [_TOPIC], settings, trigger_ms=250)
        # Two threads: the service, and the consumer, which must not wait for it.
        # The pool waits for its threads when the callbacks below have ended them.
        pool = stack.enter_context(ThreadPoolExecutor(2, "demo"))
        stack.callback(ended.set)
        stack.callback(service.stop)
        threads = [pool.submit(service.run), pool.submit(_consume, demo, consumer, ended)]

        def look() -> None:
            for thread in threads:
                if thread.done():
                    thread.result()  # raises its failure
            show(demo)
            time.sleep(0.5)

        deadline_s = time.monotonic() + _START_S
        while not all(check.ok for check in service.start_checks()):
            if time.monotonic() > deadline_s:
                raise BrokerError(f"mover and dispatcher did not start within {_START_S:.0f} s")
            look()
        demo.phase, started_s = "sending", time.monotonic()
        _send(demo, producer, look)
        demo.phase = "waiting for due messages"
        while demo.lost and demo.seconds < _TIMEOUT_S:
            look()
            demo.seconds = time.monotonic() - started_s
        time.sleep(_DUPLICATES_S)
        demo.phase = "done"
        look()
    return demo


def _send(demo: Demonstration, producer: Any, look: Callable[[], None]) -> None:
    choose, clock = random.Random(1), SystemClock()
    for number in range(demo.total):
        key, due_ms = f"key-{number % 11}", clock.now_ms() + choose.randint(0, _LONGEST_DELAY_MS)
        demo.sent[number] = key, due_ms
        producer.send_async(b"%d" % number, None, partition_key=key, deliver_at=due_ms)
        if number % 5000 == 0:
            look()
    producer.flush()


def _consume(demo: Demonstration, consumer: Any, ended: threading.Event) -> None:
    """Compare every message with the one that was sent, until the end."""
    clock = SystemClock()
    while not ended.is_set():
        try:
            message = consumer.receive(timeout_millis=250)
        except pulsar.Timeout:
            continue
        now_ms, number = clock.now_ms(), int(message.data())
        if (message.partition_key(), due_of(message.properties())) != demo.sent[number]:
            demo.changed.add(number)
        demo.late_ms.append(now_ms - demo.sent[number][1])
        demo.seen[number] += 1
        consumer.acknowledge(message)
    consumer.close()
