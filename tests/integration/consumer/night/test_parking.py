"""Tests of retried copies and dead letters of a subscription on a real broker."""

from __future__ import annotations

import json
import shutil
import subprocess
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
from delaylevel.consumer.retry import Decision, decide
from delaylevel.consumer.retry_publisher import NO_SCHEMA, CannotParkError, RetryPublisher
from delaylevel.dispatcher import DispatchSettings
from delaylevel.errors import UnsupportedOptionError
from delaylevel.model import envelope as env
from delaylevel.model.level_topic import FinalWindow
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.run import LocalService
from support.background import Background
from support.world import RealWorld, quiet_client

SECOND = timedelta(seconds=1)
LEVELS = Levels([PartitionStrategy(partition_by=SECOND, maximum_delay=20 * SECOND)])
SOON = timedelta(milliseconds=300)


def failure(text: str) -> Decision:
    """Return the decision about a last attempt that failed."""
    try:
        raise ValueError(text)
    except ValueError as error:
        return decide(None, 1, error)


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

    def send(self, body: bytes, **arguments: Any) -> None:
        """Send a message without a delay."""
        producer = self.client.create_producer(self.topic)
        producer.send(body, **arguments)
        producer.close()

    def park(self, message: ReceivedMessage, text: str = "no money") -> Exception | None:
        """Park a message whose attempt failed with a text; return the error."""
        (outcome,) = self.publisher.park([(message, failure(text)._replace(delay=SOON))])
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


@pytest.mark.parametrize("schema", [AvroSchema, JsonSchema])
def test_a_copy_comes_back_to_its_subscription_only_and_keeps_everything(
    retries: RetryWorld, schema: Any
) -> None:
    old, new = schema(Order), schema(LaterOrder)
    with_old = retries.client.create_producer(retries.topic, schema=old)
    consumer, other = retries.subscribe(schema=new), retries.subscribe(name="shipping", schema=new)
    own: dict[str, Any] = {"properties": {"mine": "1"}, "partition_key": "k", "ordering_key": "o"}
    with_old.send(Order(number=1), event_timestamp=1_700_000_000_123, **own)
    with_new = retries.client.create_producer(retries.topic, schema=new)
    with_new.send(LaterOrder(number=2, note="x"))
    retries.publisher.prepare()  # with the latest schema
    messages = [retries.received(consumer) for _ in range(2)]
    again = retries.subscribe(RETRY, schema=new)
    with retries.serving():
        for message in messages:
            assert retries.park(message) is None
        copies = sorted((retries.received(again) for _ in messages), key=lambda c: c.value.number)
        assert [(copy.value.number, copy.value.note) for copy in copies] == [(1, None), (2, "x")]
        copy, message = copies[0], messages[0]
        # The copy of a copy, too.
        assert retries.park(copy) is None
        third = retries.received(again)
    assert (third.attempt, third.value.number, third.id) == (3, 1, message.id)
    assert third.all_properties["ORIGIN_MESSAGE_ID"] == message.id
    assert (copy.key, copy.ordering_key, copy.properties) == ("k", "o", {"mine": "1"})
    assert copy.event_timestamp_ms == 1_700_000_000_123
    assert (copy.attempt, copy.id, copy.topic) == (2, message.id, retries.topic)
    assert copy.first_published_ms == message.publish_ms
    found = copy.all_properties
    assert (found["REAL_TOPIC"], found["REAL_SUBSCRIPTION"]) == (retries.topic, "billing")
    assert (found["ORIGIN_MESSAGE_ID"], found[env.ID]) == (message.id, f"{message.id}#billing#1")
    assert found["delaylevel-retry-error"] == "ValueError: no money"
    assert [other.receive(5000).value().number for _ in range(2)] == [1, 2]
    with pytest.raises(pulsar.Timeout):
        other.receive(700)


