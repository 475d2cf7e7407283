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

from delaylevel.model.level_topic import FinalWindow
from delaylevel.model.strategy import Levels, PartitionStrategy
from support.fakes import HandClock
from support.world import RealWorld

pytest.importorskip("duckdb")

DAYS = Levels(PartitionStrategy(maximum_delay=timedelta(days=10)))


def rows(invoke: Callable[..., Result], topic: str) -> list[dict[str, Any]]:
    """Return the pending messages with their payloads."""
    listed = invoke("pending", "list", topic, "--limit", "0", "--payload", "-o", "jsonl")
    return [json.loads(line) for line in listed.stdout.splitlines()]


def test_listed_messages_are_sent_again_as_they_were(
    world: RealWorld, invoke: Callable[..., Result], tmp_path: Path
) -> None:
    names = ("orders", "invoices")
    described = world.level_topic(DAYS, names, final_window=FinalWindow.TRACKER)
    orders, invoices = map(world.topic, names)
    client = world.client()
    for target in described.targets:
        with client.create_producer(
            target, enable_delay_level_topic=True, delay_level_topic=described.topic
        ) as producer:
            producer.send(
                b"\x00\xff",
                {"kind": "reminder"},
                partition_key="k",
                ordering_key="o",
                event_timestamp=1234,
                deliver_after=timedelta(days=3),
                expires_after=timedelta(hours=1),
                message_id=f"own-{target[-3:]}",
            )
            producer.send(None, deliver_after=timedelta(days=2))
    before = rows(invoke, orders)
    assert len(before) == 4
    file = tmp_path / "pending.jsonl"
    file.write_text("\n".join(map(json.dumps, before)))

    sent = invoke("send", orders, "--jsonl", str(file), "-o", "json")
    assert sent.exit_code == 0, sent.output
    assert [row["outcome"] for row in json.loads(sent.stdout)] == ["stored"] * 4
    kept = ("id", "target", "due_ms", "key", "ordering_key", "event_ms", "value_base64")

    def contents(found: list[dict[str, Any]]) -> list[Any]:
        return sorted(
            json.dumps(
                [
                    *(row[name] for name in kept),
                    row["properties"].get("kind"),
                    row["properties"].get("delaylevel.expires"),
                ]
            )
            for row in found
        )

    # Each message is there twice; consumers get one, because both have the same ID.
    assert contents(rows(invoke, orders)) == sorted(2 * contents(before))
    assert {row["target"] for row in before} == {orders, invoices}


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
            producer.send(record, partition_key="k", deliver_after=timedelta(days=3))
            producer.send(None, partition_key="k", deliver_after=timedelta(days=3))
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
    kept = ("id", "due_ms", "key", "value_base64", "properties")

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
