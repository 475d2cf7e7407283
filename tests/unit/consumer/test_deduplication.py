"""Tests of the deduplication of handled messages, also of forwarded ones."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from delaylevel.consumer import (
    Deduplication,
    Listeners,
    ReceivedMessage,
    TopicIdStore,
    handled_ids,
)
from delaylevel.consumer.handled_ids import HandledIds, TopicIds, key_of, open_ids
from delaylevel.consumer.retry import Verdict
from delaylevel.errors import ClientError, InvalidInputError
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import MemoryPulsar
from support.world import eventually


def message(id_: str = "a", **values: Any) -> Any:
    """Return a received message, as far as deduplication looks at it."""
    return SimpleNamespace(id=id_, identity=id_, **values)


def opened(**options: Any) -> HandledIds:
    return open_ids(Deduplication(**options), None, "orders", "billing")


def handle(handled: HandledIds, each: Any) -> bool:
    """Handle a message with success; return False if it was handled before."""
    verdict = handled.begin(each)
    if verdict is Verdict.HANDLE:
        handled.save(each, lambda: None)
    return verdict is Verdict.HANDLE


# -- IDs


def test_texts_and_integers_are_different_ids() -> None:
    class Name(str):
        __slots__ = ()

    values = ["5", 5, -5, "-5", "\ud800", -(1 << 63), (1 << 63) - 1]
    assert len({key_of(value) for value in values}) == len(values)
    assert key_of(np.int64(7)) == 7
    assert key_of(Name("x")) == key_of("x")
    # Stored in files and topics: it must not change.
    assert key_of("order-4711") == 2685631818634700321


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "was None"),
        (1.0, "was 1.0"),
        (b"x", "was b'x'"),
        ("", "was ''"),
        (True, "was True"),
        (1 << 63, "an integer of 64 bits"),
        (-(1 << 63) - 1, "an integer of 64 bits"),
    ],
)
def test_a_wrong_id_is_an_error_and_leaves_no_claim(value: Any, text: str) -> None:
    handled = opened(by=lambda each: each.given)
    wrong = message(given=value)
    with pytest.raises(InvalidInputError, match=text):
        handled.begin(wrong)
    handled.release(wrong)
    assert len(handled) == 0
    assert handle(handled, message(given=1))


# -- handled messages


def test_a_message_is_handled_once_and_a_failed_one_again() -> None:
    handled = opened()
    first, other = message("a"), message("a")
    assert handled.begin(first) is Verdict.HANDLE
    handled.release(other)  # it has no claim
    assert handled.begin(other) is Verdict.WAIT
    assert handle(handled, message("b"))
    assert not handle(handled, message("b"))
    failing = message("c")
    assert handled.begin(failing) is Verdict.HANDLE
    handled.release(failing)
    assert handle(handled, message("c"))
    assert not handle(handled, message("c"))
    assert len(handled) == 2
    assert handled.flush(60)
    handled.close()


def test_the_second_message_waits_for_the_first() -> None:
    handled = opened()
    first, second = message(), message()
    assert handled.begin(first) is Verdict.HANDLE
    assert handled.begin(second) is Verdict.WAIT
    handled.release(first)
    assert handled.begin(second) is Verdict.HANDLE
    assert handled.begin(first) is Verdict.WAIT
    handled.save(second, lambda: None)
    assert handled.begin(first) is Verdict.DUPLICATE


def test_ids_that_a_topic_refuses_are_kept_as_far_as_they_are_remembered() -> None:
    with MemoryPulsar() as memory:
        options = Deduplication(capacity=4, store=TopicIdStore())
        handled = open_ids(options, memory.client(), "orders", "billing")
        memory.admin.terminate(TopicName.parse("orders-billing-handled").partition(0))
        assert all(handle(handled, message(str(number))) for number in range(9))
        assert isinstance(handled, TopicIds)
        assert handled.unsaved == 4


def test_a_store_that_cannot_be_opened_leaves_no_consumer() -> None:
    with MemoryPulsar() as memory:
        partition = TopicName.parse("orders-billing-handled").partition(0)
        options = Deduplication(store=TopicIdStore())
        open_ids(options, memory.client(), "orders", "billing").close()
        memory.admin.terminate(partition)
        with pytest.raises(ClientError, match="TopicTerminated"):
            open_ids(options, memory.client(), "orders", "billing")
        assert not memory.admin.partition_stats(partition).subscriptions["delaylevel"].consumers


def test_a_closed_client_ends_the_tries_to_store_ids(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The listeners were not closed before it."""
    monkeypatch.setattr(handled_ids, "has_core", lambda client: True)  # with threads
    with MemoryPulsar() as memory:
        client = memory.client()
        handled = TopicIds(Deduplication(store=TopicIdStore()), client, "orders", "billing")
        client.close()
        assert handle(handled, message("a"))
        eventually(lambda: not handled._threads[1].is_alive(), "the end of the writer")
        assert handle(handled, message("b"))
        start_s = time.monotonic()
        handled.close()
        assert time.monotonic() - start_s < 10
    assert "2 IDs of handled messages could not be stored" in caplog.text


