"""Tests of movers on a real broker: fields of messages that are too large, or encrypted.

The tests set the mover's clock, so that a unit of a minute takes no minute.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from typing import Any
from unittest.mock import MagicMock

import pulsar
import pytest

from delaylevel.cluster.connection.settings import Connection
from delaylevel.doctor import State, examine
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import LevelTopicDescription, Mover, Role
from delaylevel.model.strategy import Levels, PartitionStrategy
from functions.mover import ConsumerLoop
from support.processes import create
from support.world import HOURS, RealWorld, quiet_client

pytestmark = pytest.mark.broker

MINUTES = Levels(PartitionStrategy(partition_by="MINUTE", maximum_delay=timedelta(minutes=4)))
REASON = "it is encrypted, and cannot be moved on"


@pytest.mark.parametrize("field", ["properties", "partition_key", "ordering_key"])
def test_no_field_of_a_message_hides_those_in_front_of_it(
    world: RealWorld, connection: Connection, clock: Any, field: str
) -> None:
    """The admin interface tells fields in HTTP headers, and fails if they are large."""
    description = world.level_topic(MINUTES)
    orders, large = description.targets[0], "x" * 20_000
    fields: dict[str, Any] = {field: {"large": large} if field == "properties" else large}
    producer = world.producer(orders, batching_enabled=False)
    for value in (b"first", b"second"):
        producer.send(value, deliver_after=timedelta(seconds=70))
        time.sleep(0.02)
    producer.send(b"large", deliver_after=timedelta(seconds=70), **fields)
    producer.send(b"last", deliver_after=timedelta(seconds=70))
    published = {m.value: m.publish_ms for m in world.stored(description.name.partition(0).full)}

    def hand_off(*values: bytes) -> None:
        """Let a new mover find all messages up to the last one of these."""
        clock.advance(published[values[-1]] + 45_000 - clock.now_ms())
        with closing(world.mover(description, clock)) as mover:
            assert mover.run_once().total == len(values)
        assert {m.value for m in world.stored(orders)} >= set(values)

    hand_off(b"first")
    # The clock of a producer cannot be wrong by less than it takes to send a message.
    examined = examine(connection, orders, clock=SystemClock())
    assert {found.check: found.state for found in examined}["producer clocks"] is State.OK
    hand_off(b"second")
    hand_off(b"large", b"last")
    world.drained(description)


def test_what_is_encrypted_becomes_a_dead_letter_with_its_properties(
    world: RealWorld,
    key_reader: pulsar.CryptoKeyReader,
    parked: Callable[..., dict[str, str]],
    clock: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("functions.mover._RETRY_S", 0.1)  # it ends with its client
    url = world.connection.service_url
    monkeypatch.setattr("sys.argv", ["python", "--pulsar_serviceurl", url])
    description = create(world, HOURS, window_partitions=1)
    other = world.level_topic(HOURS, topic=world.topic("other"), mover=Mover.FUNCTION)
    properties = parked(clock.now_ms() + 1, mine="1")

    def send(topic: str) -> None:
        # The batch is the last entry, behind which the client finds more for ever.
        for options in (
            {"batching_enabled": False},
            {"batching_enabled": True, "batching_max_publish_delay_ms": 10_000},
        ):
            producer = world.plain_client.create_producer(
                topic, encryption_key="key", crypto_key_reader=key_reader, **options
            )
            for _ in range(2):
                producer.send_async(b"secret", None, properties=properties)
            producer.flush()
            producer.close()

    def letters(of: LevelTopicDescription) -> Counter[bool]:
        """Count dead letters: True for those that have their properties, which no batch has."""
        found = world.stored(of.dead_letter_topic.full)
        assert {letter.properties["delaylevel.reason"] for letter in found} <= {REASON}
        assert not any(b"secret" in (letter.value or b"secret") for letter in found)
        return Counter(properties.items() <= letter.properties.items() for letter in found)

    send(description.name.partition(1).full)
    send(description.held_topic.partition(0).full)
    clock.advance(5 * 3_600_000)
    mover = world.mover(description, clock)
    assert mover.run_once().dead == 6
    world.drained(description)
    assert letters(description) == {True: 4, False: 2}
    send(description.window_topic.partition(0).full)
    world.serving(description)
    every = {True: 6, False: 3}
    world.eventually(lambda: letters(description) == every, "those of the dispatcher")
    world.drained(description, Role.WINDOW)

    send(other.name.partition(1).full)
    client = quiet_client(world.connection)
    context = MagicMock(pulsar_client=client, consumers={})
    admin_url = world.connection.admin_url
    context.get_user_config_map.return_value = {"level_topic": other.topic, "admin_url": admin_url}
    loop = ConsumerLoop(context)
    with contextlib.closing(client):
        loop.start()
        world.eventually(lambda: letters(other) == {True: 2, False: 1}, "those of the Function")
        world.drained(other)
    loop.join()
