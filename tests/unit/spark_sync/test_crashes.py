"""Tests that the Spark job may end after any event, without Spark: its source on the driver.

A reader chooses, forwards and acknowledges batches as Spark has it do: the end of a batch is
logged before its tasks run, and the batch as complete after them. Both logs survive the process.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.streaming.datasource import ReadAllAvailable

from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import PartitionStrategy
from delaylevel.mover.forwarder import Forwarder
from delaylevel.spark_sync import driver as driver_module
from delaylevel.spark_sync import forwarding
from delaylevel.spark_sync import runtime as ranges
from delaylevel.spark_sync.forwarding import FORWARDED_SCHEMA
from delaylevel.spark_sync.options import SyncOptions
from delaylevel.spark_sync.source import DelayLevelStreamReader
from delaylevel.testing import Crashed, MemoryPulsar

HOUR = timedelta(hours=1)


class Process:
    """The process of a job: what it keeps between tasks, on the in-memory Pulsar."""

    def __init__(self, memory: MemoryPulsar, description: LevelTopicDescription) -> None:
        self.client, self.admin = memory.client(), memory.admin
        self._description = description
        self._forwarder = Forwarder(self.client, self.admin, description, memory.clock)

    def describe(self, level_topic: str) -> LevelTopicDescription:
        return self._description

    def start_task(self) -> None: ...

    def forwarder(self, level_topic: str) -> Forwarder:
        return self._forwarder

    def reset_forwarders(self) -> None: ...


class Job:
    """A query with its checkpoint.

    Attributes:
        offsets: the ends of the batches that were planned; the last one may not be complete.
        complete: number of the batches that are complete.
    """

    def __init__(self, description: LevelTopicDescription, patch: pytest.MonkeyPatch) -> None:
        self._description = description
        self._patch = patch
        self.offsets: list[Any] = []
        self.complete = 0

    def run(self, memory: MemoryPulsar) -> None:
        """Run the query in a new process until no message is ready."""
        here = Process(memory, self._description)
        for module in (driver_module, forwarding, ranges):
            self._patch.setattr(module, "runtime", lambda options: here)
        options = SyncOptions((), (self._description.topic,), forward=True)
        reader = DelayLevelStreamReader(options, FORWARDED_SCHEMA)
        reader._driver = driver_module.Driver(options, memory.clock)
        try:
            start = self.offsets[self.complete - 1] if self.complete else None
            start = start or reader.initialOffset()
            idle = 0
            while True:
                if len(self.offsets) > self.complete:
                    end = self.offsets[self.complete]  # planned before the end of a process
                else:
                    end = reader.latestOffset(start, ReadAllAvailable())
                    if end == start:
                        idle += 1
                        if idle == 2:
                            return
                        continue
                    self.offsets.append(end)
                for part in reader.partitions(start, end):
                    for _ in reader.read(part):
                        pass
                self.complete += 1
                reader.commit(end)
                start = end
        finally:
            reader.stop()


def test_a_job_may_end_after_any_event(monkeypatch: pytest.MonkeyPatch) -> None:
    event = 0
    while True:
        event += 1
        memory = MemoryPulsar()
        producer: Any = memory.client().create_producer(
            "orders",
            enable_delay_level_topic=True,
            partition_strategy=PartitionStrategy(partition_by="HOUR", maximum_delay=3 * HOUR),
            final_window="broker",
            mover="service",
        )
        monkeypatch.setattr(forwarding, "_CLOCK", memory.clock)
        sent = {b"%d" % number for number in range(3)}
        for body in sorted(sent):
            producer.send(body, deliver_after=HOUR + int(body) * HOUR / 2)
        producer.close()
        memory.clock.advance(2 * HOUR)
        job = Job(producer.description, monkeypatch)
        memory.crash_after(event)
        crashed = False
        try:
            job.run(memory)
        except Crashed:
            crashed = True
            memory.crash_after(None)
            job.run(memory)
        memory.crash_after(None)
        found = Counter(message.data for message in memory.delivered("orders"))
        assert found.keys() == sent, "lost"
        assert crashed or set(found.values()) == {1}, "copied"
        memory.close()
        if not crashed:
            break
    assert event > 4