NOW, HOUR = timedelta(0), timedelta(hours=1)
BODIES = [b"1", b"2", b"3"]


@pytest.fixture
def app(memory_pulsar: MemoryPulsar) -> Iterator[Listeners]:
    app = Listeners(memory_pulsar.client())
    yield app
    app.close()


@pytest.mark.parametrize("deduplicate", [False, True])
@pytest.mark.parametrize("failures", [0, 2])
@pytest.mark.parametrize("to", ["orders", "invoices"])
def test_each_of_several_forwarded_messages_is_handled(
    memory_pulsar: MemoryPulsar, app: Listeners, deduplicate: bool, failures: int, to: str
) -> None:
    """They have all properties of a delayed message that was retried."""
    client = memory_pulsar.client()
    producer = client.create_producer("orders", enable_delay_level_topic=True)
    producer.send(b"order", {"kind": "order"}, deliver_after=HOUR, message_id="7")
    plain = client.create_producer(to)
    calls: Counter[tuple[bytes, int, str]] = Counter()

    def handle(message: ReceivedMessage) -> None:
        if message.data == b"order":
            if message.attempt == 1:
                raise ValueError("not now")
            for body in BODIES:
                plain.send(body, message.raw.properties())
            return
        calls[message.data, message.attempt, message.id] += 1
        assert message.properties == {"kind": "order"}
        assert message.attempt > 1 or message.first_published_ms == message.publish_ms
        if message.attempt <= failures:
            raise ValueError("not now")

    for topic in {"orders", to}:
        options = {"retry": ["1m", "1m"], "deduplicate": deduplicate}
        app.on(topic, subscription="billing", name=topic, **options)(handle)
    memory_pulsar.advance(2 * HOUR)
    ids = {body: own_id for body, _, own_id in calls}
    assert len(set(ids.values())) == len(BODIES)
    attempts = range(1, failures + 2)
    assert calls == {(body, attempt, ids[body]): 1 for body in BODIES for attempt in attempts}


def test_one_id_on_several_keys_is_several_messages(
    memory_pulsar: MemoryPulsar, app: Listeners
) -> None:
    bodies: list[bytes] = []
    app.on("orders", subscription="billing", deduplicate=True)(lambda one: bodies.append(one.data))
    producer = memory_pulsar.client().create_producer("orders", enable_delay_level_topic=True)
    for after in (None, NOW, HOUR):
        for key in (None, "a", "b"):
            producer.send(f"{key}".encode(), partition_key=key, deliver_after=after, message_id="7")
    memory_pulsar.advance(2 * HOUR)
    # Whichever way they took, the copies of one message are handled once.
    assert sorted(bodies) == [b"None", b"a", b"b"]


def test_the_attempts_of_messages_with_the_longest_ids_are_not_copies(
    memory_pulsar: MemoryPulsar, app: Listeners
) -> None:
    calls: Counter[tuple[bytes, int]] = Counter()

    def handle(message: ReceivedMessage) -> None:
        calls[message.data, message.attempt] += 1
        if message.attempt < 3:
            raise ValueError("not now")

    app.on("orders", subscription="billing", retry=["1m", "1m"], deduplicate=True)(handle)
    producer = memory_pulsar.client().create_producer("orders", enable_delay_level_topic=True)
    for letter in "xy":
        producer.send(letter.encode(), message_id=letter * 512, deliver_after=HOUR)
    memory_pulsar.advance(2 * HOUR)
    assert calls == {(body, attempt): 1 for body in (b"x", b"y") for attempt in (1, 2, 3)}