def test_dead_letters_are_listed_shown_replayed_and_discarded(
    retries: RetryWorld, invoke: Callable[..., Result]
) -> None:
    def dlq(command: str, *arguments: str, topic: str = retries.topic) -> Any:
        result = invoke("dlq", command, topic, *arguments, "-o", "json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    billing, letters = ("--subscription", "billing"), retries.world.topic(DLQ)
    consumer, again = retries.subscribe(), retries.subscribe(RETRY)
    for body in (b"one", b"two"):
        retries.send(body, properties={"mine": body.decode()}, partition_key="k")
        retries.publisher.bury(retries.received(consumer), failure(body.decode()))
    first, second = dlq("list", *billing)
    assert dlq("list", topic=letters) == [first, second]
    assert first["reason"] == "attempt 1 failed: ValueError: one"
    assert dlq("list") == [], "those of the level topic itself are others"
    shown = dlq("show", first["id"], *billing)
    assert (shown["value"], shown["key"], shown["properties"]["mine"]) == ("one", "k", "one")
    assert "raise ValueError" in shown["properties"]["delaylevel-retry-traceback"]
    with retries.serving():
        dlq("replay", first["id"], *billing)
        copy = retries.received(again)
        assert (copy.data, copy.key, copy.attempt) == (b"one", "k", 1)
        leftover = {f"delaylevel-retry-{name}" for name in ("traceback", "error", "attempts")}
        assert not leftover & set(copy.all_properties)
        # To another target, as one of its own messages.
        dlq("replay", second["id"], "--new-target", retries.topic, topic=letters)
        arrived = retries.received(consumer)
        assert arrived.all_properties.keys() == {"mine", env.ID, env.DUE, env.TARGET}
    retries.publisher.bury(arrived, failure("again"))
    assert [row["outcome"] for row in dlq("discard", "--all", "--count", "1", *billing)] == [
        "discarded"
    ]
    assert dlq("list", *billing) == []


def test_what_has_no_room_for_the_error_leaves_it_out_and_the_rest_is_told_apart(
    retries: RetryWorld, bytes_keys: Any
) -> None:
    """The listener stores what can never be parked in the dead-letter topic."""
    consumer, again, publisher = retries.subscribe(), retries.subscribe(RETRY), retries.publisher
    more = 2_500  # than a parked message may have: it was sent without a delay
    limit = publisher.producer(NO_SCHEMA)._cache.routing.size_limit.bytes
    retries.send(b"x" * (limit + more))
    with retries.serving():
        assert retries.park(retries.received(consumer), "e" * 2000) is None
        copy = retries.received(again)
    assert (copy.attempt, len(copy.data)) == (2, limit + more)
    assert "delaylevel-retry-error" not in copy.all_properties

    retries.send(b"x" * ((5 << 20) - 400))
    error = retries.park(retries.received(consumer))
    assert isinstance(error, CannotParkError)
    assert "the copy would be too large" in str(error)
    bytes_keys(retries.topic, "ordering", b"\xff\xfe", b"pay", properties={})
    error = retries.park(retries.received(consumer))
    assert isinstance(error, CannotParkError)
    assert "the ordering key is not UTF-8" in str(error)


def test_an_encrypted_message_is_never_copied_in_clear_text(
    retries: RetryWorld, tmp_path: Path
) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    private, public = str(tmp_path / "private.pem"), str(tmp_path / "public.pem")
    for words in (
        ["genrsa", "-out", private, "2048"],
        ["rsa", "-in", private, "-pubout", "-out", public],
    ):
        subprocess.run([openssl, *words], check=True, capture_output=True)
    keys = {"crypto_key_reader": pulsar.CryptoKeyReader(public, private)}
    consumer = retries.subscribe(**keys)
    retries.client.create_producer(retries.topic, encryption_key="key", **keys).send(b"secret")
    message = retries.received(consumer)
    assert isinstance(retries.park(message), UnsupportedOptionError)
    with pytest.raises(UnsupportedOptionError, match="was encrypted"):
        retries.publisher.bury(message, failure("no money"))
    assert message.data == b"secret"
