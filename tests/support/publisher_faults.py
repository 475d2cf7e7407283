"""Helpers that the tests of publisher faults share."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pulsar
import pytest

from delaylevel.cluster.own_producers import OwnProducers
from delaylevel.cluster.rest.admin import Admin
from delaylevel.cluster.targets.send_state import SendOutcome
from delaylevel.model.message import ParkedMessage
from delaylevel.model.topic_name import TopicName
from support.world import eventually, stored_messages

MESSAGES = 3000


def messages(first: int, count: int) -> list[ParkedMessage]:
    return [
        ParkedMessage(1, number, -1, 0, "", "", 0, {"n": str(number)}, b"x" * 100)
        for number in range(first, first + count)
    ]


class Outlet:
    """A topic of our own, and the outcomes of the messages that were sent to it.

    Attributes:
        outcomes: the outcome of each message, by its number.
    """

    def __init__(self, client: Any, topic: str) -> None:
        self.topic = kept_topic(client, topic)
        self.own: OwnProducers[ParkedMessage] = OwnProducers(client, "")
        self.outcomes: dict[str, SendOutcome] = {}

    def send(self, *sent: ParkedMessage) -> None:
        for message in sent:
            assert not self.own.send(message, self.topic.full, message, message.properties, None)

    def settle(self) -> None:
        """Wait until each message has an outcome."""
        eventually(self._settled, "all messages have an outcome", 60)

    def _settled(self) -> bool:
        self.own.flush()
        for sent, outcome, _ in self.own.poll():
            self.outcomes[sent.item.properties["n"]] = outcome
        return not self.own.load[0]

    @property
    def confirmed(self) -> set[str]:
        """The numbers of the messages that are stored, as far as is known."""
        return {n for n, outcome in self.outcomes.items() if outcome is SendOutcome.STORED}


def stored(client: Any, admin: Admin, topic: TopicName) -> set[str]:
    return {message.properties["n"] for message in stored_messages(client, admin, topic.full)}


def kept_topic(client: Any, name: str) -> TopicName:
    client.subscribe(name, "keep").close()
    return TopicName.parse(name)


@pytest.fixture
def outlet(client: pulsar.Client, namespace: str) -> Any:
    made = Outlet(client, f"persistent://{namespace}/out")
    with closing(made.own):
        yield made
