"""The Spark job from a coarse level into a finer one, against hand-written loops.

The loops do the same work in as few lines as possible: they receive from the same partitions with
their own subscriptions, choose the partition by the due time in the properties, add the ID that
identifies copies, and call send_async with payload, key, event time and properties for their own
topics. The plain loop acknowledges each message in the callback of its send, or negatively if the
send failed: without this, messages are lost. The tuned loop runs no Python code in the callback and
acknowledges all messages at once at the end; it does not give back messages that fail. Neither loop
checks anything, sets aside refused messages, or knows its position after a restart. Messages have
1 KiB, a key, an event time and two properties. With at-least-once delivery, all sides send in
batches. With effectively-once delivery, all send unbatched with sequence IDs to topics with broker
deduplication.

A round is one portion of messages. It is published first, then moved once by each loop and once by
the job, which runs until no message is ready. One Spark session serves all rounds. The job's rate
is its rows divided by the duration of their batches: triggerExecution without latestOffset, which
includes the start of each run (partition locks, connections). The first round is discarded.

Examples:
    python benchmarks/bench_spark.py
    python benchmarks/bench_spark.py --messages 20000 --rounds 2 --masters 'local[2]'
"""

from __future__ import annotations

import functools
import tempfile
import time
import uuid
from collections import Counter
from datetime import timedelta
from typing import Any

import pulsar
from baselines import Case
from common import BODY, arguments, connected, note, private_broker, rate_row, report
from pyspark.sql import SparkSession

from delaylevel import DelayLevelClient, PartitionStrategy
from delaylevel.cluster.connection import Connection
from delaylevel.model.delivery import Delivery, sequence_id
from delaylevel.model.envelope import DUE, ID, TARGET
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.spark_sync.job import SparkSyncJob
from delaylevel.spark_sync.session import spark_session
from delaylevel.spark_sync.settings import SyncSettings

# A message is ready one second after it is published, and near-due only for the finer level.
LEVELS = [
    PartitionStrategy(
        partition_by=timedelta(hours=1),
        maximum_delay=timedelta(hours=2),
        lead=timedelta(minutes=59, seconds=59),
    ),
    PartitionStrategy(partition_by=timedelta(minutes=5), maximum_delay=timedelta(hours=1)),
]
FINER_MS = 5 * 60 * 1000
DELAY = timedelta(hours=1, minutes=30)
READY_AFTER_S = 1.5
SETTINGS: dict[str, Any] = {"block_if_queue_full": True, "max_pending_messages": 5000}


