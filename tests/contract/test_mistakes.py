"""Tests of wrong arguments: they raise the same exceptions as with the plain client."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pulsar
import pulsar.asyncio
import pytest
from pulsar.schema import BytesSchema, JsonSchema, Record, String, StringSchema

from delaylevel import PartitionStrategy, wrap
from delaylevel.errors import DelayLevelError, LevelTopicError
from delaylevel.model.level_topic import default_level_topic
from delaylevel.model.topic_name import TopicName

DAYS = PartitionStrategy(maximum_delay=timedelta(days=3))
LATER = timedelta(days=2)
DELAYS: list[Any] = [{}, {"deliver_after": LATER}]
CLIENTS = (pulsar.PulsarException, pulsar.asyncio.PulsarException)
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
        *({"a": 5}, {"a": ["b"]}, {"a": None}, {5: "a"}, {None: "a"}, {"a": "\ud800"}),
    ],
    "partition_key": [5, 0, b"k", b"", ["k"], "\ud800"],
    "ordering_key": [5, False, b"k", "\ud800"],
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


#: Both forms of the client.
both_forms = pytest.mark.parametrize(
    "world", ["memory", "asyncio", pytest.param("real", marks=pytest.mark.broker)], indirect=True
)
LEVELS: dict[str, Any] = {"enable_delay_level_topic": True, "partition_strategy": DAYS}
WEEK = PartitionStrategy(maximum_delay=timedelta(days=7))


@both_forms
def test_nothing_is_left_if_the_broker_refuses_the_business_producer(world: Any) -> None:
    client, orders, schema = world.client(), world.topic("orders"), JsonSchema(Note)
    holder = world.plain_client.create_producer(
        orders, access_mode=pulsar.ProducerAccessMode.Exclusive, schema=schema
    )
    with pytest.raises(CLIENTS, match="ProducerBusy"):
        client.create_producer(orders, schema=schema, **LEVELS)
    holder.close()
    with pytest.raises(CLIENTS, match="IncompatibleSchema"):
        client.create_producer(orders, schema=StringSchema(), **LEVELS)
    assert world.admin.list_partitioned_topics(world.namespace) == []


@both_forms
def test_nothing_is_left_if_the_level_topic_is_refused(world: Any) -> None:
    """Handlers for the client's exceptions catch our errors."""
    client, orders, other = world.client(), world.topic("orders"), world.topic("other")
    client.create_producer(orders, **LEVELS).close()
    shared = {**LEVELS, "delay_level_topic": default_level_topic(orders)}
    choices: list[dict[str, Any]] = [
        {**shared, "partition_strategy": WEEK},
        shared,  # it does not carry messages for the other topic
        {**LEVELS, "create_level_topic": False},
        # The level topic's name is that of a topic which is none.
        {**LEVELS, "delay_level_topic": orders},
    ]
    for choice in choices:
        with pytest.raises(LevelTopicError) as refused:
            client.create_producer(other, **choice)
        assert all(isinstance(refused.value, each) for each in CLIENTS)
    assert not world.admin.topic_exists(world.name("other"))
    assert not world.admin.topic_exists(TopicName.parse(default_level_topic(other)))


def test_a_producer_works_on_if_its_level_topic_is_refused(world: Any) -> None:
    made(world, "on").close()
    client = world.client()
    plain = client.create_producer(world.topic("orders"))
    none = {"delay_level_topic": world.topic("none"), "create_level_topic": False}
    for option in ({"partition_strategy": WEEK}, none):
        with pytest.raises(pulsar.PulsarException):
            wrap(plain, client, **option)
    plain.send(b"works on")
