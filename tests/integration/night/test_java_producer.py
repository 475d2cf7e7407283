"""Tests of the Java producer (clients/java) on a real broker.

Java parks, the local mover and the dispatcher deliver, and a Java consumer compares with messages
that the plain Java client has sent.
"""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pulsar
import pytest

from delaylevel import topics
from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cluster.connection.settings import Connection
from delaylevel.model.envelope import DUE, EXPIRES, ID, REPLACES, TARGET
from delaylevel.model.level_topic import LevelTopicDescription, default_level_topic
from delaylevel.model.outcome import OUTCOME, PAYLOAD, Receipt, cancellation
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.topics.lifecycle import expand
from support.java_client import JavaSession, b64
from support.processes import BRIEF
from support.world import RealWorld

pytestmark = pytest.mark.broker

DAYS = Levels(PartitionStrategy(maximum_delay=timedelta(days=3)))


@pytest.fixture(scope="session")
def session(java_classes: Path, connection: Connection) -> Iterator[JavaSession]:
    """``session("send", …)``: give a command to a Java program."""
    with contextlib.closing(JavaSession(java_classes, connection)) as made:
        yield made


def level_topic(
    world: RealWorld, levels: Levels, *names: str, **values: Any
) -> LevelTopicDescription:
    """Create a level topic of the default name, without its targets."""
    targets = tuple(world.topic(name) for name in names)
    values = {"topic": default_level_topic(targets[0]), "window_partitions": 1, **values}
    return topics.create(
        world.admin, LevelTopicDescription(levels=levels, targets=targets, **values)
    )


#: Messages by the schema of their topic. Every one is sent with and without a delay.
MESSAGES: dict[str, list[dict[str, Any]]] = {
    "bytes": [
        {"value": b64(b"plain")},
        {"value": b64(b"")},
        {"value": None},
        {"value": b64(bytes(range(256))), "key": "customer-7", "eventTime": 1_700_000_000_123},
        {"value": b64(b"k"), "key": "Käse 日本 \U0001f600"},
        {"value": b64(b"k"), "key": "x" * 5000},
        {"value": b64(b"k"), "keyBytes": b64("bytes, but UTF-8: ü".encode())},
        {"value": b64(b"k"), "keyBytes": b64(b"\x00\x01")},
        {"value": b64(b"o"), "key": "a", "orderingKey": b64("Ordnung ü".encode())},
        {"value": b64(b"p"), "properties": {"color": "red", "größe": "ü\n", "empty": ""}},
    ],
    "string": [{"value": "text ü"}, {"value": ""}],
    "int64": [{"value": "-5"}],
    "date": [{"value": "2026-02-28", "key": "d"}],
    "avro": [{"value": "first", "key": "k"}, {"value": "größe"}],
    "json": [{"value": "first", "key": "k"}, {"value": "größe"}],
    "inline": [{"value": "first", "pairKey": "customer-7"}, {"value": "second", "pairKey": ""}],
    "separated": [{"value": "first", "pairKey": "customer-7"}, {"value": "2", "pairKey": "ü 日"}],
    "numbered": [{"value": "first", "pairKey": 7}],
}
#: The schemas that travel as bytes, or that the Python client does not declare: the delivered
#: message has no version.
WITHOUT_VERSION = {"bytes", "int64", "date", "inline", "separated", "numbered"}


def test_every_message_of_java_arrives_as_the_plain_client_sends_it(
    session: JavaSession, world: RealWorld
) -> None:
    description = level_topic(world, BRIEF, *MESSAGES)
    for schema, messages in MESSAGES.items():
        topic, plain = world.topic(schema), world.topic(f"plain-{schema}")
        for name in (topic, plain):
            session("subscribe", name=name, topic=name, schema=schema)
        opened = session.open(
            schema, topic, schema, plain=plain, levelTopic=description.topic, compression="ZLIB"
        )
        assert opened == {"levelTopic": description.topic}
        for after_ms in (2500, 300):  # a level, and the window
            for number, message in enumerate(messages):
                properties = {**message.get("properties", {}), "n": f"{after_ms} {number}"}
                full = {"name": schema, "schema": schema, **message, "properties": properties}
                assert set(session("send", **full, afterMs=after_ms)) == {"stored"}
                assert session("send-plain", **full) == {}
    with world.moving(description), world.serving(description):
        for schema, messages in MESSAGES.items():
            found, versions = {}, {}
            for name in (schema, f"plain-{schema}"):
                topic = world.topic(name)
                received = [session("receive", name=topic) for _ in range(2 * len(messages))]
                assert {} not in received, "not delivered"
                assert {each.pop("ours") for each in received} == {name == schema}
                versions[name] = {each.pop("schemaVersion") for each in received}
                found[name] = sorted(received, key=lambda each: each["properties"]["n"])
            assert found[schema] == found[f"plain-{schema}"]
            expected = {None} if schema in WITHOUT_VERSION else versions[f"plain-{schema}"]
            assert versions[schema] == expected, schema
    assert world.stored(description.dead_letter_topic.full) == []
    assert world.stored(description.held_topic.full) == []


