"""The movers on both routes between our own topics, against hand-written loops.

The default route goes from a level into the window topic: one level by DAY and the final window
`tracker`. The other one goes from a coarse level into a finer one.

The loops do the same work in as few lines as possible: they receive from the same partitions with
their own subscriptions, choose the partition by the due time in the properties or by the hash of
the key, add the ID that identifies copies, and call send_async with payload, key, event time and
properties for their own topics. The plain loop acknowledges each message in the callback of its
send, or negatively if the send failed: without this, messages are lost. The tuned loop runs no
Python code in the callback and acknowledges all messages at once at the end; it does not give back
messages that fail. Neither loop checks anything, sets aside refused messages, or knows its position
after a restart. Messages have 1 KiB, a key, an event time and two properties, and all sides send in
batches.

A round is one portion of messages, in the same number of level topics for each mover. It is
published first, then moved once by each loop and once by each mover, until no message is ready. One
Spark session serves all rounds. The job's rate is its rows divided by the duration of their
batches: triggerExecution without latestOffset, which includes the start of each run (partition
locks, connections). The local mover has its locks before its time starts. The first round is
discarded.

Example:
    python benchmarks/bench_spark.py --messages 20000 --rounds 2 --masters 'local[2]'
"""

from __future__ import annotations

import functools
import tempfile
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pulsar
from common import (
    BODY,
    SETTINGS,
    Case,
    arguments,
    connected,
    note,
    private_broker,
    rate_row,
    report,
)
from pyspark.sql import SparkSession

from delaylevel import DelayLevelClient, PartitionStrategy
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.model.envelope import DUE, ID, TARGET
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.mover.local import LocalMover
from delaylevel.spark_sync.job import SparkSyncJob, spark_session
from delaylevel.spark_sync.options import SyncSettings


@dataclass(frozen=True)
class Route:
    """A hop, and a level topic whose messages make it one second after they are published.

    With a second level, whose unit is ``finer_ms``, messages go there instead of the window.
    """

    name: str
    levels: tuple[PartitionStrategy, ...]
    delay: timedelta
    finer_ms: int = 0


HOUR = timedelta(hours=1)
SECOND = timedelta(seconds=1)


def level(unit: timedelta, longest: timedelta, **options: Any) -> PartitionStrategy:
    """Return a level."""
    return PartitionStrategy(partition_by=unit, maximum_delay=longest, **options)


ROUTES = (
    Route(
        "level-window",
        (level(24 * HOUR, 48 * HOUR, lead=24 * HOUR - SECOND),),
        36 * HOUR,
    ),
    Route(
        "coarse-fine",
        (level(HOUR, 2 * HOUR, lead=HOUR - SECOND), level(HOUR / 12, HOUR)),
        1.5 * HOUR,
        finer_ms=5 * 60 * 1000,
    ),
)
WINDOW_PARTITIONS = 4
# Number of source partitions.
SOURCES = 4
READY_AFTER_S = 1.5


class Pipeline:
    """Level topics, one for each source partition, with their producers and loops."""

    def __init__(self, client: DelayLevelClient, connection: Connection, route: Route) -> None:
        self.client, self.connection = client, connection
        self.route = route
        self.published = 0
        # In one level, each partition is ready a unit after the previous one. The first partitions
        # of several level topics are ready at the same time.
        self.producers = [self._producer() for _ in range(SOURCES)]
        self.local_producers = [self._producer() for _ in range(SOURCES)]
        descriptions: list[LevelTopicDescription] = [item.description for item in self.producers]
        self.level_topics = tuple(item.topic for item in descriptions)
        self.sources = [item.level_topic(0).partition(0).full for item in descriptions]
        self.consumers = {
            (source, name): client.subscribe(source, name, receiver_queue_size=2000)
            for source in self.sources
            for name in ("plain", "tuned")
        }
        self.outputs: dict[tuple[str, str, str, int], Any] = {}

    def _producer(self) -> Any:
        topic = f"orders-{uuid.uuid4().hex[:6]}"
        self.client.subscribe(topic, "app", consumer_type=pulsar.ConsumerType.Shared).close()
        return self.client.create_producer(
            topic,
            enable_delay_level_topic=True,
            partition_strategy=list(self.route.levels),
            final_window="broker" if self.route.finer_ms else "tracker",
            **SETTINGS,
        )

    def publish(self, messages: int) -> None:
        """Publish a portion for the loops and the job, and one for the local mover."""
        for producers in (self.local_producers, self.producers):
            self._publish(producers, messages)
        self.published = messages
        time.sleep(READY_AFTER_S)

    def _publish(self, producers: Sequence[Any], messages: int) -> None:
        outcomes: dict[Any, Any] = {}
        for number in range(messages):
            producers[number % len(producers)].send_async(
                BODY,
                outcomes.setdefault,
                properties={"customer": f"c{number % 5000}", "kind": "reminder"},
                partition_key=f"key{number % 1000}",
                event_timestamp=1_700_000_000_000 + number,
                deliver_after=self.route.delay,
            )
        for producer in producers:
            producer.flush()
        assert list(outcomes) == [pulsar.Result.Ok], outcomes.keys()

    def loop(self, tuned: bool) -> float:
        """Move the portion with receive and send_async; return messages per second."""
        share, rest = divmod(self.published, len(self.sources))
        start = time.perf_counter()
        for number, source in enumerate(self.sources):
            outcomes: Counter[Any] = Counter()
            self._loop(source, tuned, share + (number < rest), outcomes)
            assert list(outcomes) == [pulsar.Result.Ok], outcomes.keys()
        return self.published / (time.perf_counter() - start)

    def _loop(self, source: str, tuned: bool, messages: int, outcomes: Counter[Any]) -> None:
        """Acknowledge each message in a callback in Python; if tuned, all at the end."""
        name = "tuned" if tuned else "plain"
        consumer = self.consumers[source, name]

        def sent(message: Any, result: Any, _: Any) -> None:
            outcomes[result] += 1
            if result == pulsar.Result.Ok:
                consumer.acknowledge(message)
            else:
                consumer.negative_acknowledge(message)

        message = None
        for _ in range(messages):
            message = consumer.receive(30_000)
            callback = outcomes.setdefault if tuned else functools.partial(sent, message)
            self._send(source, name, message, callback)
        for key, producer in self.outputs.items():
            if key[:2] == (source, name):
                producer.flush()
        if tuned and message is not None:
            consumer.acknowledge_cumulative(message)

    def _send(self, source: str, name: str, message: Any, callback: Any) -> None:
        """Send a message with its ID to the partition for its due time, or for its key."""
        properties = message.properties()
        left_ms = int(properties[DUE]) - time.time_ns() // 1_000_000
        at = message.message_id()
        place = (at.ledger_id(), at.entry_id(), at.batch_index())
        if ID not in properties:
            properties[ID] = "{}:{}:{}:{}".format(source, *place)
        key = message.partition_key()
        if self.route.finer_ms:
            partition = left_ms // self.route.finer_ms - 1
        else:
            partition = zlib.crc32(key.encode()) % WINDOW_PARTITIONS
        producer = self._output(source, name, properties[TARGET], partition)
        producer.send_async(
            message.data(),
            callback,
            properties=properties,
            partition_key=key,
            event_timestamp=message.event_timestamp(),
        )

    def _output(self, source: str, name: str, target: str, partition: int) -> Any:
        key = (source, name, target, partition)
        producer = self.outputs.get(key)
        if producer is None:
            topic = f"loop-{uuid.uuid4().hex[:6]}"
            self.client.subscribe(topic, "app").close()
            producer = self.outputs[key] = self.client.create_producer(
                topic, batching_enabled=True, **SETTINGS
            )
        return producer


