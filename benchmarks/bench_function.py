"""The deployed Function against a plain Python loop that moves the same messages, in turn.

Both sides read a partition of ready messages through a Shared subscription (1 KiB, one per entry,
due in an hour), and send them to a business topic with deliver_at, unbatched. The loop only
receives, calls send_async and acknowledges; the Function also checks envelopes and routes. Rates
are measured from the first tenth to 95 % of the arrivals, as the broker counts them.

Example:
    python benchmarks/bench_function.py --messages 5000 --rounds 1 --json function.json
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from functools import partial
from typing import Any

import pulsar
from common import (
    BODY,
    QUIET,
    SETTINGS,
    arguments,
    broker_with_defaults,
    connected,
    in_process,
    in_turn,
    rate_row,
    report,
    wait,
)

from delaylevel import topics
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.functions import deployment
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow, LevelTopicDescription, Mover
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName

UNBATCHED: dict[str, Any] = {"batching_enabled": False, **SETTINGS}


def loop(service_url: str, source: str, target: str, answer: Any) -> None:
    """Move messages from one topic to the other, until the process is killed."""
    client = pulsar.Client(service_url, logger=QUIET)
    consumer = client.subscribe(source, SUBSCRIPTION, consumer_type=pulsar.ConsumerType.Shared)
    producer = client.create_producer(target, **UNBATCHED)
    answer.put("ready")

    def done(message: Any, result: Any, _: Any) -> None:
        if result == pulsar.Result.Ok:
            consumer.acknowledge(message)
        else:
            consumer.negative_acknowledge(message)

    while True:
        message = consumer.receive()
        properties = message.properties()
        producer.send_async(
            message.data(),
            partial(done, message),
            properties=properties,
            partition_key=message.partition_key(),
            deliver_at=int(properties["delaylevel.due"]),
        )


class Bench:
    """One broker, with a new level topic for every run."""

    def __init__(self, connection: Connection, client: pulsar.Client, messages: int) -> None:
        self.connection, self.client, self.messages = connection, client, messages
        self.admin = Admin.from_connection(connection)

    def filled(self) -> LevelTopicDescription:
        """Return a level topic with the messages in its first partition."""
        target = f"persistent://public/default/orders-{uuid.uuid4().hex[:8]}"
        self.client.subscribe(target, "app", consumer_type=pulsar.ConsumerType.Shared).close()
        levels = Levels([PartitionStrategy(maximum_delay=timedelta(days=2))])
        wanted = LevelTopicDescription(
            f"{target}-delay-level", levels, (target,), Mover.FUNCTION, FinalWindow.BROKER
        )
        described = topics.create(self.admin, wanted)
        outcomes: dict[Any, Any] = {}
        source = described.level_topic(0).partition(0).full
        producer = self.client.create_producer(source, **UNBATCHED)
        due = str(round(time.time() * 1000) + 3_600_000)
        envelope = {"delaylevel.due": due, "delaylevel.target": target, "customer": "c-1234"}
        for _ in range(self.messages):
            producer.send_async(
                BODY, outcomes.setdefault, properties=envelope, partition_key="customer-1234"
            )
        producer.flush()
        producer.close()
        assert list(outcomes) == [pulsar.Result.Ok], outcomes.keys()
        return described

    def rate(self, described: LevelTopicDescription) -> float:
        """Wait until the target has received the messages; return messages per second."""
        target = TopicName.parse(described.targets[0])
        polls = [(time.perf_counter(), 0)]

        def arrived(share: float) -> bool:
            count = self.admin.partition_stats(target).messages_in
            polls.append((time.perf_counter(), count))
            return count >= self.messages * share

        wait(lambda: arrived(0.1), 300, every_s=0.02)
        (low_s, low) = polls[-1] if polls[-1][1] < self.messages * 0.5 else polls[-2]
        wait(lambda: arrived(0.95), 300, every_s=0.02)
        return (polls[-1][1] - low) / (polls[-1][0] - low_s)

    def plain(self) -> float:
        """Run the plain loop in its own process; return messages per second."""
        described = self.filled()
        source = described.level_topic(0).partition(0).full
        process, _ = in_process(loop, self.connection.service_url, source, described.targets[0])
        try:
            return self.rate(described)
        finally:
            process.kill()
            process.join()

    def ours(self) -> float:
        """Run the deployed Function; return messages per second."""
        described = self.filled()
        made = deployment.deploy(self.connection, described, deployment.FunctionOptions())
        try:
            return self.rate(described)
        finally:
            deployment.delete(self.connection, described, made.function)


def main() -> None:
    """Run both sides in turn, and print them."""
    options = arguments(__doc__, 20_000, 3).parse_args()
    broker = broker_with_defaults(functions=True)
    with broker as (connection, _, _), connected(connection) as client:
        bench = Bench(connection, client, options.messages)
        rates = in_turn({"plain loop": bench.plain, "delaylevel": bench.ours}, options.rounds)
    rows = [rate_row(name, found, rates["plain loop"]) for name, found in rates.items()]
    report(rows, options.json)


if __name__ == "__main__":
    main()