def refused(answer: dict[str, Any], reason: str, *words: str) -> None:
    """Assert that an answer is this refusal, with these words."""
    assert answer.get("refused") == reason, answer
    for word in words:
        assert word in answer["message"], answer


def test_an_expansion_is_followed_and_a_deletion_is_noticed(
    session: JavaSession, world: RealWorld
) -> None:
    description = level_topic(world, DAYS, "orders")
    session.open("long", world.topic("orders"))

    def send(days: int) -> dict[str, Any]:
        after_ms = days * 86_400_000 + 3_600_000
        return session("send", name="long", schema="bytes", value=b64(b"x"), afterMs=after_ms)

    other = session.open("other", world.topic("other"))
    refused(other, "LEVEL_TOPIC", "does not exist", "delaylevel levels create")
    assert not world.admin.topic_exists(world.name("_other-delay-level"))
    refused(send(5), "DELAY_TOO_LONG")
    expand(world.admin, description.topic, timedelta(days=10))
    # The description is read at most once a second.
    world.eventually(lambda: "stored" in send(5), "the expanded level topic")
    assert len(world.stored(description.name.partition(4).full)) == 1
    world.rest.delete(f"{description.name.rest_path}/partitions", force="true")
    refused(send(2), "LEVEL_TOPIC", "was deleted", "not sent")
    assert not world.admin.topic_exists(description.name)


def test_java_schedules_and_cancels_and_its_receipts_are_those_of_python(
    session: JavaSession, world: RealWorld
) -> None:
    description = level_topic(world, DAYS, "orders", window_partitions=4)
    orders, level = world.topic("orders"), description.name.partition(0).full
    session.open("cancels", orders, compression="ZSTD")

    def schedule(after_ms: int, **values: Any) -> Receipt:
        answer = session(
            "schedule", name="cancels", schema="bytes", value=b64(b"x"), afterMs=after_ms, **values
        )
        receipt = Receipt.parse(answer["receipt"])
        assert (receipt.target, receipt.level_topic) == (orders, description.topic)
        return receipt

    def cancel(**values: Any) -> dict[str, Any]:
        return session("cancel", name="cancels", **values)

    far, near = 36 * 3_600_000, 3_600_000
    keyed = schedule(far, key="Käse 日本", id="order-7")
    parked, own = schedule(far), schedule(near, id="order-8")
    everything = [*world.stored(level), *world.stored(description.window_topic.full)]
    for receipt in (keyed, parked, own):
        (message,) = (each for each in everything if each.properties[ID] == receipt.id)
        assert receipt.place is not None
        topic, position = receipt.place
        assert (message.position.entry_start, message.key) == (position, receipt.key)
        assert int(message.properties[DUE]) == receipt.due_ms
        assert topic.startswith((level, description.window_topic.full))
        by_id, by_receipt = {"id": own.id, "at": own.due_ms}, {"receipt": str(receipt)}
        answer = cancel(**(by_id if receipt is own else by_receipt))
        assert answer == {"status": "ACCEPTED", "reason": ""}
        *_, record = (each for each in world.stored(topic) if each.properties[ID] == receipt.id)
        assert (record.value, record.key) == (PAYLOAD, receipt.key)
        expected = cancellation(receipt.due_ms, orders, receipt.id)
        assert record.properties == expected.parked_properties({})
    # A message that is due at once is not parked, so nothing can take it back.
    direct = schedule(0, key="k")
    assert direct.sent_directly
    assert cancel(receipt=str(direct))["status"] == "TOO_LATE"


