"""Tests of listeners on messages that a plain producer forwards with all their properties.

Such messages have the ID and the retry properties of another message. They are new messages, and
none of them stands for another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

import pytest

from delaylevel.consumer import Listeners, ReceivedMessage
from delaylevel.testing import MemoryPulsar

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
