"""The Function against simpler ways to move the same messages, in turn, one instance each.

Every side reads the same kind of partition through a Shared subscription (messages of 1 KiB, one
per entry, ready, due in an hour) and sends them to a business topic with deliver_at, unbatched:
``sync Function`` sends and acknowledges one message after the other; ``simple Function`` uses
send_async and acknowledges in the callback, and receives messages from the worker; ``plain loop``
is a Python program that only receives, calls send_async and acknowledges; ``delaylevel`` is the
deployed Function, which also reads and checks envelopes and routes. Rates are measured from the
first tenth to 95 % of the arrivals, as the broker counts them.

Examples:
    python benchmarks/bench_function.py
    python benchmarks/bench_function.py --messages 5000 --rounds 1 --json function.json
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pulsar
from common import BODY, arguments, connected, in_turn, note, rate_row, report

from delaylevel import topics
from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.cluster.rest.http import Rest
from delaylevel.functions import deployment
from delaylevel.functions.worker import FunctionsWorker
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow, LevelTopicDescription, Mover
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName

SIMPLE = """
from functools import partial
from pulsar import Function, Result

SETTINGS = dict(batching_enabled=False, block_if_queue_full=True, max_pending_messages=5000)

class Base(Function):
    producer = None
    def setup(self, context):
        target = context.get_user_config_value("target")
        self.producer = context.pulsar_client.create_producer(target, **SETTINGS)
        self.consumer = list(context.consumers.values())[0]

    def arguments(self, message):
        properties = message.properties()
        return dict(properties=properties, partition_key=message.partition_key(),
                    deliver_at=int(properties["delaylevel.due"]))

class Sync(Base):
    def process(self, input, context):
        if self.producer is None:
            self.setup(context)
        message = context.message
        self.producer.send(message.data(), **self.arguments(message))
        self.consumer.acknowledge(message)

class Simple(Base):
    def done(self, message, result, message_id):
        if result == Result.Ok:
            self.consumer.acknowledge(message)
        else:
            self.consumer.negative_acknowledge(message)

    def process(self, input, context):
        if self.producer is None:
            self.setup(context)
        message = context.message
        self.producer.send_async(message.data(), partial(self.done, message),
                                 **self.arguments(message))
"""

PLAIN = """
import sys
from functools import partial
import pulsar
url, source, target, subscription = sys.argv[1:]
client = pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
consumer = client.subscribe(source, subscription, consumer_type=pulsar.ConsumerType.Shared)
producer = client.create_producer(target, batching_enabled=False, block_if_queue_full=True,
                                  max_pending_messages=5000)
def done(message, result, message_id):
    if result == pulsar.Result.Ok:
        consumer.acknowledge(message)
    else:
        consumer.negative_acknowledge(message)
while True:
    message = consumer.receive()
    properties = message.properties()
    producer.send_async(message.data(), partial(done, message), properties=properties,
                        partition_key=message.partition_key(),
                        deliver_at=int(properties["delaylevel.due"]))
