"""Tests of retried copies and dead letters of a subscription on a real broker."""

from __future__ import annotations

import functools
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
from delaylevel.errors import DelayLevelError, LevelTopicError
from delaylevel.model import envelope as env
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow, LevelTopicDescription, Mover
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.run import LocalService
from support.background import Background
from support.world import RealWorld, quiet_client

SECOND = timedelta(seconds=1)
LEVELS = Levels([PartitionStrategy(partition_by=SECOND, maximum_delay=20 * SECOND)])
SOON = timedelta(milliseconds=300)


def failure(text: str = "no money") -> Failure:
    """Return a failed attempt with a traceback."""
    try:
        raise ValueError(text)
    except ValueError as error:
        return Failure(error, f"ValueError: {text}", trace_of(error))


class RetryWorld:
    """A business topic ``orders`` with subscription ``billing``, and publishers of retries.

    Args:
        world: the broker.
        connection: its address.
        directory: directory for the files of a dispatcher.
    """

    def __init__(self, world: RealWorld, connection: Connection, directory: Path) -> None:
        self.world, self.connection, self._directory = world, connection, directory
        self.client = world.client()
        self.topic = world.topic("orders")
        self.publishers: list[RetryPublisher] = []

    def levels(self, **values: Any) -> LevelTopicDescription:
        """Create a level topic for the business topic, with a tracker by default."""
        values.setdefault("final_window", FinalWindow.TRACKER)
        values.setdefault("window_partitions", 1)
        return self.world.level_topic(LEVELS, ("orders",), **values)

    def publisher(self, **options: Any) -> RetryPublisher:
        """Return a publisher for ``billing``, prepared."""
        made = RetryPublisher(self.client, self.topic, "billing", **options)
        self.publishers.append(made)
        made.prepare()
        return made

    def subscribe(self, topic: str = "orders", name: str = "billing", **options: Any) -> Any:
        """Return a Shared consumer."""
        options.setdefault("consumer_type", pulsar.ConsumerType.Shared)
        return self.client.subscribe(self.world.topic(topic), name, **options)

    def received(self, consumer: Any, seconds: float = 40) -> ReceivedMessage:
        """Return the next message as a listener receives it."""
        raw = consumer.receive(int(seconds * 1000))
        return ReceivedMessage(raw, self.topic, "billing", int(time.time() * 1000))

    def parked(self, publisher: RetryPublisher, message: ReceivedMessage, **values: Any) -> None:
        """Park a message; the broker confirms it."""
        error = self.refused(publisher, message, **values)
        assert error is None, error

    def refused(
        self, publisher: RetryPublisher, message: ReceivedMessage, **values: Any
    ) -> Exception | None:
        """Park a message, and return the error."""
        park = Park(values.pop("delay", SOON), values.pop("failure", failure()))
        (outcome,) = publisher.park([(message, park)])
        return outcome

    @contextmanager
    def serving(self, delivery: Delivery = Delivery.AT_LEAST_ONCE) -> Iterator[None]:
        """Move and release the messages of the level topic meanwhile."""
        service = LocalService(
            lambda: quiet_client(self.connection),
            self.world.admin,
            [self.topic],
            DispatchSettings(directory=self._directory / "spill", delivery=delivery),
        )
        with Background(service.run, service.stop):
            yield


def is_empty(consumer: Any, milliseconds: int = 700) -> bool:
    """Return True if a consumer receives nothing for a while."""
    try:
        consumer.receive(milliseconds)
    except pulsar.Timeout:
        return True
    return False


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
    for each in made.publishers:
        each.close()


