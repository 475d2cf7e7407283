"""The hosts that hand messages on, on the in-memory Pulsar: each in the same few steps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel import topics
from delaylevel.errors import BrokerError
from delaylevel.functions.consumer_loop import source_topics
from delaylevel.functions.relay import Relay
from delaylevel.model.envelope import DUE, TARGET
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription, Mover
from delaylevel.model.topic_name import TopicName
from delaylevel.mover import dead_letters
from delaylevel.mover.drain import drain
from delaylevel.mover.forwarder import Forwarder
from delaylevel.mover.local import LocalMover
from delaylevel.testing import ManualClock, MemoryPulsar
from delaylevel.testing.memory.broker import Broker
from delaylevel.testing.memory.log import Entry, StoredMessage
from support.fakes import describe

Counts = dict[str, int]

ORDERS = "persistent://public/default/orders"
BILLS = "persistent://public/default/bills"
LEVEL_TOPIC = "persistent://public/default/orders-delay-level"
HELD = f"{LEVEL_TOPIC}-held-partition-0"
DEAD = f"{LEVEL_TOPIC}-DLQ-partition-0"
HOUR_MS, DAY_MS = 3_600_000, 86_400_000
# A place from which a mover reads, and the time after which everything there is ready.
HOUR_3 = f"{LEVEL_TOPIC}-hour-partition-3"
READY = timedelta(days=6)


class Bench:
    """A level topic with what is stored in it, and a host that hands it on.

    Attributes:
        now_ms: the time at which the host works first, ms since the epoch.
        unstored: errors with which a topic answers all that is sent to it, by its full name, or one
            message, by its payload and the topic.
        unopened: errors with which a topic answers new producers.
    """

    def __init__(self, host: str, patch: pytest.MonkeyPatch, **changes: Any) -> None:
        self.host = host
        self.memory = MemoryPulsar(ManualClock(1_800_000_000_000), retention=False)
        self._client = self.memory.client()
        self._client.subscribe(ORDERS, "app", pulsar.ConsumerType.Shared).close()
        self.now_ms = self.memory.clock.now_ms() + READY // timedelta(milliseconds=1)
        mover = Mover.FUNCTION if host == "function" else Mover.SERVICE
        given = {"days": 6, "targets": ("orders", "bills"), "mover": mover, **changes}
        self.description = topics.create(self.memory.admin, describe(**given))
        self.unstored: dict[Any, Exception] = {}
        self.unopened: dict[str, Exception] = {}
        self._break(patch)
        self._query = SparkQuery(self, patch, steps=host == "steps")

    def _break(self, patch: pytest.MonkeyPatch) -> None:
        """Let topics refuse what `unstored` and `unopened` say."""
        store, register = Broker.store, Broker.register_schema

        def stored(
            broker: Broker, name: TopicName, messages: tuple[StoredMessage, ...], **more: Any
        ) -> Entry:
            for key in (name.full, *((each.value, name.full) for each in messages)):
                if key in self.unstored:
                    raise self.unstored[key]
            return store(broker, name, messages, **more)

        def opened(broker: Broker, name: TopicName, schema: Any) -> int | None:
            if name.full in self.unopened:
                raise self.unopened[name.full]
            return register(broker, name, schema)

        patch.setattr(Broker, "store", stored)
        patch.setattr(Broker, "register_schema", opened)

    @property
    def source(self) -> str:
        """Full name of the topic from which a host reads by default."""
        return DEAD if self.host == "replay" else HOUR_3

    def store(
        self,
        value: bytes | None = b"body",
        after_ms: int | None = HOUR_MS // 60,
        *,
        source: str | None = None,
        target: str = ORDERS,
        given: Mapping[str, str] | None = None,
        **options: Any,
    ) -> dict[str, str]:
        """Store a message in a partition of a level, and return its properties.

        Args:
            after_ms: due time, ms after the first work of the host; None to leave it out.
            given: further properties.
            options: arguments of ``send``.
        """
        properties = {"color": "red", **(given or {})}
        if after_ms is not None:
            properties = {DUE: str(self.now_ms + after_ms), TARGET: target, **properties}
        producer = self._client.create_producer(source or self.source, batching_enabled=False)
        producer.send(value, properties=properties, **options)
        producer.close()
        return properties

    def hand_on(self) -> Counts:
        """Let time pass, and let a new process hand on what is ready; return the outcomes."""
        self.memory.clock.move_to(self.now_ms)
        report = {name: count for name, count in _HOSTS[self.host](self).items() if count}
        self.memory._check_rules()
        return report

    def pause(self) -> None:
        """Let the time pass after which a target is tried again."""
        self.memory.clock.advance(timedelta(milliseconds=self.description.hold_pause_ms))
        self.now_ms = self.memory.clock.now_ms()

    def stored(self, topic: str) -> list[StoredMessage]:
        """Return everything that was stored in a partition, in order."""
        partition = self.memory._broker.partitions.get(TopicName.parse(topic))
        entries = [] if partition is None else partition.log.entries
        return [message for entry in entries for message in entry.messages]

    def deliver_at(self, topic: str) -> list[int | None]:
        """Return the times until which the broker holds the entries of a partition, ms."""
        partition = self.memory._broker.partition(TopicName.parse(topic))
        return [entry.deliver_at_ms for entry in partition.log.entries]

    def backlog(self, source: str | None = None) -> int:
        """Return the number of messages that are not acknowledged."""
        name = TopicName.parse(source or self.source)
        stats = self.memory.admin.partition_stats(name)
        return int(stats.subscriptions[SUBSCRIPTION].backlog_entries)

    def members(self, *but: str) -> dict[str, list[bytes | None]]:
        """Return the payloads by topic, of all topics with messages but the source and others."""
        names = (name.full for name in self.memory._broker.partitions)
        found = {name: [each.value for each in self.stored(name)] for name in names}
        return {
            name: values
            for name, values in found.items()
            if values and name not in (*but, self.source)
        }

    def subscribe(self, topic: str) -> None:
        """Create a business topic with a subscription."""
        self._client.subscribe(topic, "app", pulsar.ConsumerType.Shared).close()


def _local(bench: Bench) -> Counts:
    memory = bench.memory
    with LocalMover(memory.client(), memory.admin, bench.description, memory.clock) as mover:
        return mover.run_once().counts()


def _drain(bench: Bench) -> Counts:
    memory = bench.memory
    return drain(memory.client(), memory.admin, bench.description, clock=memory.clock).counts()


def _replay(bench: Bench) -> Counts:
    memory = bench.memory
    report = dead_letters.replay(
        memory.client(), memory.admin, bench.description, lambda _: True, clock=memory.clock
    )
    failed = [one for one in report.letters if one.outcome in ("failed", "unconfirmed")]
    if failed:
        raise BrokerError(failed[0].reason)
    return report.forwarded.counts()


def _function(bench: Bench) -> Counts:
    memory = bench.memory
    client = memory.client()
    consumer = client.subscribe(
        source_topics(bench.description),
        SUBSCRIPTION,
        consumer_type=pulsar.ConsumerType.Shared,
        negative_ack_redelivery_delay_ms=DAY_MS,
    )
    relay = Relay(
        client,
        memory.admin,
        bench.description,
        consumer,
        clock=memory.clock,
        start=lambda work: work(),
        now_s=memory.clock.monotonic_s,
    )
    idle = 0
    while idle < 5:
        with suppress(pulsar.Timeout):
            relay.offer(consumer.receive(0))
            continue
        relay._flushed_s = float("-inf")  # its clock stands still here
        relay.poll()
        idle += 1
    assert not relay.unacknowledged
    relay.close()
    client.shutdown()
    report = relay.take_report()
    if report.given_back:
        raise BrokerError(", ".join(report.given_back))
    return report.counts()


class _Process:
    """The runtime of a Python process of Spark, on the in-memory Pulsar."""

    def __init__(self, memory: MemoryPulsar, description: LevelTopicDescription) -> None:
        self.client, self.admin = memory.client(), memory.admin
        self._description, self._clock = description, memory.clock
        self._forwarder: Forwarder | None = None

    def describe(self, level_topic: str) -> LevelTopicDescription:
        return self._description

    def start_task(self) -> None: ...

    def forwarder(self, level_topic: str) -> Forwarder:
        if self._forwarder is None:
            self._forwarder = Forwarder(self.client, self.admin, self._description, self._clock)
        return self._forwarder

    def reset_forwarders(self) -> None:
        if self._forwarder is not None:
            self._forwarder.close()


class SparkQuery:
    """A query with its checkpoint, without Spark: its reader works as Spark has it do.

    The end of a batch is logged before its tasks run, and the batch as complete after them. Both
    logs survive the process.

    Args:
        steps: True if the rows leave the source, as with a user's steps.

    Attributes:
        offsets: the ends of the batches that were planned; the last one may not be complete.
        complete: number of the batches that are complete.
    """

    def __init__(self, bench: Bench, patch: pytest.MonkeyPatch, *, steps: bool) -> None:
        self._bench, self._patch, self._steps = bench, patch, steps
        self.offsets: list[Any] = []
        self.complete = 0

    def run(self) -> Counts:
        """Run the query in a new process until no message is ready."""
        from pyspark.sql.streaming.datasource import ReadAllAvailable

        from delaylevel.spark_sync import driver, forwarding, runtime
        from delaylevel.spark_sync.arrow_rows import SCHEMA
        from delaylevel.spark_sync.forwarding import FORWARDED_SCHEMA, forward_rows
        from delaylevel.spark_sync.options import SyncOptions
        from delaylevel.spark_sync.source import DelayLevelStreamReader

        memory, description = self._bench.memory, self._bench.description
        here = _Process(memory, description)
        for module in (driver, forwarding, runtime):
            self._patch.setattr(module, "runtime", lambda options: here)
        self._patch.setattr(forwarding, "_CLOCK", memory.clock)
        options = SyncOptions((), (description.topic,), forward=not self._steps)
        reader = DelayLevelStreamReader(options, SCHEMA if self._steps else FORWARDED_SCHEMA)
        if self._steps:
            from delaylevel.spark_sync import source

            self._patch.setattr(source, "runtime", lambda options: here)
        reader._driver = driver.Driver(options, memory.clock)
        counts: Counter[str] = Counter()
        try:
            start = self.offsets[self.complete - 1] if self.complete else None
            start = start or reader.initialOffset()
            idle = 0
            while idle < 2:
                if len(self.offsets) > self.complete:
                    end = self.offsets[self.complete]  # planned before the end of a process
                else:
                    end = reader.latestOffset(start, ReadAllAvailable())
                    if end == start:
                        idle += 1
                        continue
                    self.offsets.append(end)
                for part in reader.partitions(start, end):
                    rows = reader.read(part)
                    for row in forward_rows(options, rows) if self._steps else rows:
                        for report in filter(None, row.column("report").to_pylist()):
                            counts.update(json.loads(report)[description.topic])
                self.complete += 1
                reader.commit(end)
                start = end
        finally:
            reader.stop()
        del counts["latest_ms"]
        return counts


def _spark(bench: Bench) -> Counts:
    pytest.importorskip("pyspark")
    return bench._query.run()


_HOSTS: dict[str, Callable[[Bench], Counts]] = {
    "local": _local,
    "spark": _spark,
    "steps": _spark,
    "function": _function,
    "drain": _drain,
    "replay": _replay,
}
#: All hosts, and those that find messages in the levels.
HOSTS: Collection[str] = tuple(_HOSTS)
MOVERS: Collection[str] = tuple(_HOSTS)[:4]
