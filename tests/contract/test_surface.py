"""Tests of the Pulsar behaviour that the package relies on: in memory and on a broker."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pulsar
import pytest
from pulsar import ConsumerType, InitialPosition
from pulsar.schema import AvroSchema, Integer, JsonSchema, Record, String, StringSchema

from delaylevel.cluster.port import TopicMetadata, TopicPolicies
from delaylevel.cluster.reader import entry_times
from delaylevel.errors import AdminError, ConflictError, NotFoundError
from delaylevel.model.message import batch_size
from delaylevel.model.position import Position
from delaylevel.model.topic_name import TopicName
from support.world import World

EARLIEST = InitialPosition.Earliest


def place(message_id: Any) -> Position:
    return Position(message_id.ledger_id(), message_id.entry_id(), message_id.batch_index())


class Topic:
    def __init__(self, world: World) -> None:
        self.world, self.client = world, world.client()
        self.full, self.name = world.topic("t"), world.name("t")

    def producer(self, **options: Any) -> Any:
        return self.client.create_producer(self.full, **options)

    def batching(self, **options: Any) -> Any:
        """Return a producer whose batches wait for a flush."""
        options = {"batching_enabled": True, "batching_max_publish_delay_ms": 60_000, **options}
        return self.producer(**options)

    def send(self, *bodies: bytes) -> list[Any]:
        """Send messages that are not batched, and return their IDs."""
        producer = self.producer()
        return [producer.send(body) for body in bodies]

    def batch(self, *bodies: bytes) -> list[Any]:
        """Send one batch, and return the IDs of its messages."""
        producer = self.batching()
        outcomes: list[Any] = []
        for body in bodies:
            producer.send_async(body, lambda result, stored: outcomes.append((result, stored)))
        producer.flush()
        producer.close()
        assert all(result == pulsar.Result.Ok for result, _ in outcomes)
        return [stored for _, stored in outcomes]

    def reader(self, start: Any = pulsar.MessageId.earliest, **options: Any) -> Any:
        return self.client.create_reader(self.full, start, **options)

    def read(self, count: int, **options: Any) -> list[Any]:
        found: list[Any] = self.world.drain(self.reader(**options), count)
        return found

    def subscribe(self, kind: ConsumerType = ConsumerType.Exclusive, **options: Any) -> Any:
        options = {"initial_position": EARLIEST, **options}
        return self.client.subscribe(self.full, "s", kind, **options)

    def consume(self, count: int) -> list[bytes]:
        """Return the next messages of a new consumer of the subscription."""
        found: list[bytes] = self.world.bodies(self.client.subscribe(self.full, "s"), count)
        return found

    def subscription(self) -> Any:
        return self.world.admin.partition_stats(self.name).subscriptions["s"]


@pytest.fixture
def topic(world: World) -> Topic:
    return Topic(world)


# -- storing


def test_an_unbatched_message_is_an_entry_and_a_batch_is_one_entry(topic: Topic) -> None:
    (first,) = topic.send(b"x")
    ids = topic.batch(b"a", b"b", b"c")
    (alone,) = topic.batch(b"d")
    everything = (first, *ids, alone)
    places = [(0, -1), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert [place(stored) for stored in everything] == [
        Position(first.ledger_id(), *each) for each in places
    ]
    assert [batch_size(stored) for stored in everything] == [0, 3, 3, 3, 1]
    found = [place(message.message_id()) for message in topic.read(5)]
    assert found == [place(stored) for stored in everything]


def test_a_delayed_message_is_never_batched_and_overtakes_the_batch(
    world: World, topic: Topic
) -> None:
    producer = topic.batching()
    producer.send_async(b"1", None)
    producer.send_async(b"later", None, deliver_at=world.clock.now_ms() + 60_000)
    producer.send_async(b"2", None)
    producer.flush()
    found = [(m.data(), m.message_id().batch_index()) for m in topic.read(3)]
    assert found == [(b"later", -1), (b"1", 0), (b"2", 1)]


def test_a_full_batch_is_stored_and_the_rest_waits_for_flush(world: World, topic: Topic) -> None:
    producer = topic.batching(batching_max_messages=2)
    stored: list[Any] = []
    for _ in range(5):
        producer.send_async(b"x", lambda _, message_id: stored.append(place(message_id)))
    world.eventually(lambda: len(stored) == 4)
    producer.flush()
    assert [(at.entry, at.batch) for at in stored] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]


def test_batches_by_key_have_one_key_each(topic: Topic) -> None:
    producer = topic.batching(batching_type=pulsar.BatchingType.KeyBased)
    for number, key in enumerate("abab"):
        producer.send_async(b"%d" % number, None, partition_key=key)
    producer.flush()
    found = [(m.data(), m.partition_key()) for m in topic.read(4)]
    assert found == [(b"0", "a"), (b"2", "a"), (b"1", "b"), (b"3", "b")]


def test_closing_a_producer_loses_its_open_batch(world: World, topic: Topic) -> None:
    producer = topic.batching()
    outcomes: list[Any] = []
    producer.send_async(b"x", lambda result, _: outcomes.append(result))
    producer.close()
    world.eventually(lambda: outcomes)
    assert outcomes == [pulsar.Result.AlreadyClosed]
    for call in (producer.close, producer.flush, lambda: producer.send(b"")):
        with pytest.raises(pulsar.AlreadyClosed):
            call()


def test_a_batch_has_the_publish_time_of_its_first_message(world: World, topic: Topic) -> None:
    producer = topic.batching()
    before = world.clock.now_ms()
    producer.send_async(b"1", None)
    after = world.clock.now_ms()
    world.advance(timedelta(milliseconds=300))
    producer.send_async(b"2", None)
    producer.flush()
    assert all(before <= m.publish_timestamp() <= after for m in topic.read(2))


def test_null_empty_key_properties_and_event_time_survive(topic: Topic) -> None:
    producer = topic.producer()
    producer.send(None, partition_key="k")
    producer.send(b"", ordering_key="o", event_timestamp=12345, properties={"ä": "ö"})
    null, empty = topic.read(2)
    assert (null.has_null_value(), null.data(), null.partition_key()) == (True, b"", "k")
    assert (empty.has_null_value(), empty.data(), empty.ordering_key()) == (False, b"", "o")
    assert (empty.event_timestamp(), empty.properties()) == (12345, {"ä": "ö"})
    assert (null.event_timestamp(), null.ordering_key(), null.properties()) == (0, "", {})
    assert (null.schema_version(), null.producer_name()) == ("", producer.producer_name())
    assert null.topic_name() == topic.full


def test_the_limit_applies_to_the_compressed_body_with_its_properties(topic: Topic) -> None:
    producer = topic.producer()
    with pytest.raises(pulsar.MessageTooBig):
        producer.send(b"x" * (5 * 1024 * 1024 - 100), properties={"a": "b" * 100})
    producer.send(b"x" * (5 * 1024 * 1024 - 200), properties={"a": "b" * 100})
    topic.producer(compression_type=pulsar.CompressionType.LZ4).send(bytes(6 * 1024 * 1024))


# -- partitions


def test_keys_choose_the_partition_and_other_messages_go_round_robin(
    world: World, topic: Topic
) -> None:
    assert topic.client.get_topic_partitions(topic.full) == [topic.full]
    assert not world.admin.topic_exists(topic.name), "a lookup creates no topic"
    world.admin.create_partitioned(topic.name, 3)
    partitions = [f"{topic.full}-partition-{index}" for index in range(3)]
    assert topic.client.get_topic_partitions(topic.full) == partitions
    producer = topic.producer()
    assert len({producer.send(b"", partition_key="k").partition() for _ in range(4)}) == 1
    turns = [producer.send(b"").partition() for _ in range(6)]
    assert sorted(turns) == [0, 0, 1, 1, 2, 2]
    direct = topic.client.create_producer(partitions[1])
    assert (direct.topic(), direct.send(b"direct").partition()) == (partitions[1], -1)
    reader = topic.client.create_reader(partitions[1], pulsar.MessageId.earliest)
    last = world.drain(reader, 3)[-1]
    found = (last.data(), last.message_id().partition(), last.topic_name())
    assert found == (b"direct", 1, partitions[1])
    with pytest.raises(pulsar.TopicNotFound):
        topic.client.create_producer(f"{topic.full}-partition-7")


def test_a_consumer_of_a_partitioned_topic_gets_all_partitions(world: World, topic: Topic) -> None:
    world.admin.create_partitioned(topic.name, 2)
    consumer = topic.subscribe()
    topic.send(b"0", b"1", b"2", b"3")
    found = world.drain(consumer, 4)
    assert sorted(m.data() for m in found) == [b"0", b"1", b"2", b"3"]
    for message in found:
        consumer.acknowledge(message)

    def backlog() -> int:
        stats = world.admin.partitioned_stats(topic.name).values()
        return sum(each.subscriptions["s"].backlog_entries for each in stats)

    world.eventually(lambda: not backlog())


# -- producers


def test_producer_names_and_access_modes_exclude_other_producers(topic: Topic) -> None:
    first = topic.producer(producer_name="me")
    with pytest.raises(pulsar.ProducerBusy):
        topic.producer(producer_name="me")
    first.close()
    modes = pulsar.ProducerAccessMode
    exclusive = topic.producer(producer_name="me", access_mode=modes.Exclusive)
    with pytest.raises(pulsar.ProducerBusy):
        topic.producer()
    with pytest.raises(pulsar.ProducerFenced):
        topic.producer(access_mode=modes.Exclusive)
    topic.producer(access_mode=modes.ExclusiveWithFencing)
    with pytest.raises(pulsar.ProducerFenced):
        exclusive.send(b"")


def test_a_closed_client_closes_its_producers_and_consumers(topic: Topic) -> None:
    producer, consumer = topic.producer(), topic.subscribe()
    assert producer.is_connected()
    topic.client.close()
    assert not producer.is_connected()
    for call in (topic.producer, lambda: producer.send(b""), lambda: consumer.receive(10)):
        with pytest.raises(pulsar.AlreadyClosed):
            call()


# -- readers


@pytest.mark.parametrize(
    ("index", "inclusive", "expected"),
    [
        (-1, True, b"abcd"),
        (-1, False, b"abcd"),
        (0, True, b"abcd"),
        (0, False, b"bcd"),
        (1, True, b"bcd"),
        (2, True, b"cd"),
        (2, False, b"d"),
    ],
)
def test_a_reader_starts_anywhere_in_a_batch(
    world: World, topic: Topic, index: int, inclusive: bool, expected: bytes
) -> None:
    first, *_ = topic.batch(b"a", b"b", b"c")
    topic.send(b"d")
    start = pulsar.MessageId(-1, first.ledger_id(), first.entry_id(), index)
    reader = topic.reader(start, start_message_id_inclusive=inclusive)
    assert b"".join(world.bodies(reader, len(expected))) == expected


def test_readers_detect_further_messages(world: World, topic: Topic) -> None:
    reader = topic.reader()
    assert not reader.has_message_available()
    with pytest.raises(pulsar.Timeout):
        reader.read_next(100)
    topic.send(b"1")
    assert reader.has_message_available()
    assert world.receive(reader).data() == b"1"
    assert not reader.has_message_available()
    latest = topic.reader(pulsar.MessageId.latest)
    assert not latest.has_message_available()
    topic.send(b"2")
    assert world.bodies(latest, 1) == [b"2"]
    reader.close()
    with pytest.raises(pulsar.AlreadyClosed):
        reader.read_next(10)


# -- subscriptions


def test_unacknowledged_messages_are_redelivered(world: World, topic: Topic) -> None:
    consumer = topic.subscribe()
    topic.send(b"0", b"1", b"2", b"3")
    found = world.drain(consumer, 4)
    assert [m.data() for m in found] == [b"0", b"1", b"2", b"3"]
    consumer.acknowledge(found[1])
    consumer.close()
    consumer = topic.subscribe()
    assert world.bodies(consumer, 3) == [b"0", b"2", b"3"]
    consumer.redeliver_unacknowledged_messages()
    found = world.drain(consumer, 3)
    assert [(m.data(), m.redelivery_count()) for m in found] == [(b"0", 0), (b"2", 0), (b"3", 0)]
    consumer.acknowledge_cumulative(found[1])
    consumer.close()
    assert topic.consume(1) == [b"3"]


def test_a_batch_is_acknowledged_with_its_last_message(world: World, topic: Topic) -> None:
    def acknowledge(*calls: tuple[str, int]) -> None:
        consumer = topic.subscribe()
        found = world.drain(consumer, 3)
        assert len(found) == 3
        for how, number in calls:
            getattr(consumer, how)(found[number])
        consumer.close()

    topic.subscribe().close()
    topic.batch(b"a", b"b", b"c")
    acknowledge(("acknowledge", 0), ("acknowledge", 1))
    acknowledge(("acknowledge_cumulative", 1))
    acknowledge(("acknowledge", 0), ("acknowledge", 1), ("acknowledge", 2))
    assert topic.consume(0) == []


def test_an_entry_is_acknowledged_by_its_bare_id_without_being_received(
    world: World, topic: Topic
) -> None:
    consumer = topic.subscribe(receiver_queue_size=0)
    topic.batch(b"a", b"b")
    second, _ = topic.batch(b"c", b"d")
    topic.batch(b"e")
    ledger = second.ledger_id()
    assert world.admin.mark_delete_position(topic.name, "s") == Position(ledger, -1)
    consumer.acknowledge_cumulative(pulsar.MessageId(-1, ledger, second.entry_id(), -1))
    done = Position(ledger, second.entry_id())
    world.eventually(lambda: world.admin.mark_delete_position(topic.name, "s") == done)
    consumer.close()
    assert topic.consume(1) == [b"e"]


def test_an_exclusive_subscription_has_one_consumer(world: World, topic: Topic) -> None:
    first = topic.subscribe(consumer_name="one")
    for kind in (ConsumerType.Exclusive, ConsumerType.Shared):
        with pytest.raises(pulsar.ConsumerBusy):
            topic.subscribe(kind)
    stats = topic.subscription()
    assert (stats.type, [c.name for c in stats.consumers]) == ("Exclusive", ["one"])
    first.close()
    for call in (lambda: first.receive(10), lambda: first.acknowledge(pulsar.MessageId.earliest)):
        with pytest.raises(pulsar.AlreadyClosed):
            call()
    topic.subscribe().unsubscribe()
    assert "s" not in world.admin.partition_stats(topic.name).subscriptions


def test_shared_consumers_share_and_count_redeliveries(world: World, topic: Topic) -> None:
    consumer = topic.subscribe(ConsumerType.Shared, negative_ack_redelivery_delay_ms=200)
    topic.send(b"0", b"1", b"2")
    found = world.drain(consumer, 3)
    assert sorted(m.data() for m in found) == [b"0", b"1", b"2"]
    with pytest.raises(pulsar.CumulativeAcknowledgementNotAllowedError):
        consumer.acknowledge_cumulative(found[1])
    consumer.acknowledge(found[0])
    consumer.negative_acknowledge(found[1])
    world.advance(timedelta(milliseconds=250))
    again = world.receive(consumer)
    assert (again.data(), again.redelivery_count()) == (found[1].data(), 1)
    consumer.close()
    left = world.drain(topic.subscribe(ConsumerType.Shared), 2)
    expected = sorted((m.data(), 0) for m in found[1:])
    assert sorted((m.data(), m.redelivery_count()) for m in left) == expected


def test_failover_has_one_consumer_at_a_time(world: World, topic: Topic) -> None:
    consumers = [topic.subscribe(ConsumerType.Failover) for _ in range(2)]
    topic.send(b"0", b"1", b"2")
    got: list[list[bytes]] = [[], []]

    def all_there() -> bool:
        for found, consumer in zip(got, consumers, strict=True):
            found += world.bodies(consumer, 0)
        return sum(map(len, got)) >= 3

    world.eventually(all_there)
    active = 0 if got[0] else 1
    assert (got[active], got[1 - active]) == ([b"0", b"1", b"2"], [])
    consumers[active].close()
    assert world.bodies(consumers[1 - active], 3) == [b"0", b"1", b"2"]


def test_key_shared_keeps_a_key_with_one_consumer(world: World, topic: Topic) -> None:
    consumers = [topic.subscribe(ConsumerType.KeyShared) for _ in range(2)]
    producer = topic.producer()
    for number in range(40):
        producer.send(b"%02d" % (number // 10), partition_key=f"key-{number % 10}")
    found: list[dict[str, list[bytes]]] = [{}, {}]

    def all_there() -> bool:
        for by_key, consumer in zip(found, consumers, strict=True):
            for message in world.drain(consumer, 0):
                by_key.setdefault(message.partition_key(), []).append(message.data())
        return sum(len(each) for by_key in found for each in by_key.values()) >= 40

    world.eventually(all_there)
    one, other = found
    assert not one.keys() & other.keys()
    assert len(one | other) == 10
    assert all(each == [b"00", b"01", b"02", b"03"] for each in (one | other).values())


def test_only_shared_types_delay_a_message(world: World, topic: Topic) -> None:
    kinds = (ConsumerType.Exclusive, ConsumerType.Shared, ConsumerType.KeyShared)
    consumers = {
        kind: topic.client.subscribe(topic.full, str(kind), kind, initial_position=EARLIEST)
        for kind in kinds
    }
    producer = topic.producer()
    due_ms = world.clock.now_ms() + 2500
    producer.send(b"later", deliver_at=due_ms)
    producer.send(b"even later", deliver_after=timedelta(hours=1))
    producer.send(b"now")
    for ordered in (topic.reader(), consumers.pop(ConsumerType.Exclusive)):
        assert world.bodies(ordered, 3) == [b"later", b"even later", b"now"]
    got = {kind: world.drain(consumer, 1) for kind, consumer in consumers.items()}
    held_back = world.clock.now_ms() < due_ms - world.early_ms
    if held_back:  # false after a pause of the machine
        assert all([m.data() for m in found] == [b"now"] for found in got.values())
    world.advance(timedelta(milliseconds=max(0, due_ms - world.clock.now_ms())))
    for kind, found in got.items():
        found += world.drain(consumers[kind], 2 - len(found))
        bodies = sorted((m.data(), m.redelivery_count()) for m in found)
        assert bodies == [(b"later", 0), (b"now", 0)]


def test_a_new_subscription_starts_behind_the_last_message(world: World, topic: Topic) -> None:
    stored = topic.send(b"0", b"1", b"2")
    consumer = topic.client.subscribe(topic.full, "s")
    assert world.bodies(consumer, 0) == []
    consumer.seek(stored[1])
    assert world.bodies(consumer, 1) == [b"2"]
    consumer.seek(pulsar.MessageId.earliest)
    assert world.bodies(consumer, 3) == [b"0", b"1", b"2"]
    assert place(consumer.get_last_message_id()) == place(stored[2])


def test_a_listener_is_called(world: World, topic: Topic) -> None:
    seen: list[bytes] = []

    def listen(consumer: Any, message: Any) -> None:
        seen.append(message.data())
        consumer.acknowledge(message)

    topic.subscribe(message_listener=listen)
    topic.send(b"x")
    world.eventually(lambda: seen == [b"x"])
    world.eventually(lambda: not topic.subscription().backlog_entries)


# -- schemas


class First(Record):  # type: ignore[misc]
    name = String()


class Second(Record):  # type: ignore[misc]
    name = String()
    age = Integer(required_default=True)


First.__name__ = Second.__name__ = "Person"


@pytest.mark.parametrize("schema", [AvroSchema, JsonSchema])
def test_schemas_have_versions_and_those_of_another_type_are_refused(
    world: World, topic: Topic, schema: Any
) -> None:
    for each in (First(name="Ada"), Second(name="Bob", age=3), First(name="Cleo")):
        topic.producer(schema=schema(type(each))).send(each)
    topic.send(b"raw")
    for call in (topic.producer, topic.subscribe):
        with pytest.raises(pulsar.IncompatibleSchema):
            call(schema=StringSchema())
    found = topic.read(4, schema=schema(Second))
    versions = [bytes(m.schema_version(), "latin-1") for m in found]
    zero, one = (0).to_bytes(8, "big"), (1).to_bytes(8, "big")
    assert versions == [zero, one, zero, b""]
    values = [(m.value().name, m.value().age) for m in found[:3]]
    assert values == [("Ada", None), ("Bob", 3), ("Cleo", None)]
    kind = schema(First).schema_info().schema_type().name
    assert [(s.type, s.version) for s in world.admin.schemas(topic.name)] == [(kind, 0), (kind, 1)]


def test_plain_bytes_are_not_a_schema(world: World, topic: Topic) -> None:
    topic.send(b"x")
    assert world.admin.schemas(topic.name) == []
    with pytest.raises(pulsar.IncompatibleSchema):
        topic.subscribe(schema=StringSchema())
    topic.producer(schema=StringSchema()).send("é")
    assert [s.type for s in world.admin.schemas(topic.name)] == ["STRING"]
    consumer = topic.subscribe(schema=StringSchema())
    assert world.bodies(consumer, 2) == [b"x", "é".encode()]
    topic.client.subscribe(world.topic("idle"), "s", schema=StringSchema())
    assert [s.type for s in world.admin.schemas(world.name("idle"))] == ["STRING"]


# -- topics that end


def test_a_terminated_topic_accepts_no_more_messages(world: World, topic: Topic) -> None:
    producer = topic.producer()
    producer.send(b"last")
    consumer = topic.subscribe()
    world.admin.terminate(topic.name)
    for call in (lambda: producer.send(b"more"), topic.producer):
        with pytest.raises(pulsar.TopicTerminated):
            call()
    assert world.bodies(consumer, 1) == [b"last"]


def test_a_topic_in_use_is_deleted_only_by_force_and_recreated(world: World, topic: Topic) -> None:
    producer = topic.producer(schema=StringSchema())
    old = producer.send("1")
    topic.client.subscribe(topic.full, "connected", initial_position=EARLIEST)
    topic.client.subscribe(topic.full, "closed").close()
    with pytest.raises(ConflictError):
        world.admin.delete(topic.name)
    world.admin.delete(topic.name, force=True)
    assert place(producer.send("2")) != place(old)
    stats = world.admin.partition_stats
    world.eventually(lambda: set(stats(topic.name).subscriptions) == {"connected"})
    assert [m.data() for m in topic.read(1)] == [b"2"]
    assert [s.version for s in world.admin.schemas(topic.name)] == [0]


def test_a_deleted_partitioned_topic_is_recreated_without_its_partitions(
    world: World, topic: Topic
) -> None:
    first = topic.name.partition(0)
    world.admin.create_partitioned(topic.name, 2)
    topic.producer().close()
    world.admin.delete(topic.name)
    assert not world.admin.topic_exists(topic.name)
    assert not world.admin.topic_exists(first)
    topic.client.create_producer(first.full).send(b"x")
    assert world.admin.topic_exists(first)
    assert not world.admin.topic_exists(topic.name)


# -- the admin port


def test_the_admin_finds_positions_by_publish_time(world: World, topic: Topic) -> None:
    admin, producer, name = world.admin, topic.producer(), topic.name
    with pytest.raises(NotFoundError):
        admin.last_message_id(world.name("none"))
    assert admin.last_message_id(name) is None
    assert admin.message_id_at(name, 0) is None
    found = []
    for _ in range(3):
        before_ms = world.clock.now_ms()
        found.append((before_ms, place(producer.send(b"")), world.clock.now_ms()))
        world.advance(timedelta(milliseconds=20))
    last = found[-1][1]
    assert admin.last_message_id(name) == last
    for before_ms, at, after_ms in found:
        assert admin.message_id_at(name, before_ms) == at
        ((same, published_ms),) = entry_times(topic.client, topic.full, at, at)
        assert (same, before_ms <= published_ms <= after_ms) == (at, True)
    assert entry_times(topic.client, topic.full, last.next_entry, last.next_entry) == []
    behind = admin.message_id_at(name, world.clock.now_ms() + 1000)
    assert behind is None or behind > last
    _, batched = topic.batch(b"a", b"b")
    assert admin.last_message_id(name) == place(batched)
    assert sum(item.entries for item in admin.ledgers(name)) == 4


def test_the_admin_creates_once_and_reports_existing_topics(world: World) -> None:
    name = world.name("t")
    world.admin.create_partitioned(name, 2, {"a": "1"})
    with pytest.raises(ConflictError):
        world.admin.create_partitioned(name, 3)
    world.admin.set_properties(name, {"b": "2"})
    metadata = world.admin.partitioned_metadata(name)
    assert (metadata.partitions, dict(metadata.properties)) == (2, {"a": "1", "b": "2"})
    world.admin.create_subscription(name, "s")
    with pytest.raises(ConflictError):
        world.admin.create_subscription(name, "s")
    client = world.client()
    client.create_producer(name.full).send(b"x")
    stats = world.admin.partitioned_stats(name)
    assert sorted(stats) == [0, 1]
    assert sorted(item.subscriptions["s"].backlog_entries for item in stats.values()) == [0, 1]
    assert {item.subscriptions["s"].type for item in stats.values()} == {"None"}
    assert world.admin.list_partitioned_topics(world.namespace) == [name]
    for call in (
        lambda: world.admin.mark_delete_position(name.partition(0), "other"),
        lambda: world.admin.namespace_policies("public/absent"),
        lambda: world.admin.list_partitioned_topics("public/absent"),
    ):
        with pytest.raises(NotFoundError):
            call()


def test_no_query_creates_a_topic(world: World, topic: Topic) -> None:
    admin = world.admin
    for name in (topic.name, topic.name.partition(0), TopicName.parse("public/none/t")):
        assert not admin.topic_exists(name)
    assert admin.schemas(topic.name) == []
    for call, arguments in {
        "partitioned_metadata": (),
        "set_properties": ({"a": "b"},),
        "create_subscription": ("s",),
        "subscriptions": (),
        "partition_stats": (),
        "partitioned_stats": (),
        "ledgers": (),
        "mark_delete_position": ("s",),
        "acknowledged_ranges": ("s",),
        "last_message_id": (),
        "message_id_at": (5,),
        "expand": (3,),
        "delete": (),
    }.items():
        with pytest.raises(NotFoundError):
            getattr(admin, call)(topic.name, *arguments)
        assert not admin.list_topics(world.namespace), call
    assert admin.list_partitioned_topics(world.namespace) == []


def test_policies_are_visible_soon(world: World, topic: Topic) -> None:
    admin, cluster = world.admin, world.admin.broker_settings().cluster
    policies = admin.namespace_policies(world.namespace)
    assert policies.subscription_expiration_min is None
    assert policies.backlog_quotas == ()
    assert policies.replication_clusters == {cluster}
    admin.create_partitioned(topic.name, 1)
    assert admin.topic_policies(topic.name) == TopicPolicies()
    own = {"message_ttl_s": 0, "delete_while_inactive": False}
    wanted = TopicPolicies(**own, replication_clusters=frozenset({cluster}))
    admin.set_topic_policies(topic.name, wanted)
    world.eventually(lambda: admin.topic_policies(topic.name) == wanted)


def test_a_topic_is_expanded_with_its_subscriptions(world: World) -> None:
    name = world.name("t")
    world.admin.create_partitioned(name, 2, {"a": "1"})
    world.admin.create_subscription(name, "s")
    world.admin.expand(name, 4)
    assert world.admin.partitioned_metadata(name) == TopicMetadata(4, {"a": "1"})
    stats = world.admin.partitioned_stats(name)
    assert sorted(stats) == [0, 1, 2, 3]
    assert all(set(item.subscriptions) == {"s"} for item in stats.values())
    with pytest.raises(AdminError):
        world.admin.expand(name, 3)


def test_the_admin_reports_acknowledgements_behind_the_mark_delete_position(
    world: World, topic: Topic
) -> None:
    topic.subscribe().close()
    ids = topic.send(*[b"x"] * 8)
    consumer = topic.subscribe()
    for number in (0, 2, 3, 6):
        consumer.acknowledge(ids[number])

    def acknowledged() -> list[int]:
        ranges = world.admin.acknowledged_ranges(topic.name, "s")
        places = [Position(item.ledger_id(), item.entry_id()) for item in ids]
        return [n for n, at in enumerate(places) if any(at in each for each in ranges)]

    world.eventually(lambda: acknowledged() == [2, 3, 6])
    with pytest.raises(NotFoundError):
        world.admin.acknowledged_ranges(topic.name, "other")


def test_the_broker_tells_the_name_and_properties_of_a_producer(world: World, topic: Topic) -> None:
    producer = topic.producer(properties={"team": "a"})
    (seen,) = world.admin.partition_stats(topic.name).publishers
    assert (seen.name, seen.properties) == (producer.producer_name(), {"team": "a"})
