"""Tests of listeners on messages that a plain producer forwards with all their properties.

Such messages have the ID and the retry properties of another message. They are new messages, and
none of them stands for another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from delaylevel.consumer import Backoff, Listeners, ReceivedMessage
from delaylevel.testing import MemoryPulsar

NOW, HOUR = timedelta(0), timedelta(hours=1)
BODIES = [b"1", b"2", b"3"]


@pytest.fixture
def app(memory_pulsar: MemoryPulsar) -> Iterator[Listeners]:
    app = Listeners(memory_pulsar.client())
    yield app
    app.close()


class Failing:
    """A handler whose first attempts fail."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.calls: Counter[tuple[bytes, int]] = Counter()
        self.ids: set[str] = set()

    def __call__(self, message: ReceivedMessage) -> None:
        self.calls[message.data, message.attempt] += 1
        self.ids.add(message.id)
        if message.attempt <= self.failures:
            raise ValueError("not now")


def released(memory: MemoryPulsar) -> Any:
    """Return a message of ``orders`` that a dispatcher has released."""
    client = memory.client()
    consumer = client.subscribe("orders", "app")
    producer = client.create_producer("orders", enable_delay_level_topic=True)
    producer.send(b"order", {"kind": "order"}, deliver_after=HOUR, message_id="7")
    memory.advance(2 * HOUR)
    return consumer.receive()


@pytest.mark.parametrize("deduplicate", [False, True])
@pytest.mark.parametrize("failures", [0, 2])
def test_each_of_several_forwarded_messages_is_handled(
    memory_pulsar: MemoryPulsar, app: Listeners, deduplicate: bool, failures: int
) -> None:
    handler = Failing(failures)
    options = {"retry": Backoff("1m", "1m"), "deduplicate": deduplicate}
    app.on("invoices", subscription="billing", **options)(handler)
    properties = released(memory_pulsar).properties()
    plain = memory_pulsar.client().create_producer("invoices")
    for body in BODIES:
        plain.send(body, properties)
    memory_pulsar.advance(HOUR)
    attempts = range(1, failures + 2)
    assert handler.calls == {(body, attempt): 1 for body in BODIES for attempt in attempts}
    assert len(handler.ids) == len(BODIES)


def test_one_id_on_several_keys_is_several_messages(
    memory_pulsar: MemoryPulsar, app: Listeners
) -> None:
    handler = Failing(0)
    app.on("orders", subscription="billing", deduplicate=True)(handler)
    producer = memory_pulsar.client().create_producer("orders", enable_delay_level_topic=True)
    for after in (None, NOW, HOUR):
        for key in (None, "a", "b"):
            body = f"{key}".encode()
            producer.send(body, partition_key=key, deliver_after=after, message_id="7")
    memory_pulsar.advance(2 * HOUR)
    # Whichever way they took, the copies of one message are handled once.
    assert handler.calls == {(b"None", 1): 1, (b"a", 1): 1, (b"b", 1): 1}