"""


class Bench:
    """One broker, with a new level topic for every run."""

    def __init__(self, connection: Connection, client: pulsar.Client, messages: int) -> None:
        self.connection = connection
        self.client = client
        self.messages = messages
        self.admin = Admin.from_connection(connection)
        self.rest = Rest(connection.admin_url)

    def filled(self) -> LevelTopicDescription:
        """Return a level topic with the messages in its first partition."""
        target = f"persistent://public/default/orders-{uuid.uuid4().hex[:8]}"
        self.client.subscribe(target, "app", consumer_type=pulsar.ConsumerType.Shared).close()
        levels = Levels([PartitionStrategy(maximum_delay=timedelta(days=2))])
        described = topics.create(
            self.admin,
            LevelTopicDescription(
                f"{target}-delay-level",
                levels,
                (target,),
                Mover.FUNCTION,
                FinalWindow.BROKER,
            ),
        )
        outcomes: dict[Any, Any] = {}
        producer = self.client.create_producer(
            described.level_topic(0).partition(0).full,
            batching_enabled=False,
            block_if_queue_full=True,
            max_pending_messages=5000,
        )
        due = str(round(time.time() * 1000) + 3_600_000)
        for _ in range(self.messages):
            producer.send_async(
                BODY,
                outcomes.setdefault,
                properties={
                    "delaylevel.due": due,
                    "delaylevel.target": target,
                    "customer": "c-1234",
                },
                partition_key="customer-1234",
            )
        producer.flush()
        producer.close()
        assert list(outcomes) == [pulsar.Result.Ok], outcomes.keys()
        return described

    def rate(self, described: LevelTopicDescription) -> float:
        """Wait until the target has received the messages; return messages per second."""
        path = f"{TopicName.parse(described.targets[0]).rest_path}/stats"
        low: tuple[float, int] | None = None
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            count = int(self.rest.get(path)["msgInCounter"])
            now = time.perf_counter()
            if low is None and count >= self.messages * 0.1:
                low = now, count
            if low is not None and count >= self.messages * 0.95:
                return (count - low[1]) / (now - low[0])
            time.sleep(0.02)
        raise TimeoutError(f"{count:,} of {self.messages:,} messages arrived in 300 s")

    def plain(self) -> float:
        """Run the plain loop in its own process; return messages per second."""
        described = self.filled()
        source = described.level_topic(0).partition(0).full
        program = [sys.executable, "-c", PLAIN, self.connection.service_url, source]
        process = subprocess.Popen([*program, described.targets[0], SUBSCRIPTION])
        try:
            return self.rate(described)
        finally:
            process.kill()
            process.wait()

    def simple(self, kind: str) -> float:
        """Run one of the benchmark's own Functions; return messages per second."""
        described = self.filled()
        name = f"bench-{uuid.uuid4().hex[:8]}"
        config = {
            "tenant": "public",
            "namespace": "default",
            "name": name,
            "className": f"simple.{kind}",
            "runtime": "PYTHON",
            "py": "simple.zip",
            "inputSpecs": {described.level_topic(0).partition(0).full: {"receiverQueueSize": 1000}},
            "subName": SUBSCRIPTION,
            "subscriptionPosition": "Earliest",
            "processingGuarantees": "MANUAL",
            "autoAck": False,
            "cleanupSubscription": False,
            "parallelism": 1,
            "userConfig": {"target": described.targets[0]},
        }
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("simple/src/simple.py", SIMPLE)
        with FunctionsWorker(self.connection) as worker:
            worker.create(config, buffer.getvalue())
            try:
                return self.rate(described)
            finally:
                worker.delete(f"public/default/{name}")

    def ours(self) -> float:
        """Run the deployed Function; return messages per second."""
        described = self.filled()
        made = deployment.deploy(self.connection, described, deployment.FunctionOptions())
        try:
            return self.rate(described)
        finally:
            deployment.delete(self.connection, described, made.function)


@contextlib.contextmanager
def functions_broker() -> Iterator[Connection]:
    """Yield a broker with a functions worker, and remove it at the end."""
    with (
        tempfile.TemporaryDirectory(prefix="delaylevel-bench-") as directory,
        EmbeddedBroker(
            "bench",
            directory=Path(directory) / "broker",
            functions=True,
            conf={},
            heap_mb=600,
            follow_parent=True,
            report=note,
        ) as broker,
    ):
        yield broker.connection


def main() -> None:
    """Run all sides in turn, and print them in comparison with each of the two baselines."""
    options = arguments(__doc__, 20_000, 3).parse_args()
    with functions_broker() as connection, connected(connection) as client:
        bench = Bench(connection, client, options.messages)
        sides: dict[str, Callable[[], float]] = {
            "sync Function": lambda: bench.simple("Sync"),
            "simple Function": lambda: bench.simple("Simple"),
            "plain loop": bench.plain,
            "delaylevel": bench.ours,
        }
        rates = in_turn(sides, options.rounds)
    rows = []
    for baseline in ("sync Function", "plain loop"):
        for name, found in rates.items():
            rows.append({"baseline": baseline, **rate_row(name, found, rates[baseline])})
    report(rows, options.json)
    note(json.dumps({name: [round(rate) for rate in found] for name, found in rates.items()}))


if __name__ == "__main__":
    main()
