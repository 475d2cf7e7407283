"""Tests of retried copies and dead letters of a subscription on a real broker."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pulsar
import pytest
from click.testing import Result
from pulsar.schema import AvroSchema, Integer, JsonSchema, Record, String

from delaylevel.cluster.connection.settings import Connection
from delaylevel.consumer.message import ReceivedMessage
from delaylevel.consumer.retry import Failure, Park, trace_of
from delaylevel.consumer.retry_publisher import NO_SCHEMA, CannotParkError, RetryPublisher
from delaylevel.dispatcher import DispatchSettings
from delaylevel.model import envelope as env
from delaylevel.model.level_topic import FinalWindow
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.run import LocalService
from support.background import Background
from support.world import RealWorld, quiet_client

SECOND = timedelta(seconds=1)
LEVELS = Levels([PartitionStrategy(partition_by=SECOND, maximum_delay=20 * SECOND)])
SOON = timedelta(milliseconds=300)


def failure(text: str) -> Failure:
    """Return a failed attempt with a traceback."""
    try:
        raise ValueError(text)
    except ValueError as error:
        return Failure(error, f"ValueError: {text}", trace_of(error))


class RetryWorld:
    """A business topic ``orders`` with subscription ``billing``, and a publisher of its retries.

    Args:
        world: the broker.
        connection: its address.
        directory: directory for the files of a dispatcher.
    """

    def __init__(self, world: RealWorld, connection: Connection, directory: Path) -> None:
        self.world, self.connection, self._directory = world, connection, directory
        self.client = world.client()
        self.topic = world.topic("orders")
        world.level_topic(LEVELS, final_window=FinalWindow.TRACKER, window_partitions=1)
        self.publisher = RetryPublisher(self.client, self.topic, "billing")
        self.publisher.prepare()

    def subscribe(self, topic: str = "orders", name: str = "billing", **options: Any) -> Any:
        """Return a Shared consumer."""
        kind = pulsar.ConsumerType.Shared
        return self.client.subscribe(self.world.topic(topic), name, kind, **options)

    def received(self, consumer: Any) -> ReceivedMessage:
        """Return the next message as a listener receives it."""
        return ReceivedMessage(
            consumer.receive(40_000), self.topic, "billing", int(time.time() * 1000)
        )

    def send(self, body: bytes = b"pay", **arguments: Any) -> None:
        """Send a message without a delay."""
        producer = self.client.create_producer(self.topic)
        producer.send(body, **arguments)
        producer.close()

    def first(self, body: bytes = b"pay", **arguments: Any) -> ReceivedMessage:
        """Send a message, and return it as ``billing`` receives it."""
        consumer = self.subscribe()
        self.send(body, **arguments)
        return self.received(consumer)

    def park(self, message: ReceivedMessage, text: str = "no money") -> Exception | None:
        """Park a message whose attempt failed with a text; return the error."""
        (outcome,) = self.publisher.park([(message, Park(SOON, failure(text)))])
        return outcome

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Move and release the messages of the level topic meanwhile."""
        service = LocalService(
            lambda: quiet_client(self.connection),
            self.world.admin,
            [self.topic],
            DispatchSettings(directory=self._directory / "spill"),
        )
        with Background(service.run, service.stop):
            yield


pytestmark = pytest.mark.broker

RETRY, DLQ = "orders-billing-RETRY", "orders-billing-DLQ"


class Order(Record):
    number = Integer()


class LaterOrder(Record):
    number = Integer()
    note = String(default=None, required_default=True)


# One Avro record in two versions.
LaterOrder.__name__ = "Order"


@pytest.fixture
def retries(world: RealWorld, connection: Connection, tmp_path: Path) -> Iterator[RetryWorld]:
    made = RetryWorld(world, connection, tmp_path)
    yield made
    made.publisher.close()


def test_a_copy_comes_back_to_its_subscription_only_and_keeps_everything(
    retries: RetryWorld,
) -> None:
    other = retries.subscribe(name="shipping")
    message = retries.first(
        properties={"mine": "1"},
        partition_key="k",
        ordering_key="o",
        event_timestamp=1_700_000_000_123,
    )
    again = retries.subscribe(RETRY)
    with retries.serving():
        assert retries.park(message) is None
        copy = retries.received(again)
    assert (copy.data, copy.key, copy.ordering_key) == (b"pay", "k", "o")
    assert copy.event_timestamp_ms == 1_700_000_000_123
    assert copy.properties == {"mine": "1"}
    assert (copy.attempt, copy.id) == (2, message.id)
    assert copy.first_published_ms == message.publish_ms
    assert copy.topic == retries.topic
    found = copy.all_properties
    assert found["REAL_TOPIC"] == retries.topic
    assert found["REAL_SUBSCRIPTION"] == "billing"
    assert found["ORIGIN_MESSAGE_ID"] == message.id
    assert found["delaylevel-retry-error"] == "ValueError: no money"
    assert found[env.ID] == f"{message.id}#billing#1"
    assert other.receive(5000).data() == b"pay"
    with pytest.raises(pulsar.Timeout):
        other.receive(700)