@pytest.fixture
def dlq(invoke: Callable[..., Result]) -> Callable[..., Any]:
    """``dlq("list", …)``: the output of a command, as JSON."""

    def run(*arguments: str) -> Any:
        result = functools.partial(invoke, "dlq")(*arguments, "-o", "json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return run


def send(retries: RetryWorld, body: bytes = b"pay", **arguments: Any) -> None:
    producer = retries.client.create_producer(retries.topic)
    producer.send(body, **arguments)
    producer.close()


def first(retries: RetryWorld, body: bytes = b"pay", **arguments: Any) -> ReceivedMessage:
    """Send a message, and return it as ``billing`` receives it."""
    consumer = retries.subscribe()
    send(retries, body, **arguments)
    return retries.received(consumer)


def test_a_copy_comes_back_to_its_subscription_only_and_keeps_everything(
    retries: RetryWorld,
) -> None:
    retries.levels()
    other = retries.subscribe(name="shipping")
    publisher = retries.publisher()
    message = first(
        retries,
        properties={"mine": "1"},
        partition_key="k",
        ordering_key="o",
        event_timestamp=1_700_000_000_123,
    )
    again = retries.subscribe(RETRY)
    with retries.serving():
        retries.parked(publisher, message)
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
    assert is_empty(other)


@pytest.mark.parametrize("schema", [AvroSchema, JsonSchema])
def test_copies_are_decoded_by_the_schema_and_version_of_their_message(
    retries: RetryWorld, schema: Any
) -> None:
    retries.levels()
    old, new = schema(Order), schema(LaterOrder)
    client = retries.client
    with_old = client.create_producer(retries.topic, schema=old)
    consumer = retries.subscribe(schema=new)
    with_old.send(Order(number=1))
    with_new = client.create_producer(retries.topic, schema=new)
    with_new.send(LaterOrder(number=2, note="x"))
    publisher = retries.publisher()
    again = retries.subscribe(RETRY, schema=new)
    with retries.serving():
        for _ in range(2):
            retries.parked(publisher, retries.received(consumer))
        copies = [retries.received(again) for _ in range(2)]
        values = sorted((copy.value.number, copy.value.note) for copy in copies)
        assert values == [(1, None), (2, "x")]
        # The copy of a copy, too.
        retries.parked(publisher, copies[0])
        third = retries.received(again)
    assert third.attempt == 3
    assert third.value.number == copies[0].value.number


@pytest.mark.parametrize(
    "values",
    [
        {"final_window": FinalWindow.BROKER},
        {"final_window": FinalWindow.BROKER, "mover": Mover.FUNCTION},
        {"topic": "{ns}/any-name"},
    ],
    ids=["broker", "function", "another name"],
)
def test_existing_level_topics_of_every_kind_carry_retries(
    retries: RetryWorld, values: dict[str, Any]
) -> None:
    namespace = f"persistent://{retries.world.namespace}"
    if "topic" in values:
        values = {"topic": values["topic"].format(ns=namespace)}
    made = retries.levels(**values)
    publisher = retries.publisher()
    assert publisher.prepare().topic == made.topic
    assert set(publisher.prepare().targets) == {retries.topic, retries.world.topic(RETRY)}
    message, again = first(retries), retries.subscribe(RETRY)
    retries.parked(publisher, message, delay=timedelta(seconds=3))
    assert is_empty(again)
    if made.mover is Mover.SERVICE:
        with retries.serving():
            assert retries.received(again).attempt == 2


def test_everything_is_created_if_nothing_is_there(retries: RetryWorld) -> None:
    made = retries.publisher().prepare()
    assert made.topic == retries.world.topic("_orders-delay-level")
    admin, world = retries.world.admin, retries.world
    for name, subscription in ((RETRY, "billing"), (DLQ, SUBSCRIPTION)):
        stats = admin.partitioned_stats(world.name(name))[0]
        assert stats.subscriptions[subscription].durable
        assert admin.topic_policies(world.name(name)).message_ttl_s == 0
    # Again, and by another process: nothing changes.
    assert retries.publisher().prepare() == made


def test_topics_of_another_subscription_are_refused(retries: RetryWorld) -> None:
    retries.levels()
    retries.publisher()
    same = RetryPublisher(retries.client, retries.world.topic("orders-x"), "y")
    assert same.topics.retry.local == "orders-x-y-RETRY"
    clash = RetryPublisher(retries.client, retries.world.topic("orders-billing-x"), "y")
    clash.prepare()
    other = RetryPublisher(retries.client, retries.topic, "billing-x-y")
    with pytest.raises(LevelTopicError, match="give one of the two subscriptions another name"):
        other.prepare()
    clash.close()


def test_in_effectively_once_mode_a_second_copy_is_dropped_and_no_other_attempt(
    retries: RetryWorld,
) -> None:
    retries.world.deduplicate()
    retries.levels()
    publisher, again = retries.publisher(), retries.subscribe(RETRY)
    message = first(retries)
    with retries.serving(Delivery.EFFECTIVELY_ONCE):
        seen = []
        for attempt in (1, 2, 3):
            # A crash between parking and acknowledging: the message comes, and is parked, again.
            retries.parked(publisher, message)
            retries.parked(publisher, message)
            message = retries.received(again)
            assert is_empty(again)
            seen.append(message.attempt)
            assert message.all_properties[env.ID].endswith(f"#billing#{attempt}")
        assert seen == [2, 3, 4]
        # A replayed dead letter starts again, and its attempts are not taken for the first ones.
        publisher.bury(message, failure())
        replay(retries)
        message = retries.received(again)
        assert message.attempt == 1
        retries.parked(publisher, message)
        message = retries.received(again)
        assert (message.attempt, message.id) == (2, publisher_id(message))


def publisher_id(message: ReceivedMessage) -> str:
    return message.all_properties["delaylevel-retry-id"]


def replay(retries: RetryWorld) -> None:
    from delaylevel.consumer.retry_topics import find_dead_letters
    from delaylevel.mover import dead_letters

    admin, client = retries.world.admin, retries.world.plain_client
    found = find_dead_letters(admin, retries.topic, "billing")
    assert found is not None
    description, source = found
    report = dead_letters.replay(client, admin, description, lambda _: True, source=source)
    assert report.replayed == 1, report


def test_dead_letters_are_listed_shown_replayed_and_discarded(
    retries: RetryWorld, dlq: Callable[..., Any], invoke: Callable[..., Result]
) -> None:
    retries.levels()
    publisher = retries.publisher()
    consumer, again = retries.subscribe(), retries.subscribe(RETRY)
    other = retries.subscribe(name="shipping")
    for body in (b"one", b"two", b"three"):
        send(retries, body, properties={"mine": body.decode()}, partition_key="k")
        publisher.bury(retries.received(consumer), failure(f"{body!r}"))
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


MAX = 5 << 20


def test_a_copy_without_room_for_the_error_leaves_it_out(retries: RetryWorld) -> None:
    retries.levels()
    publisher, again = retries.publisher(), retries.subscribe(RETRY)
    more = 2_500  # than a parked message may have: it was sent without a delay
    assert publisher._producers is not None
    limit = publisher._producers.open(NO_SCHEMA)._cache.routing.size_limit.bytes
    message = first(retries, b"x" * (limit + more))
    with retries.serving():
        retries.parked(publisher, message, failure=failure("e" * 2000))
        copy = retries.received(again)
    assert copy.attempt == 2
    assert len(copy.data) == limit + more
    assert "delaylevel-retry-error" not in copy.all_properties


def test_what_can_never_be_parked_is_told_apart(retries: RetryWorld, bytes_keys: Any) -> None:
    """The listener stores it in the dead-letter topic."""
    retries.levels()
    publisher, consumer = retries.publisher(), retries.subscribe()
    send(retries, b"x" * (MAX - 400))
    error = retries.refused(publisher, retries.received(consumer))
    assert isinstance(error, CannotParkError)
    assert "the copy would be too large" in str(error)
    bytes_keys(retries.topic, "ordering", b"\xff\xfe", b"pay", {})
    error = retries.refused(publisher, retries.received(consumer))
    assert isinstance(error, CannotParkError)
    assert "the ordering key is not UTF-8" in str(error)


def test_many_copies_are_stored_together(retries: RetryWorld) -> None:
    retries.levels()
    publisher, message = retries.publisher(), first(retries)
    park = Park(timedelta(seconds=10), failure())
    assert publisher.park([(message, park)] * 900) == [None] * 900
    retries.client.shutdown()
    assert publisher.park([(message, park)] * 2).count(None) == 0
    with pytest.raises((DelayLevelError, pulsar.PulsarException)):
        publisher.bury(message, failure())
