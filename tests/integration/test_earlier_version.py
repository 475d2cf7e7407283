"""Test that today's code delivers, on a real broker, the messages that commit 9205e8a stored."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pulsar
import pytest
import urllib3
from pulsar.schema import AvroSchema, BytesSchema, Integer, JsonSchema, Record, String, StringSchema

from background import Serving
from delaylevel import topics
from delaylevel.cluster.connection import Connection
from delaylevel.dispatcher import Dispatcher, DispatchSettings
from delaylevel.inspection import Inspector
from delaylevel.model import envelope as env
from delaylevel.model.clock import duration_ms
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Role
from delaylevel.model.message import ParkedMessage
from delaylevel.mover.dead_letters import dead_letters
from earlier import LEVEL_TOPICS, NAMESPACE, EarlierLevelTopic
from world import RealWorld

pytestmark = pytest.mark.broker

# Every recorded message is due by then.
LATER = timedelta(days=400)


class Order(Record):
    """The schema of the recorded payloads, as the recorder declares it."""

    number = Integer()
    text = String()


SCHEMAS: Mapping[str, Any] = {
    "orders": BytesSchema(),
    "json": JsonSchema(Order),
    "avro": AvroSchema(Order),
    "text": StringSchema(),
    "bills": BytesSchema(),
    "gone": BytesSchema(),
    "ticks": BytesSchema(),
}


@pytest.fixture
def earlier(connection: Connection) -> Iterator[RealWorld]:
    """The broker with everything that the earlier version had stored."""
    url = f"{connection.admin_url}/admin/v2/namespaces/{NAMESPACE}"
    assert urllib3.request("PUT", url).status == 204
    try:
        with contextlib.ExitStack() as stack:
            world = RealWorld(connection, stack, NAMESPACE)
            for name, schema in SCHEMAS.items():
                world.plain_client.create_producer(world.topic(name), schema=schema).close()
            for stored in LEVEL_TOPICS.values():
                store(world, stored)
            yield world
    finally:
        urllib3.request("DELETE", url, fields={"force": "true"})


def store(world: RealWorld, stored: EarlierLevelTopic) -> None:
    """Create the topics of a level topic, and publish the messages that they had.

    The journal refers to positions in another window topic, so its records are left out.
    """
    for each in stored.members:
        member = each.member
        world.admin.create_partitioned(member.topic, member.partitions, each.properties)
        topics.subscriptions.subscribe(world.admin, member)
        if member.role is Role.JOURNAL:
            continue
        for index, messages in enumerate(each.messages):
            if not messages:
                continue
            producer = world.plain_client.create_producer(member.topic.partition(index).full)
            for message in messages:
                producer.send_async(
                    message.value,
                    None,
                    properties=message.properties,
                    partition_key=message.key or None,
                    ordering_key=message.ordering_key or None,
                    event_timestamp=message.event_ms or None,
                )
            producer.flush()
            producer.close()


def essence(message: ParkedMessage) -> tuple[Any, ...]:
    """Return everything that a hop keeps; of our own properties, the due time."""
    properties = message.properties
    return (
        message.value,
        message.key,
        message.ordering_key,
        message.event_ms,
        tuple(sorted(env.application_properties(properties).items())),
        properties[env.DUE],
    )


def test_stored_messages_are_delivered_once_and_unchanged(
    earlier: RealWorld, tmp_path: Path
) -> None:
    descriptions = [described(earlier, stored) for stored in LEVEL_TOPICS.values()]
    for stored in LEVEL_TOPICS.values():
        with Inspector(earlier.plain_client, earlier.admin, stored.topic) as inspector:
            rows = list(inspector.rows())
        assert Counter(row.properties[env.DUE] for row in rows) == Counter(
            message.properties[env.DUE] for message in stored.parked
        )

    earlier.catch_up(LATER)
    settings = DispatchSettings(directory=tmp_path, checkpoint_ms=200)
    tracked = [each.topic for each in descriptions if each.final_window is FinalWindow.TRACKER]
    clock = earlier.ahead(duration_ms(LATER))
    dispatcher = Dispatcher(earlier.plain_client, earlier.admin, tracked, settings, clock)
    with Serving(dispatcher):
        for each in descriptions:
            earlier.drained(each)
        for name in SCHEMAS:
            target = earlier.topic(name)
            expected = [
                message
                for stored in LEVEL_TOPICS.values()
                for message in stored.parked
                if message.properties[env.TARGET] == target
            ]
            assert expected
            found = earlier.eventually(
                lambda: (
                    messages
                    if len(messages := earlier.stored(target)) >= len(expected)  # noqa: B023
                    else None
                ),
                f"{len(expected)} messages in {target}",
            )
            assert Counter(map(essence, found)) == Counter(map(essence, expected))
            ids = [message.properties[env.ID] for message in found]
            assert len(set(ids)) == len(ids)
            own = {message.properties.get(env.ID) for message in expected} - {None}
            assert own <= set(ids)
            for message in found:
                ours = {key for key in message.properties if key.startswith(env.PREFIX)}
                assert ours == {env.ID, env.DUE}
            # Their schema is the one that the consumers expect.
            consumer = earlier.plain_client.subscribe(
                target, "app", initial_position=pulsar.InitialPosition.Earliest,
                schema=SCHEMAS[name],
            )  # fmt: skip
            if name in ("json", "avro"):
                texts = {consumer.receive(30_000).value().text for _ in expected}
                assert texts == {"in days", "in hours", "in the window", "moved to the window"}

    description = descriptions[0]
    (letter,) = dead_letters(earlier.plain_client, earlier.admin, description)
    (recorded,) = LEVEL_TOPICS["orders"].role(Role.DEAD_LETTER)
    assert letter.message.properties == recorded.messages[0][0].properties
    for stored in LEVEL_TOPICS.values():
        name = stored.members[0].member.topic
        assert earlier.admin.partitioned_metadata(name).properties == stored.properties


def described(world: RealWorld, stored: EarlierLevelTopic) -> LevelTopicDescription:
    """Find a level topic as applications do: by its business topic, and by creating it."""
    target = stored.topic.removesuffix("-delay-level")
    description = topics.describe(world.admin, target)
    assert description.topic == stored.topic
    assert topics.create(world.admin, description) == description
    producer = world.client().create_producer(
        target, enable_delay_level_topic=True, mover=description.mover,
        final_window=description.final_window,
    )  # fmt: skip
    assert producer.description == description
    producer.close()
    return description