@pytest.mark.parametrize("schema", [AvroSchema, JsonSchema])
def test_copies_are_decoded_by_the_schema_and_version_of_their_message(
    retries: RetryWorld, schema: Any
) -> None:
    old, new = schema(Order), schema(LaterOrder)
    client = retries.client
    with_old = client.create_producer(retries.topic, schema=old)
    consumer = retries.subscribe(schema=new)
    with_old.send(Order(number=1))
    with_new = client.create_producer(retries.topic, schema=new)
    with_new.send(LaterOrder(number=2, note="x"))
    retries.publisher.prepare()  # with the latest schema
    again = retries.subscribe(RETRY, schema=new)
    with retries.serving():
        for _ in range(2):
            assert retries.park(retries.received(consumer)) is None
        copies = [retries.received(again) for _ in range(2)]
        values = sorted((copy.value.number, copy.value.note) for copy in copies)
        assert values == [(1, None), (2, "x")]
        # The copy of a copy, too.
        assert retries.park(copies[0]) is None
        third = retries.received(again)
    assert third.attempt == 3
    assert third.value.number == copies[0].value.number


def test_dead_letters_are_listed_shown_replayed_and_discarded(
    retries: RetryWorld, invoke: Callable[..., Result]
) -> None:
    def dlq(*arguments: str) -> Any:
        result = invoke("dlq", *arguments, "-o", "json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    consumer, again = retries.subscribe(), retries.subscribe(RETRY)
    other = retries.subscribe(name="shipping")
    for body in (b"one", b"two", b"three"):
        retries.send(body, properties={"mine": body.decode()}, partition_key="k")
        retries.publisher.bury(retries.received(consumer), failure(f"{body!r}"))
    by_name = dlq("list", retries.topic, "--subscription", "billing")
    assert dlq("list", retries.world.topic(DLQ)) == by_name
    assert [row["reason"] for row in by_name] == [
        f"attempt 1 failed: ValueError: {body!r}" for body in (b"one", b"two", b"three")
    ]
    assert {row["target"] for row in by_name} == {retries.world.topic(RETRY)}
    # Those of the level topic itself are others.
    assert dlq("list", retries.topic) == []
    identity = by_name[0]["id"]
    shown = dlq("show", retries.topic, identity, "--subscription", "billing")
    assert (shown["value"], shown["key"]) == ("one", "k")
    assert shown["properties"]["mine"] == "one"
    trace = shown["properties"]["delaylevel-retry-traceback"]
    assert trace.startswith("Traceback")
    assert "raise ValueError" in trace
    (replayed,) = dlq("replay", retries.topic, identity, "--subscription", "billing")
    assert (replayed["id"], replayed["outcome"]) == (identity, "handed off")
    with retries.serving():
        copy = retries.received(again)
    assert (copy.data, copy.key, copy.properties) == (b"one", "k", {"mine": "one"})
    assert copy.attempt == 1
    leftover = {"delaylevel-retry-traceback", "delaylevel-retry-error", "delaylevel-retry-attempts"}
    assert not leftover & set(copy.all_properties)
    gone = dlq("discard", retries.world.topic(DLQ), by_name[1]["id"], "--count", "1")
    assert [row["outcome"] for row in gone] == ["discarded"]
    # To another target, as one of its own messages.
    dlq("replay", retries.world.topic(DLQ), "--all", "--new-target", retries.topic)
    with retries.serving():
        arrived = retries.received(consumer)
    assert arrived.all_properties.keys() == {"mine", env.ID, env.DUE, env.TARGET}
    assert [other.receive(5000).data() for _ in range(4)].count(b"three") == 2
    assert dlq("list", retries.world.topic(DLQ)) == []
    missing = invoke("dlq", "list", retries.topic, "--subscription", "nobody")
    assert missing.exit_code == 1
    assert "does not exist" in missing.stderr


def test_a_copy_without_room_for_the_error_leaves_it_out(retries: RetryWorld) -> None:
    again, publisher = retries.subscribe(RETRY), retries.publisher
    more = 2_500  # than a parked message may have: it was sent without a delay
    assert publisher._producers is not None
    limit = publisher._producers.open(NO_SCHEMA)._cache.routing.size_limit.bytes
    message = retries.first(b"x" * (limit + more))
    with retries.serving():
        assert retries.park(message, "e" * 2000) is None
        copy = retries.received(again)
    assert copy.attempt == 2
    assert len(copy.data) == limit + more
    assert "delaylevel-retry-error" not in copy.all_properties


def test_what_can_never_be_parked_is_told_apart(retries: RetryWorld, bytes_keys: Any) -> None:
    """The listener stores it in the dead-letter topic."""
    consumer = retries.subscribe()
    retries.send(b"x" * ((5 << 20) - 400))
    error = retries.park(retries.received(consumer))
    assert isinstance(error, CannotParkError)
    assert "the copy would be too large" in str(error)
    bytes_keys(retries.topic, "ordering", b"\xff\xfe", b"pay", {})
    error = retries.park(retries.received(consumer))
    assert isinstance(error, CannotParkError)
    assert "the ordering key is not UTF-8" in str(error)
