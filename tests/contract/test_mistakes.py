"""Tests of wrong arguments: they raise the same exceptions as with the plain client."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pulsar
import pytest
from pulsar.schema import BytesSchema, JsonSchema, Record, String

from delaylevel import PartitionStrategy, wrap
from delaylevel.errors import DelayLevelError

DAYS = PartitionStrategy(maximum_delay=timedelta(days=3))
LATER = timedelta(days=2)
CONFIRMED = {"encryption_key": None, "chunking_enabled": False, "message_router": None}


class Note(Record):
    text = String()


class Text(BytesSchema):
    """A schema that wrongly encodes to a string."""

    def encode(self, obj: Any) -> Any:
        return "not bytes"


CREATE: dict[str, dict[str, Any]] = {
    "topic None": {"topic": None},
    "topic a number": {"topic": 5},
    "topic bytes": {"topic": b"orders"},
    "topic empty": {"topic": ""},
    "topic not a name": {"topic": "a/b"},
    "topic in no namespace": {"topic": "persistent://public/no-such-namespace/t"},
    "producer_name": {"producer_name": 5},
    "schema": {"schema": "bytes"},
    "schema a class": {"schema": JsonSchema},
    "initial_sequence_id": {"initial_sequence_id": "1"},
    "send_timeout_millis": {"send_timeout_millis": "5"},
    "send_timeout_millis None": {"send_timeout_millis": None},
    "send_timeout_millis huge": {"send_timeout_millis": 1 << 70},
    "compression_type": {"compression_type": "LZ4"},
    "max_pending_messages": {"max_pending_messages": "many"},
    "max_pending_messages below 0": {"max_pending_messages": -1},
    "max_pending_messages_across_partitions": {"max_pending_messages_across_partitions": None},
    "block_if_queue_full": {"block_if_queue_full": 1},
    "batching_enabled": {"batching_enabled": "yes"},
    "batching_max_messages": {"batching_max_messages": "x"},
    "batching_max_messages 0": {"batching_max_messages": 0},
    "batching_max_allowed_size_in_bytes": {"batching_max_allowed_size_in_bytes": 1.5},
    "batching_max_publish_delay_ms": {"batching_max_publish_delay_ms": None},
    "chunking_enabled": {"chunking_enabled": "no"},
    "message_routing_mode": {"message_routing_mode": "RoundRobin"},
    "lazy_start_partitioned_producers": {"lazy_start_partitioned_producers": "no"},
    "properties text": {"properties": "x"},
    "properties list": {"properties": []},
    "properties values": {"properties": {"a": 5}},
    "batching_type": {"batching_type": "Default"},
    "encryption_key": {"encryption_key": b"k"},
    "crypto_key_reader": {"crypto_key_reader": "file"},
    "access_mode": {"access_mode": "Shared"},
    "an unknown option": {"unheard_of": 1},
}

SEND: dict[str, dict[str, Any]] = {
    "content text": {"content": "text"},
    "content a number": {"content": 5},
    "content a list": {"content": [b"x"]},
    "properties text": {"properties": "x"},
    "properties empty text": {"properties": ""},
    "properties list": {"properties": []},
    "properties zero": {"properties": 0},
    "properties pairs": {"properties": [("a", "b")]},
    "properties value a number": {"properties": {"a": 5}},
    "properties value a list": {"properties": {"a": ["b"]}},
    "properties value None": {"properties": {"a": None}},
    "properties name a number": {"properties": {5: "a"}},
    "properties name None": {"properties": {None: "a"}},
    "partition_key a number": {"partition_key": 5},
    "partition_key zero": {"partition_key": 0},
    "partition_key bytes": {"partition_key": b"k"},
    "partition_key no bytes": {"partition_key": b""},
    "partition_key list": {"partition_key": ["k"]},
    "ordering_key a number": {"ordering_key": 5},
    "ordering_key False": {"ordering_key": False},
    "ordering_key bytes": {"ordering_key": b"k"},
    "event_timestamp text": {"event_timestamp": "x"},
    "event_timestamp no text": {"event_timestamp": ""},
    "event_timestamp float": {"event_timestamp": 1.5},
    "event_timestamp float zero": {"event_timestamp": 0.0},
    "event_timestamp below 0": {"event_timestamp": -1},
    "event_timestamp huge": {"event_timestamp": 1 << 70},
    "sequence_id text": {"sequence_id": "x"},
    "sequence_id no text": {"sequence_id": ""},
    "replication_clusters text": {"replication_clusters": "x"},
    "replication_clusters no text": {"replication_clusters": ""},
    "replication_clusters tuple": {"replication_clusters": ()},
    "disable_replication text": {"disable_replication": "x"},
    "disable_replication None": {"disable_replication": None},
    "disable_replication zero": {"disable_replication": 0},
    "deliver_after a number": {"deliver_after": 5},
    "deliver_after text": {"deliver_after": "1 day"},
    "deliver_at text": {"deliver_at": "x"},
    "deliver_at float": {"deliver_at": 1.5},
    "callback text": {"callback": "x"},
    "callback a number": {"callback": 5},
    "an unknown argument": {"unheard_of": 1},
}
#: Arguments that look unusual, and are accepted by the plain client.
ACCEPTED: dict[str, dict[str, Any]] = {
    "properties bytes": {"properties": {"a": b"b"}},
    "properties empty": {"properties": {}},
    "properties of another dict": {"properties": OrderedDict(a="b")},
    "keys empty": {"partition_key": "", "ordering_key": ""},
    "event_timestamp zero": {"event_timestamp": 0},
    "event_timestamp True": {"event_timestamp": True},
    "content empty": {"content": b""},
    "content None": {"content": None},
}


def raised(call: Callable[..., Any], *args: Any, **kwargs: Any) -> BaseException | None:
    try:
        call(*args, **kwargs)
    except Exception as error:
        return error
    return None


def assert_same(ours: BaseException | None, plain: BaseException | None) -> None:
    """Assert that a handler for the plain client's exception catches ours."""
    assert plain is not None
    assert isinstance(ours, type(plain)), (ours, plain)
    if not isinstance(ours, DelayLevelError) and "unexpected" not in str(plain):
        assert str(ours).partition("\n")[0] == str(plain).partition("\n")[0]


