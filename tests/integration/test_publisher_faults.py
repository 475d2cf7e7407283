"""Tests of faults during a send: only stored messages are reported as stored."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.own_producers import OwnProducers
from delaylevel.cluster.publisher import BULK_SETTINGS, open_producer
from delaylevel.cluster.rest.admin import Admin
from delaylevel.cluster.targets import send_state
from delaylevel.cluster.targets.pool import TargetKey, TargetPool
from delaylevel.cluster.targets.send_state import SendOutcome, Sent, Settled
from delaylevel.cluster.threads import HostLoop
from delaylevel.model.message import ParkedMessage
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.producer.setup import producer_settings
from support.proxy import Proxy
from support.world import RealWorld, eventually, quiet_client, stored_messages

MESSAGES = 3000


def messages(first: int, count: int) -> list[ParkedMessage]:
    return [
        ParkedMessage(1, number, -1, 0, "", "", 0, {"n": str(number)}, b"x" * 100)
        for number in range(first, first + count)
    ]


def stored(client: Any, admin: Admin, topic: TopicName) -> set[str]:
    return {message.properties["n"] for message in stored_messages(client, admin, topic.full)}


def kept_topic(client: Any, name: str) -> TopicName:
    client.subscribe(name, "keep").close()
    return TopicName.parse(name)


@pytest.fixture
def pool(client: pulsar.Client, admin: Admin) -> Iterator[TargetPool[int]]:
    """Producers of business topics, with one client for all."""
    made: TargetPool[int] = TargetPool(
        lambda target: client, admin, pause_s=lambda _: 1.0, loop=HostLoop()
    )
    with closing(made):
        yield made


def test_messages_to_our_topics_share_the_outcome_of_their_entry(
    client: pulsar.Client, admin: Admin, namespace: str
) -> None:
    topic = kept_topic(client, f"persistent://{namespace}/out")
    sizes = [10, 600_000, 300_000, 300_000, 0, 524_288, 1, 524_287] * 3
    large = [
        message._replace(value=b"x" * size)
        for message, size in zip(messages(2 * MESSAGES, len(sizes)), sizes, strict=True)
    ]
    outcomes: dict[str, SendOutcome] = {}
    with closing(OwnProducers(client, "", HostLoop())) as own:

        def settled() -> bool:
            own.flush()
            for sent, outcome, _ in own.poll():
                outcomes[sent.item.properties["n"]] = outcome
            return not own.load[0]

        for part in (messages(0, MESSAGES), messages(MESSAGES, MESSAGES), large):
            for message in part:
                assert not own.send(message, topic.full, message, message.properties)
            eventually(settled, "all messages have an outcome")
    everything = {str(number) for number in range(2 * MESSAGES + len(sizes))}
    assert outcomes == dict.fromkeys(everything, SendOutcome.STORED)
    assert stored(client, admin, topic) == everything
    assert not send_state._mistakes


def test_messages_to_a_target_share_the_outcome_of_their_entry(
    client: pulsar.Client, admin: Admin, namespace: str, pool: TargetPool[int]
) -> None:
    """Keys, sizes and flushes decide which messages share an entry; the prediction holds."""
    topic = kept_topic(client, f"persistent://{namespace}/target")
    chosen = random.Random(7)
    sizes = [10] * 300 + [2_000] * 20 + [200_000] * 3 + [600_000, 6 << 20]
    payloads = [
        ParkedMessage(
            1, n, -1, 0, chosen.choice(["", "a", "b", f"key-{n}"]),
            chosen.choice(["", "", "", "ordering"]), 0, {"n": str(n)}, b"x" * chosen.choice(sizes),
        )
        for n in range(MESSAGES)
    ]  # fmt: skip
    producer = pool.producer(TargetKey(topic.full))
    settled: list[Settled] = []
    at = others = 0

    def poll() -> bool:
        """Return True if all have an outcome, also those that are sent again, alone."""
        settled.extend(pool.poll())
        return len(settled) == at + others

    while at < MESSAGES:
        count = min(chosen.choice([1, 2, 50, 700]), MESSAGES - at)
        producer.send_all(range(at, at + count), payloads[at : at + count], 0)
        at += count
        if chosen.random() < 0.2:
            later = payloads[0]._replace(value=b"later")
            producer.put(Sent(-at, later, {"n": "later"}, 1, 0, 5, 0.0))
            others += 1
        if chosen.random() < 0.7:
            producer.flush()
        if chosen.random() < 0.1:
            if producer.state.is_open:
                eventually(poll, "the first messages are confirmed", 30)
            else:
                poll()
    producer.flush()
    eventually(poll, "all messages have an outcome", 30)
    refused = {each.item.item for each in settled if each.outcome is not SendOutcome.STORED}
    assert refused == {n for n, each in enumerate(payloads) if len(each.value or b"") > 5 << 20}
    outcomes = {id(each.item.outcome) for each in settled}
    assert len(outcomes) < MESSAGES
    assert not send_state._mistakes
    expected = {str(n) for n in range(MESSAGES) if n not in refused}
    assert stored(client, admin, topic) - {"later"} == expected


def test_a_message_to_a_partitioned_target_does_not_wait_for_the_next_one(
    admin: Admin, namespace: str, pool: TargetPool[int]
) -> None:
    """While a flush is not confirmed by all partitions, the client begins no other one."""
    topic = TopicName.parse(f"persistent://{namespace}/partitioned")
    admin.create_partitioned(topic, 3)
    admin.create_subscription(topic, "keep")
    producer = pool.producer(TargetKey(topic.full))
    producer.open()

    def poll() -> bool:
        pool.poll()
        return producer.state.is_open and not producer.messages

    eventually(poll, "the target is open", 30)
    for number in range(20):
        for index in range(5):
            message = ParkedMessage(1, number, -1, 0, f"key-{index}", "", 0, {}, b"x")
            producer.put(Sent(index, message, {}, None, 0, 1, 0.0))
            producer.flush()
        eventually(poll, "all messages have an outcome", 10)


@pytest.mark.parametrize("host", ["mover", "producer"])
def test_nothing_is_dropped_after_a_connection_lost_before_the_first_confirmation(
    host: str, world: RealWorld, proxied: Connection, proxy: Proxy
) -> None:
    """A broker that deduplicates drops sequence IDs that it has seen, and confirms them."""
    world.deduplicate()
    description = world.level_topic(Levels(PartitionStrategy(maximum_delay=timedelta(days=2))))
    topic = description.level_topic(0).partition(0)
    with contextlib.closing(quiet_client(proxied)) as client:
        if host == "mover":
            producer = open_producer(client, topic.full, BULK_SETTINGS)
        else:
            settings, _ = producer_settings({}, description)
            producer = client.create_producer(topic.full, **settings)
        proxy.cut()
        eventually(lambda: not producer.is_connected(), "the end of the connection")
        sent = [b"%d" % number for number in range(6)]
        outcomes: list[Any] = []
        for body in sent[:3]:
            producer.send_async(body, lambda result, _: outcomes.append(result))
        proxy.restore()
        producer.flush()
        for body in sent[3:]:
            producer.send_async(body, lambda result, _: outcomes.append(result))
        producer.flush()
        assert outcomes == [pulsar.Result.Ok] * 6
    assert [message.value for message in world.stored(topic.full)] == sent
