"""Helpers that the tests of publisher faults share."""

from __future__ import annotations

from typing import Any

import pulsar
import pytest
from pulsar.schema import BytesSchema

from delaylevel.cluster.publisher import BULK_SETTINGS, Publisher
from delaylevel.cluster.rest.admin import Admin
from delaylevel.model.message import ParkedMessage
from delaylevel.model.topic_name import TopicName
from support.world import stored_messages

MESSAGES = 3000


def messages(first: int, count: int) -> list[ParkedMessage]:
    return [
        ParkedMessage(1, number, -1, 0, "", "", 0, {"n": str(number)}, b"x" * 100)
        for number in range(first, first + count)
    ]


def send(publisher: Publisher[Any], first: int, count: int) -> set[str]:
    for message in messages(first, count):
        publisher.send(message, message.properties, None)
    return {str(number) for number in range(first, first + count)}


def stored(client: Any, admin: Admin, topic: TopicName) -> set[str]:
    return {message.properties["n"] for message in stored_messages(client, admin, topic.full)}


def kept_topic(client: Any, name: str) -> TopicName:
    client.subscribe(name, "keep").close()
    return TopicName.parse(name)


@pytest.fixture
def publisher(client: pulsar.Client, namespace: str) -> Publisher[Any]:
    name = f"persistent://{namespace}/out"
    client.subscribe(name, "keep").close()
    return Publisher(client.create_producer(name, schema=BytesSchema(), **BULK_SETTINGS), bulk=True)
