"""Tests of sending listed messages again."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from pulsar.schema import AvroSchema, Integer, Record, String

from delaylevel.model.strategy import Levels, PartitionStrategy
from support.fakes import HandClock
from support.world import RealWorld

pytest.importorskip("duckdb")

DAYS = Levels(PartitionStrategy(maximum_delay=timedelta(days=10)))


def rows(invoke: Callable[..., Result], topic: str) -> list[dict[str, Any]]:
    """Return the pending messages with their payloads."""
    listed = invoke("pending", "list", topic, "--limit", "0", "--payload", "-o", "jsonl")
    return [json.loads(line) for line in listed.stdout.splitlines()]


class First(Record):
    """The first version of a schema."""

    _avro_name = "Order"
    number = Integer()


class Second(Record):
    """A later version: a field in front of the others."""

    _avro_name = "Order"
    note = String(required_default=True)
    number = Integer()


def test_listed_messages_keep_the_version_of_their_schema(
    world: RealWorld, invoke: Callable[..., Result], tmp_path: Path, clock: HandClock
) -> None:
    described = world.level_topic(DAYS)
    (orders,) = described.targets
    client, plain = world.client(), world.plain_client
    for schema, record in (
        (AvroSchema(First), First(number=1)),
        (AvroSchema(Second), Second(number=2)),
    ):
        with client.create_producer(
            orders, schema=schema, enable_delay_level_topic=True
        ) as producer:
            fields = {"partition_key": "k", "ordering_key": "o", "event_timestamp": 1234}
            for value in (record, None):
                producer.send(value, deliver_after=timedelta(days=3), **fields)
    consumer = plain.subscribe(orders, "app", schema=AvroSchema(Second))
    file = tmp_path / "pending.jsonl"
    before = rows(invoke, orders)
    lines = list(before)
    assert len(lines) == 4
    # One that is due already goes straight to its topic, and one has a schema that nobody knows.
    past = {**lines[0], "due_ms": world.clock.now_ms() - 1000}
    properties = {**lines[0]["properties"], "delaylevel.schema": "AVRO:0123456789abcdef"}
    lines += [past, {**lines[0], "properties": properties}]
    file.write_text("\n".join(map(json.dumps, lines)), "utf-8")

    sent = invoke("send", orders, "--jsonl", str(file), "-o", "json")
    assert sent.exit_code == 1, sent.output
    *stored, refused = json.loads(sent.stdout)
    assert {row["outcome"] for row in stored} == {"stored"}
    assert refused["outcome"] == "failed"
    assert "consumers could not decode it" in refused["reason"]
    again = rows(invoke, orders)
    kept = ("id", "due_ms", "key", "ordering_key", "event_ms", "value_base64", "properties")

    def identified(found: list[dict[str, Any]]) -> list[str]:
        for row in found:
            row["properties"]["delaylevel.id"] = row["id"]
        return sorted(json.dumps([row[name] for name in kept], sort_keys=True) for row in found)

    assert identified(again) == sorted(2 * identified(before))
    clock.advance(4 * 86_400_000)
    world.mover(described, clock).run_once()
    received = [consumer.receive(20_000) for _ in range(9)]
    numbers = sorted(one.value().number for one in received if not one.has_null_value())
    assert numbers == [1, 1, 1, 2, 2]
    assert {one.value().note for one in received if not one.has_null_value()} == {None}
