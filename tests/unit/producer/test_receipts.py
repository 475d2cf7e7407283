"""Tests of the arguments of cancellations, and of failures to send them."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pulsar
import pulsar.asyncio
import pytest

from delaylevel import Receipt
from delaylevel.errors import CancellationFailedError, InvalidInputError
from delaylevel.model.outcome import place_of
from delaylevel.model.position import Position
from delaylevel.producer.client_calls import client_errors
from delaylevel.producer.receipts import explained
from delaylevel.testing import MemoryPulsar
from support.fakes import FakeMessageId

ORDERS = "persistent://public/default/orders"
FAR = timedelta(days=2, minutes=5)
AT = 1_900_000_000_000
RECEIPT = Receipt("old", AT, ORDERS, "persistent://public/default/_orders-delay-level")


@pytest.fixture
def producer(memory_pulsar: MemoryPulsar) -> Any:
    return memory_pulsar.client().create_producer(
        ORDERS, enable_delay_level_topic=True, batching_enabled=True
    )


def pending(memory_pulsar: MemoryPulsar) -> dict[str, bytes]:
    """Return the bodies of pending messages by ID."""
    found = memory_pulsar.pending(ORDERS)
    return {message.properties["delaylevel.id"]: message.data for message in found}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "name the message"),
        ({"message_id": "x"}, "name the message"),
        ({"deliver_at": AT}, "name the message"),
        ({"message_id": "x", "deliver_at": 0}, "is no due time"),
        ({"message_id": "x", "deliver_at": AT // 1000}, "multiply seconds"),
        ({"message_id": "", "deliver_at": AT}, "1 to 512"),
        ({"message_id": "x", "deliver_at": "soon"}, "deliver_at is milliseconds"),
        ({"message_id": "x", "deliver_at": AT, "partition_key": 7}, "partition_key is a str"),
        ({"receipt": 7}, "a receipt is a Receipt or its text"),
        ({"receipt": "x"}, "is not a receipt"),
        ({"receipt": "x", "message_id": "y"}, "both given"),
        *(
            ({"receipt": RECEIPT, "timeout": wrong}, "give a timedelta or seconds")
            for wrong in (-1, timedelta(seconds=-1), "1", True, float("nan"))
        ),
    ],
)
def test_wrong_arguments_are_refused(
    memory_pulsar: MemoryPulsar, producer: Any, arguments: Any, expected: str
) -> None:
    calls = (
        [producer.cancel] if "timeout" not in arguments else [producer.cancel, producer.fire_now]
    )
    for call in calls:
        with pytest.raises(InvalidInputError, match=expected):
            call(**arguments)
    assert memory_pulsar.pending(ORDERS) == memory_pulsar.delivered(ORDERS) == []


# -- failures to send


@pytest.mark.parametrize("name", ["Timeout", "AlreadyClosed", "ConnectError", "NotConnected"])
def test_an_unknown_result_is_not_called_a_refusal(name: str) -> None:
    result = getattr(pulsar.Result, name)
    plain = getattr(pulsar, name)(f"Pulsar error: {name}")
    for error in (plain, pulsar.asyncio.PulsarException(result, "text")):
        expected = pytest.raises(CancellationFailedError)
        with expected as caught, client_errors(), explained(RECEIPT, None):
            raise error
        found: Any = caught.value
        assert isinstance(found, type(plain))
        assert isinstance(found, pulsar.asyncio.PulsarException)
        assert "it is not known if the cancellation of message 'old' was stored" in str(found)
        assert "twice does no harm" in str(found)
        assert (found.error(), found.transient, found.receipt) == (result, True, "")
        assert found.__cause__ is error


@pytest.mark.parametrize("failing", [b"new", b"cancel"])
def test_a_failed_reschedule_loses_no_message(
    memory_pulsar: MemoryPulsar, producer: Any, monkeypatch: pytest.MonkeyPatch, failing: bytes
) -> None:
    receipt = producer.schedule(b"old", deliver_after=FAR)
    partition_of, sent = producer._partition, []

    class Partition:
        def __init__(self, route: Any) -> None:
            self._partition = partition_of(route)

        def send(self, body: bytes, arguments: Any) -> Any:
            sent.append(body)
            if body == failing:
                raise pulsar.Timeout("Pulsar error: Timeout")
            return self._partition.send(body, arguments)

    monkeypatch.setattr(producer, "_partition", Partition)
    with pytest.raises(pulsar.Timeout) as caught:
        producer.reschedule(receipt, b"new", deliver_after=2 * FAR)
    monkeypatch.undo()
    if failing == b"new":
        assert sent == [b"new"], "nothing is cancelled"
        assert not isinstance(caught.value, CancellationFailedError)
        return
    assert "its receipt is dl1" in str(caught.value)
    new = Receipt.parse(caught.value.receipt)  # type: ignore[attr-defined]
    assert pending(memory_pulsar) == {receipt.id: b"old", new.id: b"new"}
    for each in (receipt, new):
        assert producer.cancel(each).status == "accepted"


# -- positions


def test_a_message_is_read_back_by_its_key_too(memory_pulsar: MemoryPulsar, producer: Any) -> None:
    """One ID on two keys is two messages, which may be in one entry."""
    due_ms = memory_pulsar.clock.now_ms() + 3 * 86_400_000
    stored: list[Any] = []
    for key in ("a", "b"):
        arguments = {"deliver_at": due_ms, "message_id": "order-7", "partition_key": key}
        body = f"for {key}".encode()
        producer.send_async(body, lambda _, place: stored.append(place), **arguments)
    producer.flush()
    at, other = ((place.ledger_id(), place.entry_id()) for place in stored)
    assert at == other
    described = producer.description
    place = place_of(described.level_topic(0).partition(2).full, *at)
    receipt = Receipt("order-7", due_ms, described.targets[0], described.topic, "b", place)
    producer.reschedule(receipt, deliver_after=timedelta(days=1))
    memory_pulsar.advance(timedelta(days=4))
    assert [message.data for message in memory_pulsar.delivered(ORDERS)] == [b"for b", b"for a"]


def test_a_topic_with_deduplication_may_tell_no_position(
    producer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = FakeMessageId(Position(-1, -1, -1))
    silent = SimpleNamespace(send=lambda *_: nowhere)
    monkeypatch.setattr(producer, "_partition", lambda route: silent)
    monkeypatch.setattr(producer._business, "send", lambda *_, **__: nowhere)
    for after in (FAR, timedelta(0)):
        found = producer.schedule(b"x", deliver_after=after)
        assert (found.stored_at, found.sent_directly) == ("", not after)
        assert Receipt.parse(str(found)) == found
