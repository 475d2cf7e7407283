"""Tests of the steps around a call of the handler, with calls of the consumer that fail."""

from __future__ import annotations

from typing import Any

import pulsar
import pytest

from delaylevel.consumer import Backoff, ReceivedMessage
from delaylevel.consumer.deduplication import Deduplication
from delaylevel.consumer.handled_ids import HandledIds
from delaylevel.consumer.host import Parts, Unfinished
from delaylevel.consumer.listener import listeners_of
from support.fakes import HandClock

TOPIC = "persistent://public/default/orders"


class Raw:
    """A message of the client."""

    def __init__(self, name: str) -> None:
        self.name = name

    def properties(self) -> dict[str, str]:
        return {"delaylevel.id": self.name, "delaylevel.target": TOPIC}

    def partition_key(self) -> str:
        return ""


class ClosedFor:
    """A consumer that was closed before some of its messages are acknowledged."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.acknowledged: list[str] = []

    def acknowledge(self, raw: Raw) -> None:
        if raw.name in self.names:
            raise pulsar.AlreadyClosed
        self.acknowledged.append(raw.name)


class Scene:
    """The parts of a listener with deduplication."""

    def __init__(self) -> None:
        (listener,) = listeners_of(
            print, "orders", None, {"subscription": "billing", "retry": Backoff("1m")}
        )
        self.handled: HandledIds = Deduplication().open(None, TOPIC, "billing")
        nobody: Any = None
        clock = HandClock()
        unfinished = Unfinished(listener, nobody, clock, threaded=False)
        self.parts = Parts(listener, listener.handling(self.handled), unfinished, clock)
        self.tally = listener.stats.tally()

    def messages(self, *names: str) -> list[ReceivedMessage]:
        """Return newly received messages."""
        return [ReceivedMessage(Raw(name), TOPIC, "billing", 0) for name in names]

    def sorted(self, consumer: ClosedFor, *names: str) -> tuple[list[str], list[str]]:
        """Return the IDs for the handler, and those that wait."""
        batch, waiting = self.parts.sort(self.messages(*names), consumer, self.tally)
        return [each.id for each in batch], [each.id for each in waiting]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_ids_are_saved_although_an_acknowledgement_fails(scene: Scene) -> None:
    consumer = ClosedFor("a")
    batch, _ = scene.parts.sort(scene.messages("a", "b", "c"), consumer, scene.tally)
    with pytest.raises(pulsar.AlreadyClosed):
        scene.parts.succeeded(batch, consumer, scene.tally)
    assert consumer.acknowledged == ["b", "c"]
    assert scene.tally.handled == 3
    # They are delivered again, and recognised.
    assert scene.sorted(ClosedFor(), "a", "b", "c") == ([], [])
    assert scene.tally.duplicates == 3


def test_messages_wait_for_no_batch_that_was_given_up(scene: Scene) -> None:
    scene.parts.succeeded(
        scene.parts.sort(scene.messages("b"), ClosedFor(), scene.tally)[0], ClosedFor(), scene.tally
    )
    with pytest.raises(pulsar.AlreadyClosed):
        scene.sorted(ClosedFor("b"), "a", "b", "c")
    assert scene.sorted(ClosedFor(), "a", "b", "c") == (["a", "c"], [])
