"""Tests of payloads: messages pass two levels and Spark without a change, to the byte."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pulsar
import pytest
from pulsar.schema import AvroSchema, Integer, JsonSchema, Record, String, StringSchema

from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from support.world import RealWorld

pytestmark = [pytest.mark.spark, pytest.mark.broker]

STAY = timedelta(milliseconds=300)
HOUR = timedelta(hours=1)
LESS = timedelta(minutes=50)
# The lead is nearly the unit: the stay in each level is short, but the due time is far off. So
# every message passes both levels, however slow the machine is.
TWO_LEVELS = Levels(
    [
        PartitionStrategy(partition_by=HOUR, maximum_delay=2 * HOUR, lead=HOUR - STAY),
        PartitionStrategy(partition_by=LESS, maximum_delay=2 * LESS, lead=LESS - STAY),
    ]
)
DELAY = timedelta(minutes=70)
# An Exclusive consumer gets messages without a wait for their due times.
ALONE = pulsar.ConsumerType.Exclusive
LARGEST = 5 * 1024 * 1024 - 10 * 1024


class Price1(Record):
    amount = Integer(required=True)


class Price2(Record):
    amount = Integer(required=True)
    currency = String(required_default=True)


# pulsar names an Avro record after its class; these two are versions of one record.
Price1.__name__ = Price2.__name__ = "Price"

PAYLOADS: dict[str, bytes | None] = {
    "null": None,
    "empty": b"",
    "number": b"007",
    "one byte": b"\x00",
    "all bytes": bytes(range(256)),
    "not UTF-8": b"\xff\xfe\x80",
    "text": "über \u2713".encode(),
    "64 KiB": random.Random(1).randbytes(64 * 1024),
    "1 MiB": random.Random(2).randbytes(1024 * 1024),
    "largest": random.Random(3).randbytes(LARGEST),
}
PROPERTIES = {
    "plain": "1",
    "": "an empty name",
    "empty": "",
    "unicode \u2713": "\u00fc\n\t",
    "long": "x" * 2000,
}


def test_every_field_survives_both_levels(world: RealWorld, spark_job: Callable[..., Any]) -> None:
    description = world.level_topic(TWO_LEVELS, ("bytes", "texts", "json", "avro"))
    topics = {topic.rpartition("/")[2]: topic for topic in description.targets}
    made = world.client()

    def producer(name: str, **options: Any) -> Any:
        return made.create_producer(
            topics[name],
            enable_delay_level_topic=True,
            delay_level_topic=description.topic,
            **options,
        )

    with spark_job(description) as job:
        job.ready()
        raw = producer("bytes")
        received = {"delaylevel.id": "old", "delaylevel.due": "1", "delaylevel.x": "y"}
        for number, (name, value) in enumerate(PAYLOADS.items()):
            raw.send(
                value,
                {**PROPERTIES, **received, "name": name},
                f"key \u2713 {number}" if number % 2 else None,
                f"ordering {number}" if number % 3 else None,
                event_timestamp=1_000_000_000_000 + number if number % 2 == 0 else None,
                deliver_after=DELAY,
                message_id=f"mine-{name}" if number % 2 else None,
            )
        raw.send(b"bare", deliver_after=DELAY)
        producer("texts", schema=StringSchema()).send("caf\u00e9 \u2713", deliver_after=DELAY)
        for name, schema in (("json", JsonSchema), ("avro", AvroSchema)):
            old, new = producer(name, schema=schema(Price1)), producer(name, schema=schema(Price2))
            for amount in range(4):
                old.send(Price1(amount=amount), partition_key="k", deliver_after=DELAY)
                new.send(Price2(amount=amount, currency="CHF"), deliver_after=DELAY)
        # Undelayed messages, for the schema versions that consumers see without the package.
        for name, schema in (("json", JsonSchema), ("avro", AvroSchema)):
            producer(name, schema=schema(Price1)).send(Price1(amount=100))
            producer(name, schema=schema(Price2)).send(Price2(amount=200, currency="USD"))

        raw_arrivals = world.arrivals(topics["bytes"], consumer_type=ALONE)(len(PAYLOADS) + 1)
        texts = world.arrivals(topics["texts"], consumer_type=ALONE, schema=StringSchema())(1)
        records = {
            name: world.arrivals(topics[name], consumer_type=ALONE, schema=schema(Price2))(10)
            for name, schema in (("json", JsonSchema), ("avro", AvroSchema))
        }
        world.drained(description)

    # By way of both levels.
    assert all(any(world.stored(description.level_topic(level).full)) for level in range(2))
    through_fine = world.stored(description.level_topic(1).full)
    assert {m.properties["name"] for m in through_fine if "name" in m.properties} == set(PAYLOADS)
    assert world.stored(description.dead_letter_topic.full) == []
    assert world.stored(description.held_topic.full) == []

    bare = [a.message for a in raw_arrivals if a.message.data() == b"bare"]
    assert set(bare[0].properties()) == {
        "delaylevel.id",
        "delaylevel.due",
        "delaylevel.target",
    }
    by_name = {a.message.properties().get("name"): a.message for a in raw_arrivals}
    for number, (name, value) in enumerate(PAYLOADS.items()):
        message = by_name[name]
        assert message.has_null_value() == (value is None), name
        assert message.data() == (value or b""), name
        assert message.partition_key() == (f"key \u2713 {number}" if number % 2 else ""), name
        assert message.ordering_key() == (f"ordering {number}" if number % 3 else ""), name
        expected_ms = 1_000_000_000_000 + number if number % 2 == 0 else 0
        assert message.event_timestamp() == expected_ms, name
        properties = message.properties()
        identity, due = properties.pop("delaylevel.id"), properties.pop("delaylevel.due")
        assert properties.pop("delaylevel.target") == topics["bytes"]
        assert properties == {**PROPERTIES, "name": name}
        assert int(due) > 1_600_000_000_000
        if number % 2:
            assert identity == f"mine-{name}"
        else:
            # The position where it was first stored: in the coarse level.
            assert f"/{description.name.local}-partition-" in identity

    assert [a.message.value() for a in texts] == ["caf\u00e9 \u2713"]
    for name, arrivals in records.items():
        versions = world.admin.schemas(TopicName.parse(topics[name]))
        assert len(versions) == 2, name
        seen: dict[bytes, set[str | None]] = {}
        for arrival in arrivals:
            price = arrival.message.value()
            seen.setdefault(arrival.message._message.schema_version(), set()).add(price.currency)
            if price.amount < 100:
                assert "delaylevel.id" in arrival.message.properties()
        amounts = sorted(a.message.value().amount for a in arrivals)
        assert amounts == [0, 0, 1, 1, 2, 2, 3, 3, 100, 200]
        # The delayed messages of each version have the schema version of the undelayed one.
        found = sorted(sorted(map(str, currencies)) for currencies in seen.values())
        assert found == [["CHF", "USD"], ["None"]], name
