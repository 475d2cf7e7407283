"""Tests of the Function's loop in this process: slow, silent, deleted and small targets."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pulsar
import pytest

from delaylevel.broker.embedded import EmbeddedBroker
from delaylevel.cluster.connection.settings import Connection
from delaylevel.cluster.rest.admin import Admin
from delaylevel.cluster.rest.http import Rest
from delaylevel.functions import relay
from delaylevel.functions.consumer_loop import ConsumerLoop, FunctionSettings
from delaylevel.model.clock import SystemClock
from delaylevel.model.envelope import REASON, TARGET
from delaylevel.model.level_topic import LevelTopicDescription, Mover
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.mover.dead_letters import dead_letters
from support.world import QUIET, RealWorld

LEVELS = Levels(
    [PartitionStrategy(partition_by=timedelta(seconds=3), maximum_delay=timedelta(seconds=30))]
)

Looping = Callable[..., contextlib.AbstractContextManager[ConsumerLoop]]
Parked = Callable[..., dict[str, str]]


@pytest.fixture
def connection(broker: EmbeddedBroker) -> Connection:
    """The address of the broker that most tests share; it has no functions worker."""
    patience = {"operation_timeout_seconds": 60}  # other tests share its processors
    return broker.connection.model_copy(update=patience)


@pytest.fixture
def rest(connection: Connection) -> Rest:
    return Rest(connection.admin_url)


@pytest.fixture
def looping(connection: Connection, client: pulsar.Client) -> Looping:
    """``with looping(description, …)``; more arguments go to FunctionSettings."""

    @contextlib.contextmanager
    def run(description: LevelTopicDescription, **values: Any) -> Iterator[ConsumerLoop]:
        settings = FunctionSettings(description.topic, connection.admin_url, **values)
        make = partial(pulsar.Client, **connection.client_kwargs(), logger=QUIET)
        with Admin.from_connection(connection) as admin:
            loop = ConsumerLoop(client, admin, settings, "loop", target_client=make)
            loop.start()
            yield loop
            loop.stop()

    return run


def level_producer(world: RealWorld, description: LevelTopicDescription) -> Any:
    """Return a producer of the first level: the Function receives its messages at once."""
    return world.plain_client.create_producer(description.level_topic(0).partition(0).full)


def send_largest(producer: Any, properties: dict[str, str]) -> bytes:
    """Send the largest payload that the client accepts."""
    for spare in range(100, 400, 4):
        body = bytes((5 << 20) - spare)
        with contextlib.suppress(pulsar.MessageTooBig):
            producer.send(body, properties=properties)
            return body
    raise AssertionError("no size fits")


def due_now() -> int:
    return SystemClock().now_ms()


def test_a_throttled_target_delays_only_its_own_messages(
    world: RealWorld,
    looping: Looping,
    collector: Callable[[str], Any],
    parked: Parked,
    rest: Rest,
) -> None:
    description = world.level_topic(
        LEVELS, targets=("slow", "good"), mover=Mover.FUNCTION, hold_pause_ms=2000
    )
    slow, good = description.targets
    rate = {"publishThrottlingRateInMsg": 20, "publishThrottlingRateInByte": -1}
    rest.post(f"{TopicName.parse(slow).rest_path}/publishRate", rate)
    slow_got, good_got = collector(slow), collector(good)
    count = 300
    with looping(description, in_flight=100):
        level = level_producer(world, description)
        for number in range(count):
            for target in ("slow", "good"):
                properties = parked(due_now(), target)
                level.send_async(b"%d" % number, lambda *_: None, properties=properties)
        level.flush()
        world.eventually(lambda: len(good_got.ids) == count, "all messages of the other target")
        assert len(slow_got.ids) < count
        world.eventually(lambda: len(slow_got.ids) == count, "the throttled messages", 120)
        world.drained(description)
    held = world.stored(description.held_topic.full)
    assert {item.properties[TARGET] for item in held} <= {slow}
    assert {item.properties[REASON] for item in held} <= {relay.SLOW}
    assert len(world.stored(slow)) == len(world.stored(good)) == count, "no copies"


def test_messages_for_a_target_that_is_deleted_in_mid_flow_are_not_lost(
    world: RealWorld,
    looping: Looping,
    collector: Callable[[str], Any],
    parked: Parked,
) -> None:
    description = world.level_topic(LEVELS, mover=Mover.FUNCTION, hold_pause_ms=1000)
    (orders,) = description.targets
    name = TopicName.parse(orders)
    # Without a consumer: it would create the subscription again, too.
    world.admin.create_subscription(name, "application")
    with looping(description):
        level = level_producer(world, description)

        def publish(numbers: range) -> None:
            for number in numbers:
                level.send(b"%d" % number, properties=parked(due_now()))
                time.sleep(0.02)  # the producer of the target is never idle

        publish(range(50))
        world.eventually(lambda: len(world.stored(orders)) > 10, "the first messages")
        publish(range(50, 60))
        world.admin.delete(name, force=True)
        after = {b"%d" % number for number in range(60, 160)}
        publish(range(60, 160))
        world.eventually(lambda: world.stored(description.held_topic.full), "held messages")
        again = collector(orders)
        world.eventually(lambda: after <= set(again.ids), "all messages since the deletion")
        world.drained(description)


def test_messages_that_are_too_large_for_their_target_become_dead_letters(
    world: RealWorld,
    looping: Looping,
    collector: Callable[[str], Any],
    parked: Parked,
    rest: Rest,
) -> None:
    description = world.level_topic(LEVELS, mover=Mover.FUNCTION)
    (orders,) = description.targets
    rest.post(f"{TopicName.parse(orders).rest_path}/maxMessageSize", 2000)
    world.eventually(lambda: world.admin.max_message_size(TopicName.parse(orders)) == 2000)
    got = collector(orders)
    with looping(description):
        level = level_producer(world, description)
        for body in (b"1", bytes(5000), b"2"):
            level.send(body, properties=parked(due_now()))
        # It does not even fit into the dead-letter topic, where it has more properties.
        largest = send_largest(level, parked(due_now()))
        level.send(b"3", properties=parked(due_now()))
        world.eventually(lambda: len(got.ids) == 3, "the messages that are small enough")
        world.drained(description)
    letters = [each.message for each in dead_letters(world.plain_client, world.admin, description)]
    assert {letter.value for letter in letters} == {bytes(5000), largest}
    assert len(letters) == 2
    reason = f"too large for {orders}"
    # The largest has no room for more.
    assert [each.properties[REASON] for each in letters] == [reason, reason[:60]]
    assert not world.stored(description.held_topic.full)
