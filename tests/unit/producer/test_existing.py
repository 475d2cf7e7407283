"""Tests of wrap(): options that are given, assumed or refused, and the warnings of a producer."""

from __future__ import annotations

import asyncio
import warnings
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pulsar
import pulsar.asyncio
import pytest

import delaylevel.asyncio
from delaylevel import WrapWarning, wrap
from delaylevel.errors import BrokerUnreachableError, InvalidInputError, UnsupportedOptionError
from delaylevel.model.level_topic import SUBSCRIPTION
from delaylevel.model.topic_name import TopicName
from delaylevel.producer import client as producer_client
from delaylevel.producer import setup
from delaylevel.producer.client import check_pair
from delaylevel.testing import MemoryPulsar
from delaylevel.topics import describe
from support.fakes import PartTimeAdmin

ORDERS = TopicName.parse("orders")
#: Options that are refused, and what is said besides the name: the reason, or the remedy.
REFUSED: dict[str, tuple[Any, str]] = {
    "encryption_key": ("k", "decrypt"),
    "crypto_key_reader": (pulsar.CryptoKeyReader("public.pem", "private.pem"), "decrypt"),
    "chunking_enabled": (True, "below the broker's limit"),
    "message_router": (lambda message, count: 0, "give a partition_key"),
    "access_mode": (pulsar.ProducerAccessMode.Exclusive, "lock out the mover.*use Shared"),
    "send_timeout_millis": (0, r"too late; set it to at most the lead \(10m\)"),
}


@pytest.fixture
def client(memory_pulsar: MemoryPulsar) -> Any:
    return memory_pulsar.client()


@pytest.fixture(autouse=True)
def new_process() -> None:
    """No warning was given before."""
    producer_client.warn_of_assumptions.cache_clear()


def warned(call: Any) -> list[str]:
    """Return the texts of the warnings of a call, all of them for the line of the caller."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    assert all(each.category is WrapWarning and each.filename == __file__ for each in seen)
    return [str(each.message) for each in seen]


# -- options


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_delayed_messages_cannot_keep_are_refused(
    memory_pulsar: MemoryPulsar, client: Any, name: str
) -> None:
    producer = client.create_producer("orders")
    value, said = REFUSED[name]
    with pytest.raises(UnsupportedOptionError, match=f"{name}.*{said}"):
        wrap(producer, client, plain_producer=True, **{name: value})
    producer.send(b"works on")
    with pytest.raises(UnsupportedOptionError, match=f"{name}.*{said}"):
        client.create_producer("others", enable_delay_level_topic=True, **{name: value})
    assert memory_pulsar.admin.list_partitioned_topics("public/default") == []


def test_options_are_those_of_level_producers(client: Any) -> None:
    options = {"compression_type": pulsar.CompressionType.LZ4, "max_pending_messages": 5}
    options |= {"batching_max_messages": 50, "properties": {"team": "a"}}
    producer = client.create_producer("orders")
    settings = wrap(producer, client, **options)._setup.level_settings
    assert settings.items() >= options.items()
    assert wrap(producer, client)._setup.level_settings["block_if_queue_full"] is True


def test_a_process_is_warned_once_of_what_is_assumed(client: Any) -> None:
    producer = client.create_producer("orders")
    assert warned(lambda: wrap(producer, client, plain_producer=True)) == []
    (text,) = warned(lambda: wrap(producer, client))
    assert "plain_producer=True" in text
    assert warned(lambda: wrap(producer, client)) == []


def test_an_unknown_option_is_refused_by_its_name(client: Any) -> None:
    producer = client.create_producer("orders")
    with pytest.raises(TypeError, match="'partition_stategy'"):
        wrap(producer, client, partition_stategy=None)
    with pytest.raises(TypeError, match="'delay_level_topics'"):
        client.create_producer("orders", enable_delay_level_topic=True, delay_level_topics="x")


# -- producers and clients


def test_the_admin_interface_of_admin_url_is_closed_with_the_producer(
    memory_pulsar: MemoryPulsar, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Mock(wraps=memory_pulsar.admin, close=Mock())
    monkeypatch.setattr(producer_client, "admin_for", lambda *_: own)
    monkeypatch.setattr(type(client), "admin", None)
    wrapped = wrap(client.create_producer("orders"), client, admin_url="http://one:8080")
    own.close.assert_not_called()
    wrapped.close()
    own.close.assert_called_once()

    async def use() -> None:
        aio = memory_pulsar.asyncio_client()
        monkeypatch.setattr(type(aio), "admin", None)
        plain = await aio.create_producer("orders")
        wrapped = await delaylevel.asyncio.wrap(plain, aio, admin_url="http://one:8080")
        await wrapped.close()

    asyncio.run(use())
    assert own.close.call_count == 2


def test_wrong_arguments_are_refused(client: Any) -> None:
    producer = client.create_producer("orders")
    wrapped = wrap(producer, client)
    for pair, text in (
        ((client, producer), "give wrap.. a producer, then the client"),
        ((wrapped, client), "has a delay-level topic already"),
        ((producer, producer), "give wrap.. a producer, then the client"),
        ((None, client), "give wrap.. a producer, then the client"),
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


def test_a_producer_of_another_cluster_is_refused() -> None:
    def pair(theirs: str, ours: str) -> tuple[Any, Any]:
        a, b = (
            SimpleNamespace(get_service_info=lambda url=url: SimpleNamespace(service_url=url))
            for url in (theirs, ours)
        )
        client = SimpleNamespace(create_producer=print, _client=b)
        return SimpleNamespace(send=print, _client=a), client

    check_pair(*pair("pulsar://a:6650", "pulsar://a:6650"))
    with pytest.raises(InvalidInputError, match=r"pulsar://a:6650, and the client to pulsar://b"):
        check_pair(*pair("pulsar://a:6650", "pulsar://b:6650"))


@pytest.mark.parametrize(
    ("served", "away", "warnings"), [(0, False, 2), (2, False, 1), (3, False, 0), (0, True, 0)]
)
def test_a_missing_mover_or_dispatcher_is_named_once(
    memory: MemoryPulsar,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    served: int,
    away: bool,
    warnings: int,
) -> None:
    monkeypatch.setattr(setup, "_looked", set())
    monkeypatch.setattr(setup, "LOOK_AFTER_S", 0.0)
    description = describe(memory.admin, "orders")
    for topic in ("", "-hour", "-window")[:served]:
        memory.client().subscribe(description.topic + topic, SUBSCRIPTION)
    admin: Any = PartTimeAdmin(memory.admin)
    admin.failure = BrokerUnreachableError("away") if away else None
    thread = setup.warn_if_undelivered(admin, "orders", description)
    assert thread is not None
    assert setup.warn_if_undelivered(admin, "orders", description) is None, "once in a process"
    thread.join(60)
    assert len(caplog.records) == warnings