def test_java_reschedules_and_its_messages_expire(session: JavaSession, world: RealWorld) -> None:
    description = level_topic(world, BRIEF, "orders")
    orders = world.topic("orders")
    session("subscribe", name=orders, topic=orders, schema="bytes")
    session.open("moves", orders)

    def call(command: str, value: bytes, after_ms: int, **values: Any) -> dict[str, Any]:
        given = {"name": "moves", "schema": "bytes", "value": b64(value), "afterMs": after_ms}
        return session(command, **given, **values)

    first = call("schedule", b"first", 3000)["receipt"]
    moved = call("reschedule", b"second", 1500, receipt=first, expiresAfterMs=60_000)
    assert moved["status"] == "ACCEPTED"
    old, new = Receipt.parse(first), Receipt.parse(moved["receipt"])
    assert new.place is not None
    (stored,) = world.stored(new.place[0])
    assert stored.properties[REPLACES] == old.id != new.id
    assert stored.properties[EXPIRES] == str(new.due_ms + 60_000)
    same = call("reschedule", b"x", 1500, receipt=first, id=old.id)
    refused(same, "INVALID_INPUT", "would be a copy")
    assert "stored" in call("send", b"expires", 300, expiresAfterMs=1)
    time.sleep(1)  # nothing is there to deliver it on time
    with world.moving(description), world.serving(description):
        received = session("receive", name=orders)
        assert base64.b64decode(received["data"]) == b"second"
        outcomes = description.outcomes_topic.full
        world.eventually(lambda: world.stored(outcomes), "the outcome")
    (outcome,) = world.stored(outcomes)
    assert (outcome.properties[ID], outcome.properties[OUTCOME]) == (old.id, "cancelled")
    assert world.stored(orders)[1:] == []


@pytest.mark.parametrize("block", [True, False])
def test_a_full_queue_blocks_or_fails_as_the_application_asks(
    session: JavaSession, world: RealWorld, block: bool
) -> None:
    description = level_topic(world, DAYS, "orders")
    session.open("small", world.topic("orders"), pending=10, block=block)
    day_ms = 86_400_000
    outcomes = session("many", name="small", count=1000, afterMs=day_ms * 3 // 2)
    assert sum(outcomes.values()) == 1000
    assert outcomes["stored"] >= 10
    if block:
        assert outcomes == {"stored": 1000}
    else:
        assert set(outcomes) == {"stored", "ProducerQueueIsFullError"}
    numbers = [int(each.value or b"") for each in world.stored(description.topic)]
    assert len(numbers) == outcomes["stored"]
    assert numbers == sorted(numbers)  # also those that waited for the producer


def test_messages_behind_an_open_transaction_wait_until_it_ends(
    java_classes: Path, private_broker: Callable[..., EmbeddedBroker]
) -> None:
    """The broker does not deliver them, so a mover must not acknowledge them either."""
    broker = private_broker({"transactionCoordinatorEnabled": True})
    connection = broker.connection.model_copy(update={"operation_timeout_seconds": 60})
    with contextlib.ExitStack() as stack:
        world = RealWorld(connection, stack, "public/default")
        description = world.level_topic(BRIEF)
        (target,) = description.targets
        consumer = world.plain_client.subscribe(target, "application")
        java_session = stack.enter_context(
            contextlib.closing(JavaSession(java_classes, connection, "transactions"))
        )
        partition = description.name.partition(1)
        java_session("open-plain", name="orders", topic=partition.full, schema="bytes")
        due_ms = world.clock.now_ms() + 2_500

        def park(body: bytes, **values: Any) -> None:
            properties = {DUE: str(due_ms), TARGET: target}
            given = {"name": "orders", "schema": "bytes", "value": b64(body), **values}
            answer = java_session("send-plain", properties=properties, **given)
            assert "failed" not in answer, answer

        park(b"before")
        assert java_session("begin") == {}
        park(b"inside", inTransaction=True)
        park(b"behind")
        mover = world.mover(description)
        found: list[bytes] = []

        def received(count: int) -> bool:
            mover.run_once()
            with contextlib.suppress(pulsar.Timeout):
                while True:
                    found.append(consumer.receive(100).data())
            return len(found) >= count

        world.eventually(lambda: received(1), "the message before the transaction")
        world.eventually(lambda: world.clock.now_ms() > due_ms, "the hand-off time of all")
        assert not received(2)
        assert java_session("commit") == {}
        world.eventually(lambda: received(3), "the messages of and behind the transaction")
        assert found == [b"before", b"inside", b"behind"]
