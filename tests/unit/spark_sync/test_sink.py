"""Tests of rows that are forwarded behind a user's steps, on the in-memory Pulsar."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("pyspark")

from delaylevel import Levels, PartitionBy, PartitionStrategy, topics
from delaylevel.model.clock import SystemClock
from delaylevel.model.envelope import DUE, TARGET
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import source_partitions
from delaylevel.mover.forwarder import Forwarder
from delaylevel.spark_sync import forwarding
from delaylevel.spark_sync.arrow_rows import to_batches
from delaylevel.spark_sync.options import SyncOptions
from delaylevel.testing import MemoryPulsar

HOUR_MS = 3_600_000


class InMemoryRuntime:
    """The runtime of a Python process of Spark, on the in-memory Pulsar."""

    def __init__(self, memory: MemoryPulsar, description: LevelTopicDescription) -> None:
        self.client, self.admin = memory.client(), memory.admin
        self._description = description

    def start_task(self) -> None:
        pass

    def describe(self, level_topic: str) -> LevelTopicDescription:
        return self._description

    def forwarder(self, level_topic: str) -> Forwarder:
        assert level_topic == self._description.topic
        return Forwarder(self.client, self.admin, self._description)

    def reset_forwarders(self) -> None:
        raise AssertionError("no task fails in this test")


@pytest.mark.parametrize(("planned_ago_ms", "parked"), [(0, 1), (72 * HOUR_MS, 0)])
def test_with_at_least_once_a_late_batch_is_routed_by_the_current_time(
    monkeypatch: pytest.MonkeyPatch, planned_ago_ms: int, parked: int
) -> None:
    levels = Levels(
        [
            PartitionStrategy(),
            PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=24)),
        ]
    )
    now_ms = SystemClock().now_ms()
    # The message is due in 5 h. If the batch was planned three days ago, it is long overdue.
    # At the time of the plan, both would be parked by HOUR.
    due_ms = now_ms - planned_ago_ms + 5 * HOUR_MS
    with MemoryPulsar() as memory:
        client: Any = memory.client()
        client.create_producer("orders").close()
        client.subscribe("orders", "keep").close()
        description = topics.create(
            memory.admin,
            LevelTopicDescription(
                "orders-delay-level",
                levels,
                ("persistent://public/default/orders",),
                final_window=FinalWindow.BROKER,
            ),
        )
        source = source_partitions(description)[0]
        properties = {DUE: str(due_ms), TARGET: description.targets[0]}
        message = ParkedMessage(1, 2, 0, now_ms - 24 * HOUR_MS, "k", "", 0, properties, b"body")
        batches = to_batches(source, [message], "DAY 0", now_ms - planned_ago_ms)
        here = InMemoryRuntime(memory, description)
        monkeypatch.setattr(forwarding, "runtime", lambda _: here)
        (counted,) = forwarding.forward_rows(SyncOptions((), (description.topic,)), batches)
    report = json.loads(counted.column("report").to_pylist()[-1])[description.topic]
    assert (report["parked"], report["due"]) == (parked, 1 - parked)
