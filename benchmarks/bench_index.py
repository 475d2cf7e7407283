"""The broker's delay index and its recovery time after an unload: native delays and levels.

Messages with the same delays, spread evenly over a day, are sent once with the plain client's
deliver_after and once through a level by HOUR. A Shared consumer is connected to both business
topics. Then the topics are unloaded in turn. The benchmark measures the time until a message
without delay arrives, and the time until the index is as large as before.

Examples:
    python benchmarks/bench_index.py
    python benchmarks/bench_index.py --messages 5000 --rounds 1 --json index.json
"""

from __future__ import annotations

import json
import statistics
import time
import urllib.request
import uuid
from datetime import timedelta
from typing import Any

import pulsar
from baselines import Case
from common import BODY, arguments, connected, note, private_broker, report

from delaylevel import DelayLevelClient, PartitionBy, PartitionStrategy
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.model.topic_name import TopicName

SETTINGS: dict[str, Any] = {"block_if_queue_full": True, "max_pending_messages": 5000}
STRATEGY = PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=timedelta(hours=24))
# No message becomes due while the benchmark runs.
SOONEST_MS, LATEST_MS = 1_800_000, 86_400_000
PATIENCE_S = 300.0


class Side:
    """A business topic with a consumer, and a producer of either kind.

    Args:
        name: name of the side in the table.
        connection: addresses of the broker.
        client: client of this broker.
        wrapped: kind of producer, True for the wrapper and False for the plain client.
    """

    def __init__(
        self, name: str, connection: Connection, client: DelayLevelClient, wrapped: bool
    ) -> None:
        self.name, self._connection = name, connection
        self.topic = f"orders-{uuid.uuid4().hex[:6]}"
        self._consumer = client.subscribe(
            self.topic, "app", consumer_type=pulsar.ConsumerType.Shared
        )
        levels: dict[str, Any] = {"enable_delay_level_topic": True, "partition_strategy": STRATEGY}
        self._producer: Any = client.create_producer(
            self.topic, **(levels if wrapped else {}), **SETTINGS
        )
        description = getattr(self._producer, "description", None)
        level = description.level_topic(0) if description else None
        self._partitions = [level.partition(k) for k in range(STRATEGY.partitions)] if level else []
        self.fresh_s: list[float] = []
        self.index_s: list[float] = []

    def publish(self, messages: int) -> float:
        """Send messages with evenly spread delays; return messages per second."""
        outcomes: dict[Any, Any] = {}
        step = (LATEST_MS - SOONEST_MS) / messages
        start = time.perf_counter()
        for number in range(messages):
            # 7919 is a prime: messages are not sent in the order of their delays.
            delay_ms = SOONEST_MS + int(step * (number * 7919 % messages))
            self._producer.send_async(
                BODY, outcomes.setdefault, deliver_after=timedelta(milliseconds=delay_ms)
            )
        self._producer.flush()
        assert list(outcomes) == [pulsar.Result.Ok], outcomes.keys()
        return messages / (time.perf_counter() - start)

    def stats(self, topic: TopicName | None = None) -> tuple[int, int]:
        """Return the size of the delay index in bytes, and the number of delayed messages."""
        name = topic or TopicName.parse(self.topic)
        path = name.full.replace("://", "/")
        with urllib.request.urlopen(
            f"{self._connection.admin_url}/admin/v2/{path}/stats"
        ) as answer:
            found = json.load(answer)
        delayed = sum(item["msgDelayed"] for item in found["subscriptions"].values())
        return found["delayedMessageIndexSizeInBytes"], delayed

    def level_index(self) -> int:
        """Return the total size in bytes of the delay indexes of the level's partitions."""
        return sum(self.stats(partition)[0] for partition in self._partitions)

    def settled(self) -> tuple[int, int]:
        """Wait until the stats stay the same for a second, and return them."""
        last, since = self.stats(), time.monotonic()
        while time.monotonic() - since < 1:
            time.sleep(0.1)
            found = self.stats()
            if found != last:
                last, since = found, time.monotonic()
        return last

    def unload(self, admin: Admin, delayed: int) -> None:
        """Unload the topic, and record the time until it is in the same state again."""
        admin.unload(TopicName.parse(self.topic))
        start = time.monotonic()
        # On both sides this message goes directly to the business topic: it has no delay.
        self._producer.send_async(b"fresh", None)
        fresh: float | None = None
        while time.monotonic() - start < PATIENCE_S:
            try:
                self._consumer.acknowledge(self._consumer.receive(20))
                fresh = time.monotonic() - start
            except pulsar.Timeout:
                pass
            if fresh is not None and self.stats()[1] >= delayed:
                self.fresh_s.append(fresh)
                self.index_s.append(time.monotonic() - start)
                return
        raise TimeoutError(f"{self.topic}: {self.stats()} after {PATIENCE_S} s, {delayed} before")

    def row(self, messages: int, published: float, index: tuple[int, int]) -> Case:
        """Return the row of the table."""
        return {
            "side": self.name,
            "pending": messages,
            "publish_per_s": round(published),
            "index_bytes": index[0],
            "index_messages": index[1],
            "level_index_bytes": self.level_index(),
            "fresh_after_s": statistics.median(self.fresh_s),
            "fresh_worst_s": max(self.fresh_s),
            "index_back_after_s": statistics.median(self.index_s),
        }


def run(messages: int, rounds: int) -> list[Case]:
    """Fill both sides, then unload them in turn."""
    with (
        private_broker() as connection,
        connected(connection) as client,
        Admin.from_connection(connection) as admin,
    ):
        sides = [
            Side("native", connection, client, wrapped=False),
            Side("levels", connection, client, wrapped=True),
        ]
        published = [side.publish(messages) for side in sides]
        indexes = [side.settled() for side in sides]
        for number in range(rounds):
            for side, index in zip(sides, indexes, strict=True):
                side.unload(admin, index[1])
                note(
                    f"{side.name}: fresh after {side.fresh_s[-1]:.2f} s ({number + 1} of {rounds})"
                )
        return [
            side.row(messages, rate, index)
            for side, rate, index in zip(sides, published, indexes, strict=True)
        ]


if __name__ == "__main__":
    parser = arguments(__doc__, messages=200_000, rounds=3)
    options = parser.parse_args()
    report(run(options.messages, options.rounds), options.json)
