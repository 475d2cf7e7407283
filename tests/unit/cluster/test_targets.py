"""Tests of the pool of targets on a client that answers when it is told to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pulsar
import pytest

from delaylevel.cluster.publisher import BULK_SETTINGS, KEY_BATCHED_SETTINGS, PRODUCER_SETTINGS
from delaylevel.cluster.targets.pool import TargetKey, TargetPool
from delaylevel.cluster.values import PartitionStats, SubscriptionStats, TopicMetadata
from delaylevel.errors import NotFoundError
from delaylevel.model.message import ParkedMessage
from delaylevel.model.topic_name import TopicName

ORDERS = TargetKey("persistent://public/default/orders")


@dataclass(eq=False)
class Producer:
    client: Client
    topic: str
    settings: dict[str, Any]
    sent: list[tuple[bytes, Callable[[Any, Any], Any]]] = field(default_factory=list)

    def send_async(self, value: bytes, callback: Callable[[Any, Any], Any], **_: Any) -> None:
        self.sent.append((value, callback))

    def flush(self) -> None: ...

    def is_connected(self) -> bool:
        return True

    def last_sequence_id(self) -> int:
        return -1

    def close(self) -> None:
        self.client.connected.remove(self)


@dataclass
class Client:
    """A client, and an admin interface for topics that all exist.

    Attributes:
        connected: the producers that are not closed.
        refusal: the error of each opening; None for a success.
    """

    connected: list[Producer] = field(default_factory=list)
    refusal: Exception | None = None
    openings: int = 0
    partitions: int = 0

    def create_producer(self, topic: str, **settings: Any) -> Producer:
        self.openings += 1
        if self.refusal is not None:
            raise self.refusal
        producer = Producer(self, topic, settings)
        self.connected.append(producer)
        return producer

    def topic_exists(self, name: TopicName) -> bool:
        return True

    def partitioned_metadata(self, name: TopicName) -> TopicMetadata:
        return TopicMetadata(self.partitions)

    def partition_stats(self, name: TopicName) -> PartitionStats:
        app = {"app": SubscriptionStats(0, None, "Shared", True, ())}
        return PartitionStats(0, app, (), deduplication=True)

    def partitioned_stats(self, name: TopicName) -> dict[int, PartitionStats]:
        if not self.partitions:
            raise NotFoundError("not partitioned", status=404)
        return {index: self.partition_stats(name) for index in range(self.partitions)}

    def max_message_size(self, name: TopicName) -> int | None:
        return None


class World:
    """A pool of targets, its slow work and its time."""

    def __init__(self, name: str = "") -> None:
        self.client = Client()
        self.jobs: list[Callable[[], None]] = []
        self.time_s = 0.0
        self.pool: TargetPool[int] = TargetPool(
            lambda _: self.client,
            self.client,  # type: ignore[arg-type]
            name=name,
            pause_s=lambda: 10.0,
            start=self.jobs.append,
            now_s=lambda: self.time_s,
        )

    def work(self) -> None:
        while self.jobs:
            self.jobs.pop(0)()

    def outcomes(self) -> list[tuple[int, str]]:
        return [(settled.item.item, settled.outcome.value) for _, settled in self.pool.poll()]


def message(value: bytes = b"value", **properties: str) -> ParkedMessage:
    return ParkedMessage(1, 1, -1, 0, "", "", 0, properties, value)


def test_a_producer_that_opens_during_the_close_is_closed() -> None:
    world = World()
    world.pool.producer(ORDERS).open()
    world.work()  # it is open, and the pool has not heard of it
    assert world.client.connected
    world.pool.close()
    world.work()
    assert not world.client.connected


def test_a_target_is_tried_again_after_each_pause() -> None:
    world = World()
    world.client.refusal = pulsar.ServiceUnitNotReady("moving")
    world.pool.producer(ORDERS).send(1, message(), {})
    while world.pool.refusal(ORDERS.topic, "") is None:
        world.work()
        world.outcomes()
        world.time_s += 0.5
    world.work()
    world.outcomes()
    world.client.refusal = None
    openings = world.client.openings
    world.time_s += 10.5  # the pause is over
    world.outcomes()
    assert world.pool.refusal(ORDERS.topic, "") is None
    world.pool.producer(ORDERS).send(2, message(), {})
    for _ in range(3):
        world.outcomes()
        world.work()
    assert world.client.openings > openings
    assert world.client.connected[0].sent


def test_no_topic_is_created_for_a_partition_that_is_gone() -> None:
    world = World("name")
    key = ORDERS._replace(partition=3)
    world.pool.producer(key).send(1, message(), {}, number=1)
    world.outcomes()
    world.work()
    assert world.outcomes() == [(1, "refused")]
    assert not world.client.openings


def test_a_stalled_partition_is_refused_once_while_another_confirms() -> None:
    world = World("name")
    world.client.partitions = 2
    keys = [ORDERS._replace(partition=index) for index in range(2)]
    for number, key in enumerate(keys, 1):
        world.pool.producer(key).send(number, message(), {}, number=number)
    for _ in range(3):
        world.outcomes()
        world.work()
    stalled, healthy = world.client.connected
    stalled.is_connected = lambda: False  # type: ignore[method-assign]
    refusals: list[str | None] = []
    for number in range(3, 30):
        world.time_s += 0.5
        world.pool.producer(keys[1]).send(number, message(), {}, number=number)
        for _, callback in healthy.sent:
            callback(pulsar.Result.Ok, None)
        healthy.sent.clear()
        world.outcomes()
        refusals.append(world.pool.refusal(ORDERS.topic, ""))
    first = next(index for index, reason in enumerate(refusals) if reason)
    assert all(refusals[first:])


def test_confirmations_are_verified_before_another_producer_is_opened() -> None:
    world = World()
    producer = world.pool.producer(ORDERS)
    producer.send(1, message(), {})
    producer.open()
    world.work()
    world.outcomes()
    (first,) = world.client.connected
    _, callback = first.sent[0]
    callback(pulsar.Result.Ok, pulsar.MessageId(-1, 7, 1, -1)._msg_id)
    assert not world.outcomes()  # the ledger is new, so the topic is looked at
    world.jobs.clear()  # and the admin interface does not answer yet
    producer.give_up()
    producer.open()
    world.outcomes()
    world.work()
    world.outcomes()
    assert world.client.openings == 1


def test_a_producer_with_unanswered_messages_is_not_forgotten() -> None:
    world = World()
    producer = world.pool.producer(ORDERS)
    producer.send(1, message(), {})
    producer.send(2, message(), {})
    producer.open()
    world.work()
    world.outcomes()
    (first,) = world.client.connected
    first.sent[0][1](pulsar.Result.UnknownError, None)
    assert world.outcomes() == [(1, "unknown")]  # the answer to the other one is on its way
    producer.open()
    producer.send(3, message(), {})
    for _ in range(3):
        world.outcomes()
        world.work()
    first.sent[1][1](pulsar.Result.UnknownError, None)
    producer.send(4, message(), {})
    for _ in range(3):
        world.outcomes()
        world.work()
    assert first not in world.client.connected


@pytest.mark.parametrize("settings", [PRODUCER_SETTINGS, BULK_SETTINGS, KEY_BATCHED_SETTINGS])
def test_no_clock_ends_a_batch(settings: dict[str, Any]) -> None:
    # With 1 ms, a loop of send_async and flush_async hangs after seconds: see PRODUCER_SETTINGS.
    assert settings["batching_max_publish_delay_ms"] >= 3_600_000
