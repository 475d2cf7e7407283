"""Tests of wrong arguments: they raise the same exceptions as with the plain client."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pulsar
import pytest
from pulsar.schema import BytesSchema, JsonSchema, Record, String

from delaylevel import PartitionStrategy, wrap
from delaylevel.errors import DelayLevelError

DAYS = PartitionStrategy(maximum_delay=timedelta(days=3))
LATER = timedelta(days=2)
DELAYS: list[Any] = [{}, {"deliver_after": LATER}]
CONFIRMED = {"encryption_key": None, "chunking_enabled": False, "message_router": None}


class Note(Record):
    text = String()


class Text(BytesSchema):
    """A schema that wrongly encodes to a string."""

    def encode(self, obj: Any) -> Any:
        return "not bytes"


#: Wrong values of each argument.
CREATE: dict[str, list[Any]] = {
    "topic": [None, 5, b"orders", "", "a/b", "persistent://public/no-such-namespace/t"],
    "producer_name": [5],
    "schema": ["bytes", JsonSchema],
    "initial_sequence_id": ["1"],
    "send_timeout_millis": ["5", None, 1 << 70],
    "compression_type": ["LZ4"],
    "max_pending_messages": ["many", -1],
    "max_pending_messages_across_partitions": [None],
    "block_if_queue_full": [1],
    "batching_enabled": ["yes"],
    "batching_max_messages": ["x", 0],
    "batching_max_allowed_size_in_bytes": [1.5],
    "batching_max_publish_delay_ms": [None],
    "chunking_enabled": ["no"],
    "message_routing_mode": ["RoundRobin"],
    "lazy_start_partitioned_producers": ["no"],
    "properties": ["x", [], {"a": 5}],
    "batching_type": ["Default"],
    "encryption_key": [b"k"],
    "crypto_key_reader": ["file"],
    "access_mode": ["Shared"],
    "unheard_of": [1],
}
SEND: dict[str, list[Any]] = {
    "content": ["text", 5, [b"x"]],
    "properties": [
        *("x", "", [], 0, [("a", "b")]),
        *({"a": 5}, {"a": ["b"]}, {"a": None}, {5: "a"}, {None: "a"}),
    ],
    "partition_key": [5, 0, b"k", b"", ["k"]],
    "ordering_key": [5, False, b"k"],
    "event_timestamp": ["x", "", 1.5, 0.0, -1, 1 << 70],
    "sequence_id": ["x", ""],
    "replication_clusters": ["x", "", ()],
    "disable_replication": ["x", None, 0],
    "deliver_after": [5, "1 day"],
    "deliver_at": ["x", 1.5],
    "callback": ["x", 5],
    "unheard_of": [1],
}
#: Values that look unusual, and are accepted by the plain client.
ACCEPTED: dict[str, list[Any]] = {
    "properties": [{"a": b"b"}, {}, OrderedDict(a="b")],
    "partition_key": [""],
    "ordering_key": [""],
    "event_timestamp": [0, True],
    "content": [b"", None],
}


def each(table: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    for name, values in table.items():
        for value in values:
            yield {name: value}


def raised(call: Callable[..., Any], *args: Any, **kwargs: Any) -> BaseException | None:
    try:
        call(*args, **kwargs)
    except Exception as error:
        return error
    return None


def assert_same(ours: BaseException | None, plain: BaseException | None, what: object) -> None:
    """Assert that a handler for the plain client's exception catches ours."""
    assert plain is not None, what
    assert isinstance(ours, type(plain)), (what, ours, plain)
    if not isinstance(ours, DelayLevelError) and "unexpected" not in str(plain):
        assert str(ours).partition("\n")[0] == str(plain).partition("\n")[0], what


@pytest.fixture(params=["on", "wrap"])
def producer(request: pytest.FixtureRequest, world: Any) -> Any:
    return made(world, request.param)


def made(world: Any, levels: str, **options: Any) -> Any:
    client = world.client()
    if levels == "wrap":
        plain = client.create_producer(world.topic("orders"), **options)
        return wrap(plain, client, partition_strategy=DAYS)
    options = {"enable_delay_level_topic": True, "partition_strategy": DAYS, **options}
    return client.create_producer(world.topic("orders"), **options)


def test_mistakes_in_create_producer(world: Any) -> None:
    client, plain_client = world.client(), world.plain_client
    for mistake in each(CREATE):
        arguments = {"topic": world.topic("orders"), **mistake}
        expected = raised(plain_client.create_producer, **arguments)
        for levels in (False, True):
            found = raised(client.create_producer, enable_delay_level_topic=levels, **arguments)
            assert_same(found, expected, mistake)
    assert world.admin.list_partitioned_topics(world.namespace) == []


def test_mistakes_in_wrap(world: Any) -> None:
    client = world.plain_client
    for mistake in each({name: values for name, values in CREATE.items() if name != "topic"}):
        expected = raised(client.create_producer, world.topic("orders"), **mistake)
        plain = client.create_producer(world.topic("orders"))
        given = {**CONFIRMED, "admin": world.admin, **mistake}
        assert_same(raised(wrap, plain, client, **given), expected, mistake)
        plain.close()
    assert world.admin.list_partitioned_topics(world.namespace) == []


def test_mistakes_in_send(world: Any, producer: Any) -> None:
    plain = world.plain_client.create_producer(world.topic("orders"))
    # The fast path starts when the level's producer is open.
    producer.send(b"first", deliver_after=LATER)
    for mistake, delay in itertools.product(each(SEND), DELAYS):
        given = {"content": b"x", **delay, **mistake}
        callback = given.pop("callback", None)
        sent = {"callback": callback, **given}
        assert_same(raised(producer.send_async, **sent), raised(plain.send_async, **sent), mistake)
        if callback is None:
            assert_same(raised(producer.send, **given), raised(plain.send, **given), mistake)
    producer.flush()


def test_what_the_plain_client_accepts_is_accepted(world: Any, producer: Any) -> None:
    plain = world.plain_client.create_producer(world.topic("orders"))
    producer.send(b"first", deliver_after=LATER)
    for arguments, delay in itertools.product(each(ACCEPTED), DELAYS):
        given = {"content": b"x", **delay, **arguments}
        plain.send(**given)
        producer.send(**given)
        producer.send_async(callback=None, **given)
    producer.flush()


@pytest.mark.parametrize("levels", ["on", "wrap"])
@pytest.mark.parametrize("schema", [Text(), JsonSchema(Note)])
def test_mistakes_with_schemas(world: Any, levels: str, schema: Any) -> None:
    plain = world.plain_client.create_producer(world.topic("plain"), schema=schema)
    producer = made(world, levels, schema=schema)
    for delay in DELAYS:
        assert_same(raised(producer.send, b"x", **delay), raised(plain.send, b"x"), delay)


def test_our_errors_about_the_broker_are_caught_by_handlers_for_the_client(world: Any) -> None:
    made(world, "on").close()
    client = world.client()
    week = PartitionStrategy(maximum_delay=timedelta(days=7))
    options: list[dict[str, Any]] = [
        {"partition_strategy": week},
        {"delay_level_topic": world.topic("none"), "create_level_topic": False},
    ]
    for option in options:
        with pytest.raises(pulsar.PulsarException):
            client.create_producer(world.topic("orders"), enable_delay_level_topic=True, **option)
        plain = client.create_producer(world.topic("orders"))
        with pytest.raises(pulsar.PulsarException):
            wrap(plain, client, **option)