def run_job(pipeline: Pipeline, master: str, checkpoint: str, spark: SparkSession) -> float:
    """Move the ready messages with the job; return messages per second in its batches."""
    settings = SyncSettings(pipeline.level_topics, checkpoint, once=True, master=master)
    batches: list[tuple[int, int]] = []

    def on_progress(progress: Any) -> None:
        if progress.numInputRows:
            spent = progress.durationMs
            took_ms = spent["triggerExecution"] - spent["latestOffset"]
            batches.append((progress.numInputRows, took_ms))

    SparkSyncJob(pipeline.connection, settings, spark).run(on_progress)
    rows, milliseconds = (sum(column) for column in zip(*batches, strict=True))
    assert rows == pipeline.published, f"{rows} of {pipeline.published} messages"
    return rows / milliseconds * 1000


def run_local(pipeline: Pipeline, admin: Admin) -> float:
    """Move the ready messages with a local mover; return messages per second."""
    moved, spent_s = 0, 0.0
    for producer in pipeline.local_producers:
        with closing(LocalMover(pipeline.client, admin, producer.description)) as mover:
            start = time.perf_counter()
            moved += mover.run_once().total
            spent_s += time.perf_counter() - start
    assert moved == pipeline.published, f"{moved} of {pipeline.published} messages"
    return moved / spent_s


def compare(connection: Connection, route: Route, master: str, given: Any) -> list[Case]:
    """Move each portion with both loops and with the movers."""
    rates: dict[str, list[float]] = {}
    portion = -(-given.messages // given.rounds)
    spark = spark_session(connection, SyncSettings((), "", master=master))
    spark.sparkContext.setLogLevel("ERROR")
    try:
        with (
            connected(connection) as client,
            Admin.from_connection(connection) as admin,
            tempfile.TemporaryDirectory(prefix="delaylevel-bench-") as checkpoint,
        ):
            pipeline = Pipeline(client, connection, route)
            sides: dict[str, Callable[[], float]] = {
                "plain loop": lambda: pipeline.loop(tuned=False),
                "tuned loop": lambda: pipeline.loop(tuned=True),
                "job": lambda: run_job(pipeline, master, checkpoint, spark),
                "local mover": lambda: run_local(pipeline, admin),
            }
            for messages in (min(given.warm_up, portion), *[portion] * given.rounds):
                pipeline.publish(messages)
                for side, move in sides.items():
                    rates.setdefault(side, []).append(move())
                found = ", ".join(f"{side} {each[-1]:,.0f}/s" for side, each in rates.items())
                note(f"{route.name} {master}: {found}")
    finally:
        spark.stop()
    kind = {"route": route.name, "master": master, "messages": portion * given.rounds}
    return [
        {**kind, **rate_row(side, found[1:], rates["plain loop"][1:])}
        for side, found in rates.items()
    ]


if __name__ == "__main__":
    parser = arguments(__doc__, messages=500_000, rounds=2)
    add, masters = parser.add_argument, ["local[1]", "local[2]"]
    add("--masters", nargs="+", default=masters, help="Spark masters")
    text = "number of messages in the discarded round (default: 250,000)"
    add("--warm-up", type=int, default=250_000, help=text)
    options = parser.parse_args()
    rows: list[Case] = []
    with private_broker() as broker:
        for route in ROUTES:
            for master in options.masters:
                rows += compare(broker.connection, route, master, options)
    report(rows, options.json)
