"""Messages in every state, for pictures and tests of the commands that show them."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import pulsar

from delaylevel import DelayLevelClient, PartitionStrategy
from delaylevel.cluster import logs
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels
from delaylevel.topics import registry as topics

LONG_NAME = "payments-of-a-team-whose-name-is-rather-long-in-europe-west"
LEVELS = Levels(
    [
        PartitionStrategy(partition_by=timedelta(days=1), maximum_delay=timedelta(days=5)),
        PartitionStrategy(
            partition_by=timedelta(hours=1),
            maximum_delay=timedelta(hours=24),
            lead=timedelta(minutes=5),
        ),
    ]
)


def fill(connection: Connection, messages: int = 400) -> None:
    """Create level topics with messages that wait, are overdue, held, dead, or cancelled."""
    full = [f"persistent://public/default/{name}" for name in ("orders", "invoices", LONG_NAME)]
    with (
        Admin.from_connection(connection) as admin,
        contextlib.closing(_client(connection)) as client,
        DelayLevelClient.from_connection(connection, logger=logs.silent()) as ours,
    ):
        for name in full:
            client.subscribe(name, "app").close()
        wanted = LevelTopicDescription(
            topic=topics.default_name(admin, full[0]),
            levels=LEVELS,
            targets=tuple(full[:2]),
        )
        topics.create(admin, wanted)
        topics.create(
            admin,
            LevelTopicDescription(
                topic=topics.default_name(admin, full[2]), levels=LEVELS, targets=(full[2],)
            ),
        )
        for name, share in ((full[0], 1.0), (full[2], 0.1)):
            producer = ours.create_producer(name, enable_delay_level_topic=True)
            for number in range(int(messages * share)):
                producer.send(
                    b'{"amount": %d}' % number,
                    # Most are due soon, and a few in days.
                    deliver_after=timedelta(minutes=5 + number**2 % 6900),
                    partition_key=f"customer-{number % 7}",
                    properties={"kind": "reminder", "amount": str(number)},
                )
        producer = ours.create_producer(full[0], enable_delay_level_topic=True)
        for _ in range(5):
            producer.send(b"overdue soon", deliver_after=timedelta(seconds=1))
        producer.cancel(producer.schedule(b"renew", deliver_after=timedelta(days=2)))
        _put(client, "_orders-delay-level-held", 3, {"delaylevel.reason": "the target refused"})
        reasons = ("delaylevel.due is missing", "not a parked message: " + "it has no target " * 6)
        for reason in reasons:
            _put(client, "_orders-delay-level-DLQ", 1, {"delaylevel.reason": reason})


def _client(connection: Connection) -> pulsar.Client:
    return connection.open_client(logger=logs.silent())


def _put(client: pulsar.Client, topic: str, messages: int, properties: dict[str, str]) -> None:
    """Store messages as a mover or dispatcher stores what it sets aside."""
    now_ms = SystemClock().now_ms()
    producer = client.create_producer(topic, batching_enabled=False)
    for number in range(messages):
        due = {"delaylevel.due": str(now_ms - 60_000 * number)}
        target = {"delaylevel.target": "persistent://public/default/orders"}
        producer.send(b"pay me", {**due, **target, **properties}, partition_key="customer-7")
    producer.close()
