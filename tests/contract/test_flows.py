"""The path of a message from the wrapper to the consumer: the same in memory and on a broker."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from pulsar import ConsumerType, InitialPosition
from pulsar.schema import Integer, JsonSchema, Record

from delaylevel import PartitionStrategy, wrap
from delaylevel.cluster.schemas import EncodedSchema, find, reference_to
from delaylevel.errors import BrokerUnreachableError
from delaylevel.model import envelope as env
from delaylevel.model.envelope import SchemaRef
from delaylevel.model.level_topic import default_level_topic
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import ManualClock
from support.world import World

DAYS = PartitionStrategy(maximum_delay=timedelta(days=3))
TWO_LEVELS = [
    PartitionStrategy(partition_by=timedelta(seconds=3), maximum_delay=timedelta(seconds=9)),
    PartitionStrategy(partition_by=timedelta(seconds=1), maximum_delay=timedelta(seconds=4)),
]


def test_messages_pass_two_levels_on_time_and_unchanged(world: World) -> None:
    orders, earliest = world.topic("orders"), InitialPosition.Earliest
    consumer = world.client().subscribe(
        orders, "app", ConsumerType.Shared, initial_position=earliest
    )
    start_ms = world.clock.now_ms()
    # The producer's clock is fixed, so all messages have the same send time.
    clock, options = ManualClock(start_ms), {"final_window": "broker"}  # no dispatcher runs
    producer = world.producer(orders, clock, partition_strategy=TWO_LEVELS, **options)
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
    plain, _ = arrived.pop("0")
    assert plain.properties() == {"own": "ä"}
    assert arrived["null"][0].has_null_value()
    assert not arrived["empty"][0].has_null_value()
    ids = {name: message.properties().get(env.ID) for name, (message, _) in arrived.items()}
    assert ids.pop("300") is ids.pop("999") is None, "the broker delays them in their topic"
    assert len(set(ids.values())) == 10
    assert ids["007"] == "mine"
    assert "stale" not in ids.values()
    assert f"{world.namespace}/_orders-delay-level-partition-" in ids["7300"]
    for name in arrived.keys() - {"null", "empty", "007"}:
        (message, at_ms), due_ms = arrived[name], start_ms + int(name)
        assert message.properties()["own"] == "ä"
        assert message.properties()[env.DUE] == str(due_ms)
        assert (message.partition_key(), message.event_timestamp() - 1) == (
            f"key-{name}",
            int(name),
        )
        assert -world.early_ms <= at_ms - due_ms <= world.late_ms


class Order(Record):  # type: ignore[misc]
    number = Integer()


@pytest.mark.parametrize("wrapped", [False, True])
def test_no_producer_opens_without_the_text_of_its_schema_in_the_registry(
    world: World, monkeypatch: pytest.MonkeyPatch, wrapped: bool
) -> None:
    """With a reference to another text, its messages would be held for ever."""
    client, admin, schema, orders = world.client(), world.admin, JsonSchema(Order), "orders"
    own = json.loads(schema.schema_info().schema())
    noted = EncodedSchema("JSON", json.dumps({"doc": "An order of the shop", **own}))
    client.subscribe(world.topic(orders), "app", schema=noted)

    def create() -> Any:
        if wrapped:
            plain = client.create_producer(world.topic(orders), schema=schema)
            return wrap(plain, client, partition_strategy=DAYS)
        options = {"enable_delay_level_topic": True, "partition_strategy": DAYS}
        return client.create_producer(world.topic(orders), schema=schema, **options)

    def away(*_: Any) -> Any:
        raise BrokerUnreachableError("nobody answers")

    with monkeypatch.context() as patch:
        patch.setattr(type(admin), "schemas", away)
        with pytest.raises(BrokerUnreachableError):
            create()
    levels = default_level_topic(world.topic(orders))
    assert not admin.topic_exists(TopicName.parse(levels))
    create().send(Order(number=7), deliver_after=timedelta(days=2))
    (message,) = world.stored(levels)
    named = SchemaRef.parse(message.properties[env.SCHEMA])
    (version,) = admin.schemas(world.name(orders))
    assert named == SchemaRef.of("JSON", version.definition) != reference_to(schema)
    assert find(admin, world.name(orders), named) is not None
