"""The path of a message from the wrapper to the consumer: the same in memory and on a broker."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pulsar
import pytest
from pulsar import ConsumerType, InitialPosition
from pulsar.schema import AvroSchema, Integer, JsonSchema, Record, String, StringSchema

from delaylevel import PartitionStrategy, wrap
from delaylevel.errors import StrategyMismatchError
from delaylevel.model import envelope as env
from delaylevel.model.delivery import ForwardReport
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.message import ParkedMessage
from delaylevel.mover import dead_letters
from delaylevel.mover.local import LocalMover
from delaylevel.testing import ManualClock

UNIT = timedelta(seconds=1)
SECONDS = PartitionStrategy(partition_by=UNIT, maximum_delay=timedelta(seconds=4))
TWO_LEVELS = [
    PartitionStrategy(partition_by=timedelta(seconds=3), maximum_delay=timedelta(seconds=9)),
    PartitionStrategy(partition_by=UNIT, maximum_delay=timedelta(seconds=4)),
]


def producer_for(
    world: Any, topic: str = "orders", strategy: Any = SECONDS, clock: Any = None, **options: Any
) -> Any:
    """Return the wrapper's producer, of its own client; on a broker it uses ``clock``.

    The final window is the broker's, because no dispatcher runs.
    """
    options.setdefault("final_window", "broker")
    return world.client(clock).create_producer(
        world.topic(topic),
        enable_delay_level_topic=True,
        partition_strategy=strategy,
        **options,
    )


def consumer_for(world: Any, topic: str = "orders", **options: Any) -> Any:
    return world.client().subscribe(
        world.topic(topic),
        "app",
        ConsumerType.Shared,
        initial_position=InitialPosition.Earliest,
        **options,
    )


def parked(world: Any, description: LevelTopicDescription) -> list[int]:
    """Return the number of entries in each partition of the first level."""
    stats = world.admin.partitioned_stats(description.level_topic(0))
    return [stats[k].subscriptions["delaylevel"].backlog_entries for k in sorted(stats)]


def held(world: Any, description: LevelTopicDescription) -> int:
    partition = description.held_topic.partition(0)
    stats = world.admin.partition_stats(partition)
    return int(stats.subscriptions["delaylevel"].backlog_entries)


def test_messages_pass_two_levels_on_time_and_unchanged(world: Any) -> None:
    consumer = consumer_for(world)
    start_ms = world.clock.now_ms()
    # The producer's clock is fixed, so all messages have the same send time.
    producer = producer_for(world, strategy=TWO_LEVELS, clock=ManualClock(start_ms))
    # At the bounds of partitions and levels, between them, below a unit, and without a delay.
    for delay in (0, 300, 999, 1000, 2000, 2500, 3000, 3001, 6000, 7300):
        producer.send(
            b"%d" % delay,
            properties={"own": "ä", "delaylevel.id": "stale"},
            partition_key=f"key-{delay}",
            event_timestamp=delay + 1,
            deliver_at=start_ms + delay if delay else None,
        )
    producer.send(None, deliver_after=timedelta(seconds=4), ordering_key="null")
    producer.send(b"", deliver_after=timedelta(seconds=4), ordering_key="empty")
    producer.send(b"007", deliver_after=timedelta(seconds=4), message_id="mine")
    arrived: dict[str, tuple[Any, int]] = {}
    for _ in range(100):
        world.advance(timedelta(milliseconds=500))
        for message in world.drain(consumer):
            consumer.acknowledge(message)
            name = message.ordering_key() or message.data().decode()
            assert name not in arrived
            arrived[name] = (message, world.clock.now_ms())
        if len(arrived) == 13:
            break
    assert len(arrived) == 13
    for delay in (300, 999, 1000, 2000, 2500, 3000, 3001, 6000, 7300):
        message, at_ms = arrived[str(delay)]
        assert message.properties()["own"] == "ä"
        assert message.properties()[env.DUE] == str(start_ms + delay)
        assert message.properties().get(env.ID) != "stale"
        assert (message.partition_key(), message.event_timestamp()) == (f"key-{delay}", delay + 1)
        assert -world.early_ms <= at_ms - (start_ms + delay) <= world.late_ms
    plain = arrived["0"][0]
    assert plain.properties() == {"own": "ä"}
    assert arrived["null"][0].has_null_value()
    assert not arrived["empty"][0].has_null_value()
    assert arrived["007"][0].properties()[env.ID] == "mine"
    ids = [
        message.properties()[env.ID]
        for message, _ in arrived.values()
        if env.ID in message.properties()
    ]
    assert len(ids) == len(set(ids))
    assert (
        f"{world.namespace}/_orders-delay-level-partition-"
        in arrived["7300"][0].properties()[env.ID]
    )


def window_of(world: Any, description: LevelTopicDescription) -> dict[int, list[ParkedMessage]]:
    """Return the contents of every partition of the window topic."""
    window = description.window_topic
    return {
        index: world.stored(window.partition(index).full)
        for index in range(description.window_partitions)
    }


def test_with_a_tracker_every_message_reaches_the_window(world: Any) -> None:
    producer = producer_for(world, strategy=TWO_LEVELS, final_window="tracker")
    description = producer.description
    assert description.final_window is FinalWindow.TRACKER
    before_ms = world.clock.now_ms()
    # Below a unit, into either level, with an ID of the application, and without a key.
    for delay in (500, 1500, 3500):
        producer.send(
            b"%d" % delay,
            properties={"own": "ä", "delaylevel.id": "stale"},
            partition_key=f"key-{delay}",
            ordering_key="order",
            event_timestamp=delay,
            deliver_after=timedelta(milliseconds=delay),
        )
    for delay in (500, 1500):
        producer.send(b"same", deliver_after=timedelta(milliseconds=delay), message_id="mine")
    producer.send(None, deliver_after=timedelta(milliseconds=1500))
    after_ms = world.clock.now_ms()
    producer.close()
    world.admin.delete(world.name("orders"))  # movers do not need the target

    report = ForwardReport()
    with LocalMover(world.client(), world.admin, description, world.ahead(9000)) as mover:
        # Two were sent directly to the window; the mover hands off the others, which are overdue.
        world.eventually(lambda: report.add(mover.run_once()) or report.window == 4)
    assert (report.due, report.held.total()) == (0, 0)
    assert report.latest_ms > 0
    assert not world.admin.topic_exists(world.name("orders"))

    stored = [
        (index, message)
        for index, messages in window_of(world, description).items()
        for message in messages
    ]
    assert all(item.properties[env.TARGET] == world.topic("orders") for _, item in stored)
    bodies = [b"1500", b"3500", b"500", b"null", b"same", b"same"]
    assert sorted(item.value or b"null" for _, item in stored) == bodies
    found = {item.value: (index, item) for index, item in stored}
    for delay in (500, 1500, 3500):
        index, message = found[b"%d" % delay]
        assert index == description.window_partition(f"key-{delay}", "")
        assert before_ms <= int(message.properties[env.DUE]) - delay <= after_ms
        assert message.properties["own"] == "ä"
        assert message.properties.get(env.ID) != "stale"
        assert (message.key, message.ordering_key) == (f"key-{delay}", "order")
        assert message.event_ms == delay
    assert env.ID not in found[b"500"][1].properties  # its position in the window is its ID
    copies = {(index, item.properties[env.ID]) for index, item in stored if item.value == b"same"}
    assert copies == {(description.window_partition("", "mine"), "mine")}
    index, null = found[None]
    assert null.properties[env.ID].startswith(f"{world.namespace}/_orders-delay-level-")
    assert index == description.window_partition("", null.properties[env.ID])


class Old(Record):  # type: ignore[misc]
    name = String()


class New(Record):  # type: ignore[misc]
    name = String()
    age = Integer(required_default=True)


for record in (Old, New):
    record.__name__ = "Person"


def test_schemas_keep_their_versions(world: Any) -> None:
    cases = {"avro": AvroSchema, "json": JsonSchema}
    readers, texts = {}, consumer_for(world, "text", schema=StringSchema())
    for name, schema in cases.items():
        old = producer_for(world, name, schema=schema(Old))
        new = producer_for(world, name, schema=schema(New))
        new.send(New(name="new", age=7), deliver_after=timedelta(seconds=1.2))
        old.send(Old(name="old"), deliver_after=timedelta(seconds=1.2))
        readers[name] = consumer_for(world, name, schema=schema(New))
    producer_for(world, "text", schema=StringSchema()).send("é", deliver_after=timedelta(seconds=1))
    world.catch_up(timedelta(seconds=2))
    for name, consumer in readers.items():
        found = world.drain(consumer, 2)
        values = {m.value().name: (m.value().age, m.schema_version()[-1]) for m in found}
        assert values == {"old": (None, "\0"), "new": (7, "\1")}, name
    assert [m.value() for m in world.drain(texts, 1)] == ["é"]


def test_a_recreated_target_gets_its_held_messages(world: Any) -> None:
    producer = producer_for(world)
    description = producer.description
    other = producer_for(world, "other")
    survivor = consumer_for(world, "other")
    producer.send(b"held", deliver_after=timedelta(seconds=1.2), partition_key="k")
    other.send(b"passes", deliver_after=timedelta(seconds=1.2))
    producer.close()
    world.admin.delete(world.name("orders"))
    report = world.advance(timedelta(seconds=2))
    assert (report.held, held(world, description)) == ({world.topic("orders"): 1}, 1)
    assert not world.admin.topic_exists(world.name("orders"))
    assert world.bodies(survivor, 1) == [b"passes"]
    consumer = consumer_for(world)
    mover = LocalMover(world.client(), world.admin, description, world.ahead(31_000))
    with mover:
        assert mover.run_once().due == 1
    message = world.receive(consumer)
    assert (message.data(), message.partition_key()) == (b"held", "k")
    assert message.properties()[env.ID].startswith(f"{world.namespace}/_orders-delay-level-p")


@pytest.mark.parametrize("kind", ["teleport", "cancel"])
def test_a_record_of_an_unknown_kind_is_never_delivered(
    world: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither from a level, nor from the held topic, nor by a replay of the dead letter.

    A version that knows kinds, but not yet cancellations, is simulated.
    """
    monkeypatch.setattr(env, "KINDS", frozenset())
    consumer = consumer_for(world)
    description = producer_for(world).description
    due = str(world.clock.now_ms() + 1000)
    properties = {env.DUE: due, env.TARGET: world.topic("orders"), env.ID: "a"}
    for topic in (description.level_topic(0), description.held_topic):
        raw = world.client().create_producer(topic.partition(0).full)
        raw.send(b"a record", properties={**properties, env.KIND: kind}, partition_key="k")
        raw.send(b"a message", properties={**properties, env.ID: topic.local})
    report = world.catch_up(timedelta(seconds=40))
    reason = f"delaylevel.kind is {kind!r}: this version does not know this kind of record"
    assert report.dead == {reason: 2}
    assert world.bodies(consumer, 2) == [b"a message"] * 2
    letters = list(dead_letters.dead_letters(world.client(), world.admin, description))
    assert [letter.reason for letter in letters] == [reason] * 2
    for letter in letters:
        assert letter.message.properties.items() >= {**properties, env.KIND: kind}.items()
        assert (letter.message.value, letter.message.key) == (b"a record", "k")
    replayed = dead_letters.replay(world.client(), world.admin, description, lambda _: True)
    assert (replayed.replayed, replayed.refused) == (0, {reason: 2})
    assert world.bodies(consumer, 0) == []


def test_the_wrapper_wraps_flushes_and_closes(world: Any) -> None:
    client = world.client()
    consumer = consumer_for(world)
    plain = client.create_producer(world.topic("orders"))
    producer = wrap(plain, client, partition_strategy=SECONDS, final_window="broker")
    outcomes: list[Any] = []
    for _ in range(50):
        producer.send_async(
            b"x", lambda result, _: outcomes.append(result), deliver_after=timedelta(seconds=2.5)
        )
    producer.close()  # waits for confirmation of every message
    assert outcomes == [pulsar.Result.Ok] * 50
    assert parked(world, producer.description)[1] >= 1
    with pytest.raises(StrategyMismatchError):
        producer_for(world, strategy=TWO_LEVELS)
    with pytest.raises(pulsar.AlreadyClosed):
        producer.send(b"", deliver_after=timedelta(seconds=2.5))
    world.catch_up(timedelta(seconds=3))
    assert world.bodies(consumer, 50) == [b"x"] * 50
