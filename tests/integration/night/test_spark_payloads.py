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
LARGEST = 5 * 1024 * 1024 - 40 * 1024


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
    schemas = {"json": JsonSchema, "avro": AvroSchema}
    made = world.client()

    def producer(name: str, **options: Any) -> Any:
        given = {"enable_delay_level_topic": True, "delay_level_topic": description.topic}
        return made.create_producer(topics[name], **given, **options)

    def fields(number: int) -> tuple[str, str, int]:
        """Return key, ordering key and event time of a message."""
        ordering = f"ordering {number}" if number % 3 else ""
        event_ms = 0 if number % 2 else 1_000_000_000_000 + number
        return f"key \u2713 {number}" if number % 2 else "", ordering, event_ms

    with spark_job(description) as job:
        job.ready()
        raw = producer("bytes")
        received = {"delaylevel.id": "old", "delaylevel.due": "1", "delaylevel.x": "y"}
        for number, (name, value) in enumerate(PAYLOADS.items()):
            key, ordering, event_ms = fields(number)
            raw.send(
                value,
                {**PROPERTIES, **received, "name": name},
                key or None,
                ordering or None,
                event_timestamp=event_ms or None,
                deliver_after=DELAY,
                message_id=f"mine-{name}" if number % 2 else None,
            )
        producer("texts", schema=StringSchema()).send("caf\u00e9 \u2713", deliver_after=DELAY)
        for name, schema in schemas.items():
            old, new = producer(name, schema=schema(Price1)), producer(name, schema=schema(Price2))
            # With and without a delay: consumers see the same version.
            for amount, delay in ((1, DELAY), (100, None)):
                old.send(Price1(amount=amount), partition_key="k", deliver_after=delay)
                new.send(Price2(amount=amount, currency="CHF"), deliver_after=delay)

        raw_arrivals = world.arrivals(topics["bytes"], consumer_type=ALONE)(len(PAYLOADS))
        texts = world.arrivals(topics["texts"], consumer_type=ALONE, schema=StringSchema())(1)
        records = {
            name: world.arrivals(topics[name], consumer_type=ALONE, schema=schema(Price2))(4)
            for name, schema in schemas.items()
        }
        world.drained(description)

    through_fine = world.stored(description.level_topic(1).full)
    assert {m.properties["name"] for m in through_fine if "name" in m.properties} == set(PAYLOADS)
    assert world.stored(description.dead_letter_topic.full) == []
    assert world.stored(description.held_topic.full) == []

    by_name = {a.message.properties()["name"]: a.message for a in raw_arrivals}
    for number, (name, value) in enumerate(PAYLOADS.items()):
        message = by_name[name]
        assert (message.has_null_value(), message.data()) == (value is None, value or b""), name
        found = message.partition_key(), message.ordering_key(), message.event_timestamp()
        assert found == fields(number), name
        properties = message.properties()
        identity, due = properties.pop("delaylevel.id"), properties.pop("delaylevel.due")
        own = {**PROPERTIES, "name": name}
        assert properties == {**own, "delaylevel.target": topics["bytes"]}
        assert int(due) > 1_600_000_000_000
        # The position where it was first stored: in the coarse level.
        place = f"mine-{name}" if number % 2 else f"/{description.name.local}-partition-"
        assert place in identity

    assert [a.message.value() for a in texts] == ["caf\u00e9 \u2713"]
    for name, arrivals in records.items():
        assert len(world.admin.schemas(TopicName.parse(topics[name]))) == 2, name
        seen: dict[bytes, list[tuple[int, str | None]]] = {}
        for arrival in arrivals:
            price = arrival.message.value()
            version = arrival.message._message.schema_version()
            seen.setdefault(version, []).append((price.amount, price.currency))
        found = sorted(map(sorted, seen.values()), key=str)
        assert found == [[(1, "CHF"), (100, "CHF")], [(1, None), (100, None)]], name
