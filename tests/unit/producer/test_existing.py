"""Tests of wrap(): options that are read, remembered or assumed, and arguments that are refused."""

from __future__ import annotations

import threading
import warnings
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pulsar
import pulsar.asyncio
import pytest

import delaylevel
import delaylevel.asyncio
from delaylevel import PartitionStrategy, wrap
from delaylevel.errors import InvalidInputError, UnsupportedOptionError
from delaylevel.model.topic_name import TopicName
from delaylevel.producer import aio
from delaylevel.producer.client import check_pair, options_of, remember
from delaylevel.testing import MemoryPulsar

WEEK = PartitionStrategy(maximum_delay=timedelta(days=7))
TWO_DAYS = timedelta(days=2)
CONFIRMED: dict[str, Any] = {
    "encryption_key": None,
    "chunking_enabled": False,
    "message_router": None,
}
REFUSED: dict[str, Any] = {
    "encryption_key": "k",
    "chunking_enabled": True,
    "message_router": lambda message, count: 0,
    "access_mode": pulsar.ProducerAccessMode.Exclusive,
    "send_timeout_millis": 0,
}


@pytest.fixture
def client(memory_pulsar: MemoryPulsar) -> Any:
    return memory_pulsar.client()


def forget(producer: Any) -> Any:
    """Return a producer as a plain client would have created it."""
    del producer._delaylevel_options
    return producer


