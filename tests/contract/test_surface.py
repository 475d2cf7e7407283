"""Tests of the Pulsar behaviour that the package relies on: in memory and on a broker."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pulsar
import pytest
from pulsar import ConsumerType, InitialPosition
from pulsar.schema import AvroSchema, Integer, JsonSchema, Record, String, StringSchema

from delaylevel.cluster.port import TopicMetadata
from delaylevel.cluster.reader import entry_times
from delaylevel.errors import AdminError, ConflictError, NotFoundError
from delaylevel.model.message import batch_size
from delaylevel.model.position import Position

EARLIEST = InitialPosition.Earliest


def place(message_id: Any) -> Position:
    return Position(message_id.ledger_id(), message_id.entry_id(), message_id.batch_index())


def batched(client: Any, topic: str, bodies: list[bytes]) -> list[Any]:
    """Send one batch and return the IDs of its messages."""
    producer = client.create_producer(
        topic, batching_enabled=True, batching_max_publish_delay_ms=60_000
    )
    outcomes: list[Any] = []
    for body in bodies:
        producer.send_async(body, lambda result, stored: outcomes.append((result, stored)))
    producer.flush()
    producer.close()
    assert all(result == pulsar.Result.Ok for result, _ in outcomes)
    return [stored for _, stored in outcomes]


# -- storing


def test_an_unbatched_message_is_an_entry_and_a_batch_is_one_entry(world: Any) -> None:
    client, topic = world.client(), world.topic("t")
    first = client.create_producer(topic).send(b"x")
    ids = batched(client, topic, [b"a", b"b", b"c"])
    alone = batched(client, topic, [b"d"])[0]
    ledger = first.ledger_id()
    assert place(first) == Position(ledger, 0)
    assert [place(stored) for stored in ids] == [Position(ledger, 1, i) for i in range(3)]
    assert place(alone) == Position(ledger, 2, 0)
    assert [batch_size(stored) for stored in (first, *ids, alone)] == [0, 3, 3, 3, 1]
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    assert [place(m.message_id()) for m in world.drain(reader, 5)] == [
        place(stored) for stored in (first, *ids, alone)
    ]


def test_a_delayed_message_is_never_batched_and_overtakes_the_batch(world: Any) -> None:
    client, topic = world.client(), world.topic("t")
    producer = client.create_producer(
        topic, batching_enabled=True, batching_max_publish_delay_ms=60_000
    )
    producer.send_async(b"1", None)
    producer.send_async(b"later", None, deliver_at=world.clock.now_ms() + 60_000)
    producer.send_async(b"2", None)
    producer.flush()
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    found = world.drain(reader, 3)
    assert [m.data() for m in found] == [b"later", b"1", b"2"]
    assert [m.message_id().batch_index() for m in found] == [-1, 0, 1]


def test_a_full_batch_is_stored_and_the_rest_waits_for_flush(world: Any) -> None:
    client = world.client()
    producer = client.create_producer(
        world.topic("t"),
        batching_enabled=True,
        batching_max_messages=2,
        batching_max_publish_delay_ms=60_000,
    )
    stored: list[Any] = []
    for _ in range(5):
        producer.send_async(b"x", lambda _, message_id: stored.append(place(message_id)))
    world.eventually(lambda: len(stored) == 4)
    producer.flush()
    assert [(at.entry, at.batch) for at in stored] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]


def test_batches_by_key_have_one_key_each(world: Any) -> None:
    client, topic = world.client(), world.topic("t")
    producer = client.create_producer(
        topic,
        batching_enabled=True,
        batching_type=pulsar.BatchingType.KeyBased,
        batching_max_publish_delay_ms=60_000,
    )
    for number, key in enumerate("abab"):
        producer.send_async(b"%d" % number, None, partition_key=key)
    producer.flush()
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    assert [(m.data(), m.partition_key()) for m in world.drain(reader, 4)] == [
        (b"0", "a"),
        (b"2", "a"),
        (b"1", "b"),
        (b"3", "b"),
    ]


def test_closing_a_producer_loses_its_open_batch(world: Any) -> None:
    producer = world.client().create_producer(
        world.topic("t"), batching_enabled=True, batching_max_publish_delay_ms=60_000
    )
    outcomes: list[Any] = []
    producer.send_async(b"x", lambda result, _: outcomes.append(result))
    producer.close()
    world.eventually(lambda: outcomes)
    assert outcomes == [pulsar.Result.AlreadyClosed]
    for call in (producer.close, producer.flush, lambda: producer.send(b"")):
        with pytest.raises(pulsar.AlreadyClosed):
            call()


def test_a_batch_has_the_publish_time_of_its_first_message(world: Any) -> None:
    client, topic = world.client(), world.topic("t")
    producer = client.create_producer(
        topic, batching_enabled=True, batching_max_publish_delay_ms=60_000
    )
    before = world.clock.now_ms()
    producer.send_async(b"1", None)
    after = world.clock.now_ms()
    world.advance(timedelta(milliseconds=300))
    producer.send_async(b"2", None)
    producer.flush()
    found = world.drain(client.create_reader(topic, pulsar.MessageId.earliest), 2)
    assert all(before <= m.publish_timestamp() <= after for m in found)


def test_null_empty_key_properties_and_event_time_survive(world: Any) -> None:
    client, topic = world.client(), world.topic("t")
    producer = client.create_producer(topic)
    producer.send(None, partition_key="k")
    producer.send(b"", ordering_key="o", event_timestamp=12345, properties={"ä": "ö"})
    null, empty = world.drain(client.create_reader(topic, pulsar.MessageId.earliest), 2)
    assert (null.has_null_value(), null.data(), null.partition_key()) == (True, b"", "k")
    assert (empty.has_null_value(), empty.data(), empty.ordering_key()) == (False, b"", "o")
    assert (empty.event_timestamp(), empty.properties()) == (12345, {"ä": "ö"})
    assert (null.event_timestamp(), null.ordering_key(), null.properties()) == (0, "", {})
    assert (null.schema_version(), null.producer_name()) == ("", producer.producer_name())
    assert null.topic_name() == topic


def test_the_limit_applies_to_the_compressed_body_with_its_properties(world: Any) -> None:
    client, topic = world.client(), world.topic("t")
    producer = client.create_producer(topic)
    with pytest.raises(pulsar.MessageTooBig):
        producer.send(b"x" * (5 * 1024 * 1024 - 100), properties={"a": "b" * 100})
    producer.send(b"x" * (5 * 1024 * 1024 - 200), properties={"a": "b" * 100})
    compressing = client.create_producer(topic, compression_type=pulsar.CompressionType.LZ4)
    compressing.send(bytes(6 * 1024 * 1024))


def test_arguments_are_checked_as_in_pulsar(world: Any) -> None:
    client = world.client()
    producer = client.create_producer(world.topic("t"))
    with pytest.raises(TypeError):
        producer.send("text")
    with pytest.raises(ValueError, match="partition_key"):
        producer.send(b"", partition_key=1)
    with pytest.raises(ValueError, match="batching_enabled"):
        client.create_producer(world.topic("t"), batching_enabled="yes")
    with pytest.raises(pulsar.InvalidTopicName):
        client.create_producer("a/b")
    with pytest.raises(pulsar.TopicNotFound):
        client.create_producer("persistent://public/no-such-namespace/t")


# -- partitions


def test_keys_choose_the_partition_and_other_messages_go_round_robin(world: Any) -> None:
    client, topic = world.client(), world.topic("t")
    world.admin.create_partitioned(world.name("t"), 3)
    partitions = [f"{topic}-partition-{index}" for index in range(3)]
    assert client.get_topic_partitions(topic) == partitions
    producer = client.create_producer(topic)
    assert {producer.send(b"", partition_key="k").partition() for _ in range(4)} in (
        {0},
        {1},
        {2},
    )
    turns = [producer.send(b"").partition() for _ in range(6)]
    assert sorted(turns) == [0, 0, 1, 1, 2, 2]
    direct = client.create_producer(partitions[1])
    assert (direct.topic(), direct.send(b"direct").partition()) == (partitions[1], -1)
    reader = client.create_reader(partitions[1], pulsar.MessageId.earliest)
    last = world.drain(reader, 3)[-1]
    assert (last.data(), last.message_id().partition(), last.topic_name()) == (
        b"direct",
        1,
        partitions[1],
    )
    with pytest.raises(pulsar.TopicNotFound):
        client.create_producer(f"{topic}-partition-7")


def test_a_consumer_of_a_partitioned_topic_gets_all_partitions(world: Any) -> None:
    client, topic = world.client(), world.topic("t")
    world.admin.create_partitioned(world.name("t"), 2)
    consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
    producer = client.create_producer(topic)
    for number in range(4):
        producer.send(b"%d" % number)
    found = world.drain(consumer, 4)
    assert sorted(m.data() for m in found) == [b"0", b"1", b"2", b"3"]
    for message in found:
        consumer.acknowledge(message)
    stats = world.admin.partitioned_stats
    world.eventually(
        lambda: (
            not any(
                item.subscriptions["s"].backlog_entries for item in stats(world.name("t")).values()
            )
        )
    )


def test_a_lookup_of_partitions_creates_no_topic(world: Any) -> None:
    assert world.client().get_topic_partitions(world.topic("none")) == [world.topic("none")]
    assert not world.admin.topic_exists(world.name("none"))


# -- producers


def test_producer_names_and_access_modes_exclude_other_producers(world: Any) -> None:
    client, topic = world.client(), world.topic("t")
    first = client.create_producer(topic, producer_name="me")
    with pytest.raises(pulsar.ProducerBusy):
        client.create_producer(topic, producer_name="me")
    first.close()
    modes = pulsar.ProducerAccessMode
    exclusive = client.create_producer(topic, producer_name="me", access_mode=modes.Exclusive)
    with pytest.raises(pulsar.ProducerBusy):
        client.create_producer(topic)
    with pytest.raises(pulsar.ProducerFenced):
        client.create_producer(topic, access_mode=modes.Exclusive)
    client.create_producer(topic, access_mode=modes.ExclusiveWithFencing)
    with pytest.raises(pulsar.ProducerFenced):
        exclusive.send(b"")


def test_sequence_ids_count_from_zero(world: Any) -> None:
    producer = world.client().create_producer(world.topic("t"))
    assert producer.last_sequence_id() == -1
    producer.send(b"")
    assert producer.last_sequence_id() == 0
    producer.send(b"", sequence_id=7)
    assert producer.last_sequence_id() == 7
    producer.send(b"")
    assert producer.last_sequence_id() == 1  # an ID from the application does not count


def test_a_closed_client_closes_its_producers_and_consumers(world: Any) -> None:
    client, topic = world.client(), world.topic("t")
    producer = client.create_producer(topic)
    consumer = client.subscribe(topic, "s")
    assert producer.is_connected()
    client.close()
    assert not producer.is_connected()
    for call in (
        lambda: client.create_producer(topic),
        lambda: producer.send(b""),
        lambda: consumer.receive(10),
    ):
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
    world: Any, index: int, inclusive: bool, expected: bytes
) -> None:
    client, topic = world.client(), world.topic("t")
    first = batched(client, topic, [b"a", b"b", b"c"])[0]
    client.create_producer(topic).send(b"d")
    start = pulsar.MessageId(-1, first.ledger_id(), first.entry_id(), index)
    reader = client.create_reader(topic, start, start_message_id_inclusive=inclusive)
    assert b"".join(world.bodies(reader, len(expected))) == expected


def test_readers_detect_further_messages(world: Any) -> None:
    client, topic = world.client(), world.topic("t")
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    assert not reader.has_message_available()
    with pytest.raises(pulsar.Timeout):
        reader.read_next(100)
    producer = client.create_producer(topic)
    producer.send(b"1")
    assert reader.has_message_available()
    assert world.receive(reader).data() == b"1"
    assert not reader.has_message_available()
    latest = client.create_reader(topic, pulsar.MessageId.latest)
    assert not latest.has_message_available()
    producer.send(b"2")
    assert world.bodies(latest, 1) == [b"2"]
    reader.close()
    with pytest.raises(pulsar.AlreadyClosed):
        reader.read_next(10)


# -- subscriptions


def test_unacknowledged_messages_are_redelivered(world: Any) -> None:
    client, topic = world.client(), world.topic("t")
    consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
    producer = client.create_producer(topic)
    for number in range(4):
        producer.send(b"%d" % number)
    found = world.drain(consumer, 4)
    assert [m.data() for m in found] == [b"0", b"1", b"2", b"3"]
    consumer.acknowledge(found[1])
    consumer.close()
    consumer = client.subscribe(topic, "s")
    found = world.drain(consumer, 3)
    assert [m.data() for m in found] == [b"0", b"2", b"3"]
    consumer.redeliver_unacknowledged_messages()
    found = world.drain(consumer, 3)
    assert [(m.data(), m.redelivery_count()) for m in found] == [(b"0", 0), (b"2", 0), (b"3", 0)]
    consumer.acknowledge_cumulative(found[1])
    consumer.close()
    assert world.bodies(client.subscribe(topic, "s"), 1) == [b"3"]


def test_a_batch_is_acknowledged_with_its_last_message(world: Any) -> None:
    client, topic = world.client(), world.topic("t")
    consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
    batched(client, topic, [b"a", b"b", b"c"])
    found = world.drain(consumer, 3)
    consumer.acknowledge(found[0])
    consumer.acknowledge(found[1])
    consumer.close()
    consumer = client.subscribe(topic, "s")
    found = world.drain(consumer, 3)
    assert len(found) == 3
    consumer.acknowledge_cumulative(found[1])
    consumer.close()
    consumer = client.subscribe(topic, "s")
    found = world.drain(consumer, 3)
    assert len(found) == 3
    for message in found:
        consumer.acknowledge(message)
    consumer.close()
    assert world.bodies(client.subscribe(topic, "s"), 0) == []


def test_an_entry_is_acknowledged_by_its_bare_id_without_being_received(world: Any) -> None:
    client, topic, name = world.client(), world.topic("t"), world.name("t")
    consumer = client.subscribe(topic, "s", initial_position=EARLIEST, receiver_queue_size=0)
    batched(client, topic, [b"a", b"b"])
    second = batched(client, topic, [b"c", b"d"])[0]
    batched(client, topic, [b"e"])
    ledger = second.ledger_id()
    assert world.admin.mark_delete_position(name, "s") == Position(ledger, -1)
    consumer.acknowledge_cumulative(pulsar.MessageId(-1, ledger, second.entry_id(), -1))
    done = Position(ledger, second.entry_id())
    world.eventually(lambda: world.admin.mark_delete_position(name, "s") == done)
    consumer.close()
    assert world.bodies(client.subscribe(topic, "s"), 1) == [b"e"]


def test_an_exclusive_subscription_has_one_consumer(world: Any) -> None:
    client, topic = world.client(), world.topic("t")
    first = client.subscribe(topic, "s", consumer_name="one")
    with pytest.raises(pulsar.ConsumerBusy):
        client.subscribe(topic, "s")
    with pytest.raises(pulsar.ConsumerBusy):
        client.subscribe(topic, "s", consumer_type=ConsumerType.Shared)
    stats = world.admin.partition_stats(world.name("t")).subscriptions["s"]
    assert (stats.type, [c.name for c in stats.consumers]) == ("Exclusive", ["one"])
    first.close()
    for call in (lambda: first.receive(10), lambda: first.acknowledge(pulsar.MessageId.earliest)):
        with pytest.raises(pulsar.AlreadyClosed):
            call()
    second = client.subscribe(topic, "s")
    second.unsubscribe()
    assert "s" not in world.admin.partition_stats(world.name("t")).subscriptions


def test_shared_consumers_share_and_count_redeliveries(world: Any) -> None:
    client, topic = world.client(), world.topic("t")
    consumer = client.subscribe(
        topic, "s", consumer_type=ConsumerType.Shared, negative_ack_redelivery_delay_ms=200
    )
    producer = client.create_producer(topic)
    for number in range(3):
        producer.send(b"%d" % number)
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
    later = client.subscribe(topic, "s", consumer_type=ConsumerType.Shared)
    left = world.drain(later, 2)
    assert sorted((m.data(), m.redelivery_count()) for m in left) == sorted(
        (m.data(), 0) for m in found[1:]
    )


def test_failover_has_one_consumer_at_a_time(world: Any) -> None:
    client, topic = world.client(), world.topic("t")
    consumers = [
        client.subscribe(topic, "s", ConsumerType.Failover, initial_position=EARLIEST)
        for _ in range(2)
    ]
    producer = client.create_producer(topic)
    for number in range(3):
        producer.send(b"%d" % number)
    got: dict[int, list[bytes]] = {0: [], 1: []}

    def all_there() -> bool:
        for index, consumer in enumerate(consumers):
            got[index] += world.bodies(consumer, 0)
        return sum(map(len, got.values())) >= 3

    world.eventually(all_there)
    active = 0 if got[0] else 1
    assert (got[active], got[1 - active]) == ([b"0", b"1", b"2"], [])
    consumers[active].close()
    assert world.bodies(consumers[1 - active], 3) == [b"0", b"1", b"2"]


def test_key_shared_keeps_a_key_with_one_consumer(world: Any) -> None:
    client, topic = world.client(), world.topic("t")
    consumers = [client.subscribe(topic, "s", ConsumerType.KeyShared) for _ in range(2)]
    producer = client.create_producer(topic)
    for number in range(40):
        producer.send(b"%02d" % (number // 10), partition_key=f"key-{number % 10}")
    found: list[list[Any]] = [[], []]

    def all_there() -> bool:
        for messages, consumer in zip(found, consumers, strict=True):
            messages += world.drain(consumer, 0)
        return sum(map(len, found)) >= 40

    world.eventually(all_there)
    keys = [{m.partition_key() for m in messages} for messages in found]
    assert not keys[0] & keys[1]
    assert sum(map(len, found)) == 40
    for messages in found:
        for key in {m.partition_key() for m in messages}:
            assert [m.data() for m in messages if m.partition_key() == key] == [
                b"00",
                b"01",
                b"02",
                b"03",
            ]


def test_only_shared_types_delay_a_message(world: Any) -> None:
    client, topic = world.client(), world.topic("t")
    kinds = (ConsumerType.Exclusive, ConsumerType.Shared, ConsumerType.KeyShared)
    consumers = {
        kind: client.subscribe(topic, str(kind), kind, initial_position=EARLIEST) for kind in kinds
    }
    producer = client.create_producer(topic)
    due_ms = world.clock.now_ms() + 2500
    producer.send(b"later", deliver_at=due_ms)
    producer.send(b"even later", deliver_after=timedelta(hours=1))
    producer.send(b"now")
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    assert world.bodies(reader, 3) == [b"later", b"even later", b"now"]
    assert world.bodies(consumers[ConsumerType.Exclusive], 3) == [b"later", b"even later", b"now"]
    got = {kind: world.drain(consumers[kind], 1) for kind in kinds[1:]}
    held_back = world.clock.now_ms() < due_ms - world.early_ms
    if held_back:  # false after a pause of the machine
        assert all([m.data() for m in found] == [b"now"] for found in got.values())
    world.advance(timedelta(milliseconds=max(0, due_ms - world.clock.now_ms())))
    for kind, found in got.items():
        found += world.drain(consumers[kind], 2 - len(found))
        assert sorted((m.data(), m.redelivery_count()) for m in found) == [
            (b"later", 0),
            (b"now", 0),
        ]


def test_a_new_subscription_starts_behind_the_last_message(world: Any) -> None:
    client, topic = world.client(), world.topic("t")
    producer = client.create_producer(topic)
    stored = [producer.send(b"%d" % number) for number in range(3)]
    consumer = client.subscribe(topic, "s")
    assert world.bodies(consumer, 0) == []
    consumer.seek(stored[1])
    assert world.bodies(consumer, 1) == [b"2"]
    consumer.seek(pulsar.MessageId.earliest)
    assert world.bodies(consumer, 3) == [b"0", b"1", b"2"]
    assert place(consumer.get_last_message_id()) == place(stored[2])


def test_a_listener_is_called(world: Any) -> None:
    client, topic = world.client(), world.topic("t")
    seen: list[bytes] = []

    def listen(consumer: Any, message: Any) -> None:
        seen.append(message.data())
        consumer.acknowledge(message)

    client.subscribe(topic, "s", message_listener=listen)
    client.create_producer(topic).send(b"x")
    world.eventually(lambda: seen == [b"x"])
    backlog = world.admin.partition_stats
    world.eventually(lambda: not backlog(world.name("t")).subscriptions["s"].backlog_entries)


# -- schemas


class First(Record):  # type: ignore[misc]
    name = String()


class Second(Record):  # type: ignore[misc]
    name = String()
    age = Integer(required_default=True)


class Fuller(Record):  # type: ignore[misc]
    name = String()
    age = Integer(required_default=True)
    town = String()  # old data lacks the field, and there is no default


class Broken(Record):  # type: ignore[misc]
    name = String()
    age = Integer(required=True)


for record in (First, Second, Fuller, Broken):
    record.__name__ = "Person"


@pytest.mark.parametrize("schema", [AvroSchema, JsonSchema])
def test_schemas_have_versions_and_incompatible_ones_are_refused(world: Any, schema: Any) -> None:
    client, topic, name = world.client(), world.topic("t"), world.name("t")
    client.create_producer(topic, schema=schema(First)).send(First(name="Ada"))
    client.create_producer(topic, schema=schema(Second)).send(Second(name="Bob", age=3))
    client.create_producer(topic, schema=schema(First)).send(First(name="Cleo"))
    client.create_producer(topic).send(b"raw")
    for wrong in (schema(Fuller), schema(Broken), StringSchema()):
        with pytest.raises(pulsar.IncompatibleSchema):
            client.create_producer(topic, schema=wrong)
        with pytest.raises(pulsar.IncompatibleSchema):
            client.subscribe(topic, "wrong", schema=wrong)
    reader = client.create_reader(topic, pulsar.MessageId.earliest, schema=schema(Second))
    found = world.drain(reader, 4)
    versions = [bytes(m.schema_version(), "latin-1") for m in found]
    zero, one = (0).to_bytes(8, "big"), (1).to_bytes(8, "big")
    assert versions == [zero, one, zero, b""]
    assert [(m.value().name, m.value().age) for m in found[:3]] == [
        ("Ada", None),
        ("Bob", 3),
        ("Cleo", None),
    ]
    kind = schema(First).schema_info().schema_type().name
    assert [(s.type, s.version) for s in world.admin.schemas(name)] == [(kind, 0), (kind, 1)]


def test_plain_bytes_are_not_a_schema(world: Any) -> None:
    client, topic, name = world.client(), world.topic("t"), world.name("t")
    client.create_producer(topic).send(b"x")
    assert world.admin.schemas(name) == []
    with pytest.raises(pulsar.IncompatibleSchema):
        client.subscribe(topic, "s", schema=StringSchema())
    client.create_producer(topic, schema=StringSchema()).send("é")
    assert [s.type for s in world.admin.schemas(name)] == ["STRING"]
    consumer = client.subscribe(topic, "s", schema=StringSchema(), initial_position=EARLIEST)
    assert [m.data() for m in world.drain(consumer, 2)] == [b"x", "é".encode()]
    client.subscribe(world.topic("idle"), "s", schema=StringSchema())
    assert [s.type for s in world.admin.schemas(world.name("idle"))] == ["STRING"]


# -- topics that end


def test_a_terminated_topic_accepts_no_more_messages(world: Any) -> None:
    client, topic = world.client(), world.topic("t")
    producer = client.create_producer(topic)
    producer.send(b"last")
    consumer = client.subscribe(topic, "s", initial_position=EARLIEST)
    world.admin.terminate(world.name("t"))
    with pytest.raises(pulsar.TopicTerminated):
        producer.send(b"more")
    with pytest.raises(pulsar.TopicTerminated):
        client.create_producer(topic)
    assert world.bodies(consumer, 1) == [b"last"]


def test_a_topic_in_use_is_deleted_only_by_force_and_recreated(world: Any) -> None:
    client, topic, name = world.client(), world.topic("t"), world.name("t")
    producer = client.create_producer(topic, schema=StringSchema())
    old = producer.send("1")
    client.subscribe(topic, "connected", initial_position=EARLIEST)
    client.subscribe(topic, "closed").close()
    with pytest.raises(ConflictError):
        world.admin.delete(name)
    world.admin.delete(name, force=True)
    new = producer.send("2")
    assert place(new) != place(old)
    world.eventually(lambda: set(world.admin.partition_stats(name).subscriptions) == {"connected"})
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    assert world.bodies(reader, 1) == [b"2"]
    assert [s.version for s in world.admin.schemas(name)] == [0]


def test_a_deleted_partitioned_topic_is_recreated_without_its_partitions(world: Any) -> None:
    client, topic, name = world.client(), world.topic("t"), world.name("t")
    world.admin.create_partitioned(name, 2)
    client.create_producer(topic).close()
    world.admin.delete(name)
    assert not world.admin.topic_exists(name)
    assert not world.admin.topic_exists(name.partition(0))
    client.create_producer(name.partition(0).full).send(b"x")
    assert world.admin.topic_exists(name.partition(0))
    assert not world.admin.topic_exists(name)


# -- the admin port


def test_the_admin_finds_positions_by_publish_time(world: Any) -> None:
    client, topic, name = world.client(), world.topic("t"), world.name("t")
    producer = client.create_producer(topic)
    with pytest.raises(NotFoundError):
        world.admin.last_message_id(world.name("none"))
    assert world.admin.last_message_id(name) is None
    assert world.admin.message_id_at(name, 0) is None
    times, stored, after = [], [], []
    for number in range(3):
        times.append(world.clock.now_ms())
        stored.append(place(producer.send(b"%d" % number)))
        after.append(world.clock.now_ms())
        world.advance(timedelta(milliseconds=20))
    assert world.admin.last_message_id(name) == stored[-1]
    for at, time_ms, after_ms in zip(stored, times, after, strict=True):
        assert world.admin.message_id_at(name, time_ms) == at
        ((found, published_ms),) = entry_times(client, topic, at, at)
        assert found == at
        assert time_ms <= published_ms <= after_ms
    assert entry_times(client, topic, stored[-1].next_entry, stored[-1].next_entry) == []
    behind = world.admin.message_id_at(name, world.clock.now_ms() + 1000)
    assert behind is None or behind > stored[-1]
    last = batched(client, topic, [b"a", b"b"])[-1]
    assert world.admin.last_message_id(name) == place(last)
    assert sum(item.entries for item in world.admin.ledgers(name)) == 4


def test_the_admin_creates_once_and_reports_existing_topics(world: Any) -> None:
    name, absent = world.name("t"), world.name("absent")
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
        lambda: world.admin.partitioned_metadata(absent),
        lambda: world.admin.create_subscription(absent, "s"),
        lambda: world.admin.partition_stats(absent),
        lambda: world.admin.mark_delete_position(name.partition(0), "other"),
        lambda: world.admin.namespace_policies("public/absent"),
        lambda: world.admin.list_partitioned_topics("public/absent"),
    ):
        with pytest.raises(NotFoundError):
            call()
    assert not world.admin.topic_exists(absent)
    assert world.admin.schemas(absent) == []


def test_a_topic_is_expanded_with_its_subscriptions(world: Any) -> None:
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
    with pytest.raises(NotFoundError):
        world.admin.expand(world.name("absent"), 3)
    assert not world.admin.topic_exists(world.name("absent"))


def test_the_admin_reports_acknowledgements_behind_the_mark_delete_position(world: Any) -> None:
    name = world.name("t").partition(0)
    world.admin.create_partitioned(world.name("t"), 1)
    world.admin.create_subscription(world.name("t"), "s")
    client = world.client()
    producer = client.create_producer(name.full, batching_enabled=False)
    ids = [producer.send(b"x") for _ in range(8)]
    consumer = client.subscribe(name.full, "s")
    for number in (0, 2, 3, 6):
        consumer.acknowledge(ids[number])

    def acknowledged() -> list[int]:
        ranges = world.admin.acknowledged_ranges(name, "s")
        return [
            number
            for number, item in enumerate(ids)
            if any(Position(item.ledger_id(), item.entry_id()) in each for each in ranges)
        ]

    world.eventually(lambda: acknowledged() == [2, 3, 6])
    with pytest.raises(NotFoundError):
        world.admin.acknowledged_ranges(name, "other")


def test_the_broker_tells_the_access_mode_and_properties_of_a_producer(world: Any) -> None:
    exclusive = pulsar.ProducerAccessMode.Exclusive
    producer = world.client().create_producer(
        world.topic("t"), access_mode=exclusive, properties={"team": "a"}
    )
    (seen,) = world.admin.partition_stats(world.name("t")).publishers
    assert (seen.name, seen.access_mode) == (producer.producer_name(), "Exclusive")
    assert seen.properties == {"team": "a"}