@contextmanager
def named(case: str) -> Iterator[None]:
    """Name the case in the text of a failed assertion."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from error


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
    for name, mistake in CREATE.items():
        arguments = {"topic": world.topic("orders"), **mistake}
        expected = raised(plain_client.create_producer, **arguments)
        for levels in (False, True):
            found = raised(client.create_producer, enable_delay_level_topic=levels, **arguments)
            with named(f"{name}, levels {levels}"):
                assert_same(found, expected)
    assert world.admin.list_partitioned_topics(world.namespace) == []


def test_mistakes_in_wrap(world: Any) -> None:
    client = world.plain_client
    for name, mistake in CREATE.items():
        if "topic" in mistake:
            continue
        expected = raised(client.create_producer, world.topic("orders"), **mistake)
        plain = client.create_producer(world.topic("orders"))
        given = {**CONFIRMED, "admin": world.admin, **mistake}
        with named(name):
            assert_same(raised(wrap, plain, client, **given), expected)
        plain.close()
    assert world.admin.list_partitioned_topics(world.namespace) == []


def test_mistakes_in_send(world: Any, producer: Any) -> None:
    plain = world.plain_client.create_producer(world.topic("orders"))
    # The fast path starts when the level's producer is open.
    producer.send(b"first", deliver_after=LATER)
    for name, mistake in SEND.items():
        for delay in ({}, {"deliver_after": LATER}):
            given = {"content": b"x", **delay, **mistake}
            callback = given.pop("callback", None)
            sent = {"callback": callback, **given}
            with named(f"{name}, {delay}"):
                assert_same(raised(producer.send_async, **sent), raised(plain.send_async, **sent))
                if callback is None:
                    assert_same(raised(producer.send, **given), raised(plain.send, **given))
    producer.flush()


def test_what_the_plain_client_accepts_is_accepted(world: Any, producer: Any) -> None:
    plain = world.plain_client.create_producer(world.topic("orders"))
    producer.send(b"first", deliver_after=LATER)
    for arguments in ACCEPTED.values():
        for delay in ({}, {"deliver_after": LATER}):
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
    for delay in ({}, {"deliver_after": LATER}):
        assert_same(raised(producer.send, b"x", **delay), raised(plain.send, b"x"))


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