def warned(call: Any) -> list[str]:
    """Return the texts of the warnings of a call, all of them for the line of the caller."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    assert all(each.category is UserWarning and each.filename == __file__ for each in seen)
    return [str(each.message) for each in seen]


# -- options of producers that our client created


@pytest.mark.parametrize("name", REFUSED)
def test_known_options_are_refused(memory_pulsar: MemoryPulsar, client: Any, name: str) -> None:
    producer = client.create_producer("orders", **{name: REFUSED[name]})
    with pytest.raises(UnsupportedOptionError, match=name):
        wrap(producer, client, partition_strategy=WEEK)
    assert memory_pulsar.admin.list_partitioned_topics("public/default") == []
    producer.send(b"works on")


@pytest.mark.parametrize("name", [name for name in REFUSED if name != "send_timeout_millis"])
def test_a_statement_does_not_hide_a_known_option(client: Any, name: str) -> None:
    producer = client.create_producer("orders", **{name: REFUSED[name]})
    stated = {**CONFIRMED, "access_mode": pulsar.ProducerAccessMode.Shared}
    with pytest.raises(UnsupportedOptionError, match=name):
        wrap(producer, client, partition_strategy=WEEK, **stated)


def test_known_options_are_inherited_without_a_warning(client: Any) -> None:
    options = {
        "compression_type": pulsar.CompressionType.LZ4,
        "send_timeout_millis": 7000,
        "max_pending_messages": 5,
        "block_if_queue_full": False,
        "batching_enabled": False,
        "batching_max_messages": 50,
        "batching_max_allowed_size_in_bytes": 4096,
        "batching_max_publish_delay_ms": 3,
        "properties": {"team": "a"},
    }
    producer = client.create_producer("orders", **options)
    wrapped: list[Any] = []
    assert warned(lambda: wrapped.append(wrap(producer, client, partition_strategy=WEEK))) == []
    settings = wrapped[0]._settings
    assert {name: settings[name] for name in options} == options


def test_statements_replace_known_settings(client: Any) -> None:
    producer = client.create_producer("orders", max_pending_messages=5, send_timeout_millis=0)
    wrapped = wrap(producer, client, max_pending_messages=7, send_timeout_millis=9000)
    settings = wrapped._settings
    assert (settings["max_pending_messages"], settings["send_timeout_millis"]) == (7, 9000)
    assert settings["block_if_queue_full"] is True  # the default of wrap()


# -- options of other producers


def test_the_broker_tells_access_mode_and_properties(client: Any) -> None:
    exclusive = client.create_producer(
        "orders", access_mode=pulsar.ProducerAccessMode.Exclusive, properties={"team": "a"}
    )
    with pytest.raises(UnsupportedOptionError, match="access_mode Exclusive"):
        wrap(
            forget(exclusive),
            client,
            **CONFIRMED,
            access_mode=pulsar.ProducerAccessMode.Shared,
        )
    exclusive.close()
    shared = forget(client.create_producer("orders", properties={"team": "a"}))
    assert wrap(shared, client, **CONFIRMED)._settings["properties"] == {"team": "a"}
    given = wrap(shared, client, **CONFIRMED, properties={"team": "b"})
    assert given._settings["properties"] == {"team": "b"}


def test_the_broker_tells_about_producers_of_all_partitions(
    memory_pulsar: MemoryPulsar, client: Any
) -> None:
    memory_pulsar.admin.create_partitioned(TopicName.parse("orders"), 3)
    producer = client.create_producer(
        "orders", access_mode=pulsar.ProducerAccessMode.ExclusiveWithFencing
    )
    with pytest.raises(UnsupportedOptionError, match="ExclusiveWithFencing"):
        wrap(forget(producer), client, **CONFIRMED)


def test_one_warning_names_everything_that_is_assumed(
    memory_pulsar: MemoryPulsar, client: Any
) -> None:
    memory_pulsar.admin.create_partitioned(TopicName.parse("orders"), 3)
    producer = forget(client.create_producer("orders"))
    (text,) = warned(lambda: wrap(producer, client, partition_strategy=WEEK))
    for part in (
        "cannot read",
        "persistent://public/default/orders: encryption_key, chunking_enabled, message_router.",
        "clear text",
        "confirm it with encryption_key=None, chunking_enabled=False, message_router=None",
    ):
        assert part in text
    assert "access_mode" not in text


def test_a_confirmation_silences_the_warning(memory_pulsar: MemoryPulsar, client: Any) -> None:
    memory_pulsar.admin.create_partitioned(TopicName.parse("orders"), 3)
    producer = forget(client.create_producer("orders"))
    assert warned(lambda: wrap(producer, client, **CONFIRMED)) == []
    for name in CONFIRMED:
        others = {key: value for key, value in CONFIRMED.items() if key != name}
        (text,) = warned(lambda others=others: wrap(producer, client, **others))  # type: ignore[misc]
        assert f"orders: {name}." in text
    settled = {"crypto_key_reader": None, "batching_enabled": True, "message_router": None}
    assert warned(lambda: wrap(producer, client, **settled)) == []


def test_a_router_has_no_choice_with_one_partition(client: Any) -> None:
    producer = forget(client.create_producer("single"))
    given = {"encryption_key": None, "chunking_enabled": False}
    assert warned(lambda: wrap(producer, client, **given)) == []


@pytest.mark.parametrize("known", [True, False])
def test_a_producer_of_one_partition(memory_pulsar: MemoryPulsar, client: Any, known: bool) -> None:
    memory_pulsar.admin.create_partitioned(TopicName.parse("orders"), 3)
    producer = client.create_producer("orders-partition-1")
    if not known:
        forget(producer)
    given = {"encryption_key": None, "chunking_enabled": False}
    (text,) = warned(lambda: wrap(producer, client, **given))
    assert "delayed messages may go to any partition" in text
    assert "message_router=None" in text
    assert warned(lambda: wrap(producer, client, **given, message_router=None)) == []


def test_without_the_admin_interface_the_access_mode_is_assumed() -> None:
    producer = SimpleNamespace(topic=lambda: "orders", producer_name=lambda: "a")
    options, warning = options_of(producer, CONFIRMED, None, lambda topic: [topic])
    assert options == CONFIRMED
    assert warning is not None
    assert "orders: access_mode." in warning
    assert "access_mode=pulsar.ProducerAccessMode.Shared" in warning
    stated = {**CONFIRMED, "access_mode": pulsar.ProducerAccessMode.Shared}
    assert options_of(producer, stated, None, lambda topic: [topic]) == (stated, None)


def test_an_unknown_option_is_refused_with_the_nearest_name(client: Any) -> None:
    producer = client.create_producer("orders")
    for wrong, right in (
        ("compresion_type", "compression_type"),
        ("partition_stategy", "partition_strategy"),
    ):
        with pytest.raises(TypeError, match=f"'{wrong}': did you mean '{right}'"):
            wrap(producer, client, **{wrong: None})
    with pytest.raises(TypeError, match="'delay_level_topics': did you mean 'delay_level_topic'"):
        client.create_producer("orders", enable_delay_level_topic=True, delay_level_topics="x")
    with pytest.raises(TypeError, match="'zzz'; the options are producer_name"):
        wrap(producer, client, zzz=None)


# -- producers and clients


def test_wrong_arguments_are_refused(client: Any) -> None:
    producer = client.create_producer("orders")
    wrapped = wrap(producer, client)
    for pair, text in (
        ((client, producer), "first argument is a client"),
        ((wrapped, client), "has a delay-level topic already"),
        ((producer, producer), "second argument is not a client"),
        ((None, client), "not a producer but of type NoneType"),
        ((producer, None), "not a client but of type NoneType"),
        ((b"orders", client), "not a producer but of type bytes"),
    ):
        with pytest.raises(InvalidInputError, match=text):
            wrap(*pair)


def test_asyncio_belongs_to_the_asyncio_wrap(client: Any) -> None:
    producer = client.create_producer("orders")
    aio = pulsar.asyncio.Producer(producer._producer, producer._schema)
    with pytest.raises(InvalidInputError, match=r"delaylevel\.asyncio\.wrap"):
        wrap(aio, client)
    with pytest.raises(InvalidInputError, match=r"delaylevel\.asyncio\.wrap"):
        wrap(producer, pulsar.asyncio.Client.__new__(pulsar.asyncio.Client))


def test_a_closed_producer_is_refused(memory_pulsar: MemoryPulsar, client: Any) -> None:
    producer = client.create_producer("orders")
    producer.close()
    with pytest.raises(pulsar.AlreadyClosed, match="create a new one"):
        wrap(producer, client)
    assert memory_pulsar.admin.list_partitioned_topics("public/default") == []


def test_a_producer_that_is_not_connected_is_not_closed() -> None:
    connected = threading.Event()
    flushes: list[Any] = [lambda: None, connected.wait]
    producer = SimpleNamespace(
        topic=lambda: "orders",
        is_connected=lambda: False,
        flush=lambda: flushes.pop(0)(),
    )
    client = SimpleNamespace(get_topic_partitions=None, create_producer=None)
    check_pair(producer, client)  # nothing to flush
    check_pair(producer, client)  # the answer comes later
    assert flushes == []
    connected.set()


def test_a_producer_of_another_cluster_is_refused() -> None:
    def native(url: str) -> Any:
        return SimpleNamespace(get_service_info=lambda: SimpleNamespace(service_url=url))

    def pair(theirs: Any, ours: Any) -> tuple[Any, Any]:
        return (
            SimpleNamespace(topic=lambda: "orders", _client=theirs),
            SimpleNamespace(get_topic_partitions=None, create_producer=None, _client=ours),
        )

    check_pair(*pair(native("pulsar://a:6650"), native("pulsar://a:6650")))
    check_pair(*pair(object(), object()))  # clients that do not tell the address
    with pytest.raises(InvalidInputError, match=r"pulsar://a:6650, and the client to pulsar://b"):
        check_pair(*pair(native("pulsar://a:6650"), native("pulsar://b:6650")))


def test_remembered_options_are_a_copy() -> None:
    options = {"properties": {"a": "b"}}
    producer = remember(SimpleNamespace(topic=lambda: "orders"), options)
    options["encryption_key"] = {}
    assert options_of(producer, {}, None, list) == ({"properties": {"a": "b"}}, None)


def test_wrap_accepts_clients_from_before_their_class_was_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    producer = object.__new__(pulsar.asyncio.Producer)
    client = object.__new__(pulsar.asyncio.Client)
    monkeypatch.setattr(pulsar.asyncio, "Client", delaylevel.asyncio.DelayLevelClient)
    monkeypatch.setattr(pulsar, "Client", delaylevel.DelayLevelClient)
    aio._check_pair(producer, client)
    with pytest.raises(InvalidInputError, match="swapped"):
        aio._check_pair(client, producer)
