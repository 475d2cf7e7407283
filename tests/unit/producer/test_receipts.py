"""Tests of the arguments of cancellations, and of failures to send them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pulsar
import pulsar.asyncio
import pytest

from delaylevel import Receipt, topics
from delaylevel.errors import CancellationFailedError, InvalidInputError
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.outcome import place_of
from delaylevel.model.position import Position
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from delaylevel.producer.client_calls import client_errors
from delaylevel.producer.receipts import explained, receipt_for
from delaylevel.testing import MemoryPulsar
from support.fakes import FakeMessageId

ORDERS = "persistent://public/default/orders"
LEVELS = Levels(PartitionStrategy(partition_by=PartitionBy.DAY, maximum_delay=timedelta(days=7)))
FAR = timedelta(days=2, minutes=5)
RECEIPT = Receipt("old", 1_900_000_000_000, ORDERS, f"{ORDERS}-delay-level")


@pytest.fixture
def producer(memory_pulsar: MemoryPulsar) -> Any:
    """A producer whose level topic allows cancellations."""
    description = LevelTopicDescription(f"{ORDERS}-delay-level", LEVELS, (ORDERS,))
    topics.create(memory_pulsar.admin, description)
    return memory_pulsar.client().create_producer(ORDERS, enable_delay_level_topic=True)


def stored(memory_pulsar: MemoryPulsar) -> int:
    """Return the number of messages that were sent."""
    return len(memory_pulsar.pending(ORDERS)) + len(memory_pulsar.delivered(ORDERS))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "name the message"),
        ({"message_id": "x"}, "name the message"),
        ({"deliver_at": 1_900_000_000_000}, "name the message"),
        ({"message_id": "x", "deliver_at": 0}, "is no due time"),
        ({"message_id": "x", "deliver_at": 1_900_000_000}, "multiply seconds"),
        ({"message_id": "", "deliver_at": 1_900_000_000_000}, "1 to 512"),
        ({"message_id": "x", "deliver_at": "soon"}, "deliver_at is milliseconds"),
        (
            {"message_id": "x", "deliver_at": 1_900_000_000_000, "partition_key": 7},
            "partition_key is a str",
        ),
        ({"receipt": 7}, "a receipt is a Receipt or its text"),
        ({"receipt": "x"}, "is not a receipt"),
        ({"receipt": "x", "message_id": "y"}, "both given"),
    ],
)
def test_wrong_arguments_are_refused(
    memory_pulsar: MemoryPulsar, producer: Any, arguments: Any, expected: str
) -> None:
    with pytest.raises(InvalidInputError, match=expected):
        producer.cancel(**arguments)
    assert stored(memory_pulsar) == 0


@pytest.mark.parametrize("timeout", [-1, timedelta(seconds=-1), "1", True, float("nan")])
def test_a_wrong_timeout_is_refused(
    memory_pulsar: MemoryPulsar, producer: Any, timeout: Any
) -> None:
    receipt = producer.schedule(b"x", deliver_after=FAR)
    with pytest.raises(InvalidInputError, match="give a timedelta or seconds"):
        producer.cancel(receipt, timeout=timeout)
    with pytest.raises(InvalidInputError, match="give a timedelta or seconds"):
        producer.fire_now(receipt, timeout=timeout)
    assert stored(memory_pulsar) == 1


# -- failures to send


def raised(error: Exception, new: Receipt | None = None) -> Any:
    """Return the error that a caller gets if the sending of a cancellation fails."""
    try:
        with client_errors(), explained(RECEIPT, new):
            raise error
    except Exception as found:
        return found


@pytest.mark.parametrize("name", ["Timeout", "AlreadyClosed", "ConnectError", "NotConnected"])
def test_an_unknown_result_is_not_called_a_refusal(name: str) -> None:
    result = getattr(pulsar.Result, name)
    plain = getattr(pulsar, name)(f"Pulsar error: {name}")
    for error in (plain, pulsar.asyncio.PulsarException(result, "text")):
        found = raised(error)
        assert isinstance(found, CancellationFailedError)
        assert isinstance(found, type(plain))
        assert isinstance(found, pulsar.asyncio.PulsarException)
        assert found.error() == result
        assert "it is not known if the cancellation of message 'old' was stored" in str(found)
        assert "twice does no harm" in str(found)
        assert found.transient
        assert found.receipt == ""
        assert found.__cause__ is error


def test_a_failed_cancellation_of_a_reschedule_leaves_the_new_message(
    memory_pulsar: MemoryPulsar, producer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipt = producer.schedule(b"old", deliver_after=FAR)
    partition_of = producer._partition
    stored_bodies = []

    class Failing:
        def send(self, body: bytes, arguments: Any) -> Any:
            stored_bodies.append(body)
            raise pulsar.Timeout("Pulsar error: Timeout")

    def partition(route: Any) -> Any:
        return Failing() if "delaylevel.kind" in route.properties else partition_of(route)

    monkeypatch.setattr(producer, "_partition", partition)
    with pytest.raises(pulsar.Timeout, match="its receipt is dl1") as caught:
        producer.reschedule(receipt, b"new", deliver_after=2 * FAR)
    assert stored_bodies == [b"cancel"]
    new = Receipt.parse(caught.value.receipt)  # type: ignore[attr-defined]
    bodies = {
        message.properties["delaylevel.id"]: message.data
        for message in memory_pulsar.pending(ORDERS)
    }
    assert bodies == {receipt.id: b"old", new.id: b"new"}
    monkeypatch.undo()
    assert producer.cancel(receipt).status == "accepted"
    assert producer.cancel(new).status == "accepted"


def test_nothing_is_cancelled_if_the_new_message_is_not_stored(
    memory_pulsar: MemoryPulsar, producer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipt = producer.schedule(b"old", deliver_after=FAR)
    sent = []

    class Failing:
        def send(self, body: bytes, arguments: Any) -> Any:
            sent.append(body)
            raise pulsar.Timeout("Pulsar error: Timeout")

    monkeypatch.setattr(producer, "_partition", lambda route: Failing())
    with pytest.raises(pulsar.Timeout) as caught:
        producer.reschedule(receipt, b"new", deliver_after=2 * FAR)
    assert sent == [b"new"]
    assert not isinstance(caught.value, CancellationFailedError)


# -- positions


def test_a_message_is_read_back_by_its_key_too() -> None:
    """One ID on two keys is two messages, which may be in one entry."""
    with MemoryPulsar() as memory:
        producer = memory.client().create_producer(
            "orders", enable_delay_level_topic=True, batching_enabled=True
        )
        due_ms = memory.clock.now_ms() + 3 * 86_400_000
        stored: list[Any] = []
        for key in ("a", "b"):
            producer.send_async(
                f"for {key}".encode(),
                lambda _, place: stored.append(place),
                deliver_at=due_ms,
                message_id="order-7",
                partition_key=key,
            )
        producer.flush()
        first = stored[0]
        assert (first.ledger_id(), first.entry_id()) == (
            stored[1].ledger_id(),
            stored[1].entry_id(),
        )
        topic = producer.description.level_topic(0).partition(2).full
        place = place_of(topic, first.ledger_id(), first.entry_id())
        receipt = Receipt(
            "order-7",
            due_ms,
            producer.description.targets[0],
            producer.description.topic,
            "b",
            place,
        )
        producer.reschedule(receipt, deliver_after=timedelta(days=1))
        memory.advance(timedelta(days=4))
        assert [message.data for message in memory.delivered("orders")] == [b"for b", b"for a"]


@pytest.mark.parametrize(
    ("topic", "position", "expected"),
    [
        (f"{ORDERS}-delay-level-partition-3", (7, 8, 2), "orders-delay-level-partition-3:7:8"),
        # A topic with deduplication may answer so.
        (f"{ORDERS}-delay-level-partition-3", (-1, -1, -1), ""),
        (None, (7, 8, -1), "orders:7:8"),
        (None, (-1, -1, -1), ""),
    ],
)
def test_the_place_of_a_receipt(
    topic: str | None, position: tuple[int, int, int], expected: str
) -> None:
    stored_at = FakeMessageId(Position(*position))
    found = receipt_for("id", 1, ORDERS, RECEIPT.level_topic, None, topic, stored_at)
    assert found.stored_at == (expected and f"public/default/{expected}")
    assert found.sent_directly == (topic is None)
    assert Receipt.parse(str(found)) == found
    assert found.key == ""
