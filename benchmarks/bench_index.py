"""The broker's delay index and its recovery time after an unload: native delays and levels.

Messages with the same delays, spread evenly over a day, are sent once with the plain client's
deliver_after and once through a level by HOUR. A Shared consumer is connected to both business
topics. Then the topics are unloaded in turn. The benchmark measures the time until a message
without delay arrives, and the time until the index is as large as before.

Example:
    python benchmarks/bench_index.py --messages 5000 --rounds 1 --json index.json
"""

from __future__ import annotations

import statistics
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pulsar
from common import (
    BODY,
    SETTINGS,
    Case,
    arguments,
    connected,
    delay_index,
    note,
    private_broker,
    report,
)

from delaylevel import DelayLevelClient, PartitionBy, PartitionStrategy
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.model.topic_name import TopicName

STRATEGY = PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=24))
LEVELS: dict[str, Any] = {"enable_delay_level_topic": True, "partition_strategy": STRATEGY}
# No message becomes due while the benchmark runs.
SOONEST_MS, LATEST_MS = 1_800_000, 86_400_000
PATIENCE_S = 300.0


class Side:
    """A business topic with a consumer, and a producer of either kind."""

    def __init__(self, name: str, connection: Connection, client: DelayLevelClient) -> None:
        self.name, self._connection = name, connection
        self.topic = TopicName.parse(f"orders-{uuid.uuid4().hex[:6]}")
        self._consumer = client.subscribe(
            self.topic.full, "app", consumer_type=pulsar.ConsumerType.Shared
        )
        extra = LEVELS if name == "levels" else {}
        self._producer: Any = client.create_producer(self.topic.full, **extra, **SETTINGS)
        level = self._producer.description.level_topic(0) if extra else None
        self._partitions = [level.partition(k) for k in range(STRATEGY.partitions)] if level else []
        self.fresh_s: list[float] = []
        self.index_s: list[float] = []

    def publish(self, messages: int) -> None:
        """Send messages with evenly spread delays, and wait until the index stays the same."""
        outcomes: dict[Any, Any] = {}
        step = (LATEST_MS - SOONEST_MS) / messages
        start = time.perf_counter()
        for number in range(messages):
            # 7919 is a prime: messages are not sent in the order of their delays.
            delay = timedelta(milliseconds=SOONEST_MS + int(step * (number * 7919 % messages)))
            self._producer.send_async(BODY, outcomes.setdefault, deliver_after=delay)
        self._producer.flush()
        assert list(outcomes) == [pulsar.Result.Ok], outcomes.keys()
        rate = messages / (time.perf_counter() - start)
        self.index, since = delay_index(self._connection, self.topic), time.monotonic()
        while time.monotonic() - since < 1:
            time.sleep(0.1)
            found = delay_index(self._connection, self.topic)
            if found != self.index:
                self.index, since = found, time.monotonic()
        self.found: Case = {
            "side": self.name,
            "pending": messages,
            "publish_per_s": round(rate),
            "index_bytes": self.index[0],
            "index_messages": self.index[1],
            "level_index_bytes": sum(
                delay_index(self._connection, each)[0] for each in self._partitions
            ),
        }

    def unload(self, admin: Admin) -> None:
        """Unload the topic, and record the time until it is in the same state again."""
        admin.unload(self.topic)
        start = time.monotonic()
        # On both sides this message goes directly to the business topic: it has no delay.
        self._producer.send_async(b"fresh", None)
        fresh: float | None = None
        while time.monotonic() - start < PATIENCE_S:
            with suppress(pulsar.Timeout):
                self._consumer.acknowledge(self._consumer.receive(20))
                fresh = time.monotonic() - start
            index = delay_index(self._connection, self.topic)
            if fresh is not None and index[1] >= self.index[1]:
                self.fresh_s.append(fresh)
                self.index_s.append(time.monotonic() - start)
                note(f"{self.name}: fresh after {fresh:.2f} s")
                return
        raise TimeoutError(f"{self.topic}: {index} after {PATIENCE_S} s")

    def row(self) -> Case:
        """Return the row of the table."""
        return {
            **self.found,
            "fresh_after_s": statistics.median(self.fresh_s),
            "fresh_worst_s": max(self.fresh_s),
            "index_back_after_s": statistics.median(self.index_s),
        }


if __name__ == "__main__":
    options = arguments(__doc__, messages=200_000, rounds=3).parse_args()
    with (
        private_broker() as broker,
        connected(broker.connection) as client,
        Admin.from_connection(broker.connection) as admin,
    ):
        sides = [Side(name, broker.connection, client) for name in ("native", "levels")]
        for side in sides:
            side.publish(options.messages)
        for _ in range(options.rounds):
            for side in sides:
                side.unload(admin)
    report([side.row() for side in sides], options.json)