class Pipeline:
    """Level topics with their producers and loops.

    Args:
        client: client of the broker.
        connection: addresses of the broker.
        delivery: at least once or effectively once.
        partitions: number of source partitions for each portion.
    """

    def __init__(
        self, client: DelayLevelClient, connection: Connection, delivery: Delivery, partitions: int
    ) -> None:
        self.client, self.connection, self.delivery = client, connection, delivery
        self.published = 0
        # In one level, each partition is ready an hour after the previous one. The first partitions
        # of several level topics are ready at the same time.
        self.producers = [self._producer() for _ in range(partitions)]
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
            partition_strategy=LEVELS,
            # The mover itself delivers effectively once only with the final window broker.
            final_window="broker",
            **SETTINGS,
        )

    def publish(self, messages: int) -> None:
        """Publish a portion, and wait until it is ready."""
        outcomes: dict[Any, Any] = {}
        for number in range(messages):
            self.producers[number % len(self.producers)].send_async(
                BODY,
                outcomes.setdefault,
                properties={"customer": f"c{number % 5000}", "kind": "reminder"},
                partition_key=f"key{number % 1000}",
                event_timestamp=1_700_000_000_000 + number,
                deliver_after=DELAY,
            )
        for producer in self.producers:
            producer.flush()
        assert list(outcomes) == [pulsar.Result.Ok], outcomes.keys()
        self.published = messages
        time.sleep(READY_AFTER_S)

    def loop(self, tuned: bool) -> float:
        """Move the portion with receive and send_async; return messages per second."""
        share, rest = divmod(self.published, len(self.sources))
        start = time.perf_counter()
        for number, source in enumerate(self.sources):
            outcomes: Counter[Any] = Counter()
            messages = share + (number < rest)
            if tuned:
                self._loop_tuned(source, messages, outcomes)
            else:
                self._loop_plain(source, messages, outcomes)
            assert list(outcomes) == [pulsar.Result.Ok], outcomes.keys()
        return self.published / (time.perf_counter() - start)

    def _loop_plain(self, source: str, messages: int, outcomes: Counter[Any]) -> None:
        """Acknowledge each message in the callback of its send, or give it back."""
        consumer = self.consumers[source, "plain"]

        def sent(message: Any, result: Any, _: Any) -> None:
            outcomes[result] += 1
            if result == pulsar.Result.Ok:
                consumer.acknowledge(message)
            else:
                consumer.negative_acknowledge(message)

        for _ in range(messages):
            message = consumer.receive(30_000)
            self._send(source, "plain", message, functools.partial(sent, message))
        self._flush(source, "plain")

    def _loop_tuned(self, source: str, messages: int, outcomes: Counter[Any]) -> None:
        """Run no Python code in the callback, and acknowledge all messages at once at the end."""
        consumer = self.consumers[source, "tuned"]
        message = None
        for _ in range(messages):
            message = consumer.receive(30_000)
            self._send(source, "tuned", message, outcomes.setdefault)
        self._flush(source, "tuned")
        if message is not None:
            consumer.acknowledge_cumulative(message)

    def _send(self, source: str, name: str, message: Any, callback: Any) -> None:
        """Send a message with its ID to the partition for its due time."""
        properties = message.properties()
        left_ms = int(properties[DUE]) - time.time_ns() // 1_000_000
        given: dict[str, Any] = {}
        at = message.message_id()
        place = (at.ledger_id(), at.entry_id(), at.batch_index())
        if ID not in properties:
            properties[ID] = "{}:{}:{}:{}".format(source, *place)
        if self.delivery is Delivery.EFFECTIVELY_ONCE:
            given["sequence_id"] = sequence_id(*place)
        producer = self._output(source, name, properties[TARGET], left_ms // FINER_MS - 1)
        producer.send_async(
            message.data(),
            callback,
            properties=properties,
            partition_key=message.partition_key(),
            event_timestamp=message.event_timestamp(),
            **given,
        )

    def _flush(self, source: str, name: str) -> None:
        for key, producer in self.outputs.items():
            if key[:2] == (source, name):
                producer.flush()

    def _output(self, source: str, name: str, target: str, partition: int) -> Any:
        key = (source, name, target, partition)
        producer = self.outputs.get(key)
        if producer is None:
            topic = f"loop-{uuid.uuid4().hex[:6]}"
            self.client.subscribe(topic, "app").close()
            producer = self.outputs[key] = self.client.create_producer(
                topic, batching_enabled=self.delivery is Delivery.AT_LEAST_ONCE, **SETTINGS
            )
        return producer


def run_job(pipeline: Pipeline, master: str, checkpoint: str, spark: SparkSession) -> float:
    """Move the ready messages with the job; return messages per second in its batches."""
    settings = SyncSettings(
        level_topics=pipeline.level_topics,
        checkpoint=checkpoint,
        once=True,
        master=master,
        delivery=pipeline.delivery,
    )
    batches: list[tuple[int, int]] = []

    def on_progress(progress: Any) -> None:
        if progress.numInputRows:
            spent = progress.durationMs
            batches.append(
                (progress.numInputRows, spent["triggerExecution"] - spent["latestOffset"])
            )

    SparkSyncJob(pipeline.connection, settings, spark).run(on_progress)
    rows, milliseconds = (sum(column) for column in zip(*batches, strict=True))
    assert rows == pipeline.published, f"{rows} of {pipeline.published} messages"
    return rows / milliseconds * 1000


def compare(connection: Connection, delivery: Delivery, master: str, given: Any) -> list[Case]:
    """Move each portion with both loops and with the job."""
    plain: list[float] = []
    tuned: list[float] = []
    job: list[float] = []
    portion = -(-given.messages // given.rounds)
    spark = spark_session(connection, SyncSettings((), "", master=master))
    spark.sparkContext.setLogLevel("ERROR")
    try:
        with (
            connected(connection) as client,
            tempfile.TemporaryDirectory(prefix="delaylevel-bench-") as checkpoint,
        ):
            pipeline = Pipeline(client, connection, delivery, given.partitions)
            for messages in (min(given.warm_up, portion), *[portion] * given.rounds):
                pipeline.publish(messages)
                plain.append(pipeline.loop(tuned=False))
                tuned.append(pipeline.loop(tuned=True))
                job.append(run_job(pipeline, master, checkpoint, spark))
                note(
                    f"{delivery.value} {master}: plain loop {plain[-1]:,.0f}/s, "
                    f"tuned loop {tuned[-1]:,.0f}/s, job {job[-1]:,.0f}/s"
                )
    finally:
        spark.stop()
    kind = {"delivery": delivery.value, "master": master, "messages": portion * given.rounds}
    return [
        {**kind, **rate_row("plain loop", plain[1:], plain[1:])},
        {**kind, **rate_row("tuned loop", tuned[1:], plain[1:])},
        {**kind, **rate_row("job", job[1:], plain[1:])},
    ]


def run(given: Any) -> list[Case]:
    """Measure each delivery mode on its own broker, with or without deduplication."""
    rows: list[Case] = []
    for delivery in map(Delivery, given.deliveries):
        deduplicate = delivery is Delivery.EFFECTIVELY_ONCE
        with private_broker(brokerDeduplicationEnabled=deduplicate) as connection:
            for master in given.masters:
                rows += compare(connection, delivery, master, given)
    return rows


if __name__ == "__main__":
    parser = arguments(__doc__, messages=500_000, rounds=2)
    parser.add_argument(
        "--masters", nargs="+", default=["local[1]", "local[2]"], help="Spark masters"
    )
    parser.add_argument(
        "--deliveries", nargs="+", default=[item.value for item in Delivery], help="delivery modes"
    )
    parser.add_argument(
        "--warm-up",
        type=int,
        default=250_000,
        help="number of messages in the discarded round (default: 250,000)",
    )
    parser.add_argument(
        "--partitions", type=int, default=4, help="number of source partitions (default: 4)"
    )
    options = parser.parse_args()
    report(run(options), options.json)
