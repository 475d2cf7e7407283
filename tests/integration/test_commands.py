"""Tests of commands on a real broker: level topics, targets, listed messages, dead letters."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pulsar
import pytest
from click.testing import Result
from pulsar.schema import AvroSchema, Integer, Record, String

from delaylevel import topics
from delaylevel.cluster.rest.admin import Admin
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.mover.dead_letters import source_of
from delaylevel.topics.targets import unsubscribed
from support.fakes import HandClock
from support.world import RealWorld

MINUTES = Levels(PartitionStrategy(partition_by="MINUTE", maximum_delay=timedelta(minutes=5)))
DAYS = Levels(PartitionStrategy(maximum_delay=timedelta(days=10)))
Invoke = Callable[..., Result]


@pytest.fixture
def answer(invoke: Invoke) -> Callable[..., Any]:
    """``answer("levels", "list", exits=0)``: the value that a command prints as JSON."""

    def run(*words: str, exits: int = 0) -> Any:
        done = invoke(*words, "-o", "json")
        assert done.exit_code == exits, done.output
        return json.loads(done.stdout)

    return run


def test_concurrent_creations_lose_no_target(admin: Admin, namespace: str) -> None:
    targets = [f"{namespace}/target-{number}" for number in range(6)]
    topic, broker = f"{namespace}/orders-delay-level", FinalWindow.BROKER
    wanted = [
        LevelTopicDescription(topic, MINUTES, (target,), final_window=broker) for target in targets
    ]
    with ThreadPoolExecutor(len(wanted)) as pool:
        made = [pool.submit(topics.create, admin, item) for item in wanted]
    assert [each.exception() for each in made] == [None] * len(wanted)
    found = topics.find(admin, wanted[0].topic)
    assert found is not None
    assert found.targets == tuple(sorted(f"persistent://{target}" for target in targets))
    assert len(admin.list_partitioned_topics(namespace)) == 3


def test_create_list_and_describe_by_command(
    client: pulsar.Client, namespace: str, invoke: Invoke, answer: Callable[..., Any]
) -> None:
    orders, more = (f"persistent://{namespace}/{name}" for name in ("orders", "more"))
    create = ("levels", "create", orders, "--unit", "2s", "--max-delay", "10s")
    create += ("--then", "500ms:2s:100ms")
    value = answer(*create)
    assert value["topic"] == f"persistent://{namespace}/_orders-delay-level"
    assert (value["partitions"], value["final_window"]) == (4 + 3, "tracker")
    assert value["levels"][1] == {"unit_ms": 500, "maximum_ms": 2000, "lead_ms": 100}
    client.create_producer(TopicName.parse(value["topic"]).partition(2).full).send(b"x")
    assert answer(*create, "--target", more)["targets"] == [more, orders]
    assert "exists already" in invoke(*create).stderr
    (listed,) = answer("levels", "list", namespace)
    assert (listed["topic"], listed["backlog_entries"]) == (value["topic"], 1)
    shown = answer("levels", "describe", orders)
    assert (shown["window_entries"], shown["log_entries"], shown["dispatchers"]) == (0, 0, [])
    (row,) = [row for row in shown["rows"] if row["backlog_entries"]]
    assert (row["level"], row["partition"]) == (0, 2)
    assert row["oldest_hand_off_ms"] == row["oldest_publish_ms"] + 3 * 2000 - 500


def test_a_level_topic_is_deleted_only_when_nothing_is_pending(
    world: RealWorld, invoke: Invoke, answer: Callable[..., Any]
) -> None:
    description = world.level_topic(MINUTES)
    (orders,) = description.targets

    def refused(*arguments: str) -> str:
        done = invoke("levels", *arguments, orders)
        assert done.exit_code == 1
        return done.stderr

    with world.producer(orders) as producer:
        for body in (b"x", b"y"):
            producer.send(body, deliver_after=timedelta(minutes=3))
        assert "in use" in refused("delete", "--discard", "2")
    assert "--discard 2" in refused("delete")
    assert "not 3" in refused("delete", "--discard", "3")
    with closing(world.mover(description)):
        assert "another mover" in refused("drain")
    consumer = world.plain_client.subscribe(orders, "one-by-one")
    assert f"one-by-one of {orders} (Exclusive)" in refused("drain")
    consumer.close()
    assert len(world.stored(description.topic)) == 2
    dues = {item.properties["delaylevel.due"] for item in world.stored(description.topic)}
    drained = invoke("levels", "drain", orders, "--allow-early")
    assert drained.exit_code == 0
    assert "HANDED OFF    2" in drained.stdout
    assert answer("levels", "delete", orders)["discarded_entries"] == 0
    assert world.admin.list_partitioned_topics(world.namespace) == []
    found = world.stored(orders)
    assert [item.value for item in found] == [b"x", b"y"]
    assert {item.properties["delaylevel.due"] for item in found} == dues


def test_commands_explain_a_target_without_subscription_and_keep_it(
    world: RealWorld, invoke: Invoke
) -> None:
    world.keep_nothing()
    orders, name = world.name("orders").short, world.name("orders")
    remedy = f"`delaylevel levels set {orders} --keep-target`"
    created = invoke("levels", "create", orders)
    assert f"{orders} does not exist" in created.stderr
    assert remedy in created.stderr
    sent = invoke("send", orders, "hi", "--after", "2d")
    assert f"{orders} has no subscription and no known retention" in sent.stderr
    assert remedy in sent.stderr
    world.admin.delete(name, force=True)  # as the broker does after a minute
    failed = invoke("doctor", orders)
    assert f"{orders} does not exist" in failed.output
    assert remedy in failed.output
    assert invoke("levels", "set", orders, "--keep-target").exit_code == 0
    assert world.admin.topic_policies(name).delete_while_inactive is False
    assert unsubscribed(world.admin, name) is None
    assert "subscription" not in invoke("send", orders, "hi", "--after", "2d").stderr


def test_target_is_kept_from_the_start(world: RealWorld, invoke: Invoke) -> None:
    world.keep_nothing()
    bills, extra = world.name("bills"), world.name("extra")
    created = invoke("levels", "create", bills.short, "--target", extra.full, "--keep-target")
    assert created.exit_code == 0, created.output
    assert "subscription" not in created.stderr
    for name in (bills, extra):
        assert world.admin.topic_policies(name).delete_while_inactive is False
        assert world.admin.partitioned_metadata(name).partitions == 0


@pytest.mark.parametrize("of", ["topic", "namespace"])
def test_a_retention_receives_what_is_published(world: RealWorld, of: str) -> None:
    world.keep_nothing()
    name = world.name("orders")
    world.plain_client.create_producer(name.full).close()
    assert unsubscribed(world.admin, name) is not None
    path = name.rest_path if of == "topic" else f"namespaces/{name.namespace_path}"
    policy = {"retentionTimeInMinutes": 10, "retentionSizeInMB": -1}
    world.rest.post(f"{path}/retention", policy)
    world.eventually(lambda: world.admin.retains(name), "the retention")
    assert unsubscribed(world.admin, name) is None
    world.rest.post(f"{path}/retention", {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0})
    world.eventually(lambda: not world.admin.retains(name), "the end of the retention")


class First(Record):
    _avro_name = "Order"
    number = Integer()


class Second(Record):
    """A later version: a field in front of the others."""

    _avro_name = "Order"
    note = String(required_default=True)
    number = Integer()


def test_listed_messages_keep_the_version_of_their_schema(
    world: RealWorld, answer: Callable[..., Any], tmp_path: Path, clock: HandClock
) -> None:
    pytest.importorskip("duckdb")
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
    pending = ("pending", "list", orders, "--limit", "0", "--payload")
    before = answer(*pending)
    lines = list(before)
    assert len(lines) == 4
    # One that is due already goes straight to its topic, and one has a schema that nobody knows.
    past = {**lines[0], "due_ms": world.clock.now_ms() - 1000}
    properties = {**lines[0]["properties"], "delaylevel.schema": "AVRO:0123456789abcdef"}
    lines += [past, {**lines[0], "properties": properties}]
    file.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    *stored, refused = answer("send", orders, "--jsonl", str(file), exits=1)
    assert {row["outcome"] for row in stored} == {"stored"}
    assert refused["outcome"] == "failed"
    assert "consumers could not decode it" in refused["reason"]
    again = answer(*pending)
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


def test_dead_letters_are_repaired_and_delivered_by_command(
    world: RealWorld, invoke: Invoke, answer: Callable[..., Any], clock: HandClock
) -> None:
    description = world.level_topic(MINUTES)
    (target,) = description.targets
    due, hour_ms = {"delaylevel.due": str(clock.now_ms() + 90_000)}, 3_600_000
    other = {**due, "delaylevel.target": world.topic("invoices")}
    producer = world.plain_client.create_producer(  # one batch
        description.name.partition(0).full,
        batching_enabled=True,
        batching_max_publish_delay_ms=10_000,
    )
    for body, properties in (
        (b"no due", {"delaylevel.target": target, "mine": "1"}),
        (b"foreign", other),
        (b"\xff\x00", {"delaylevel.due": "soon", "delaylevel.target": target}),
        (b"named", {**other, "delaylevel.id": "mine-7"}),
    ):
        producer.send_async(body, None, properties=properties, partition_key="k")
    producer.flush()
    producer.close()
    clock.advance(hour_ms)
    with closing(world.mover(description, clock)) as mover:
        assert mover.run_once().dead == 4
    clock.advance(-hour_ms)
    listed = answer("dlq", "list", target)
    assert [row["size"] for row in listed] == [6, 7, 2, 5]
    shown = answer("dlq", "show", target, listed[2]["id"])
    assert (shown["encoding"], shown["value"]) == ("base64", "/wA=")
    assert "mine=1" in invoke("dlq", "show", target, listed[0]["id"]).stdout
    for arguments, words in (
        (("replay", target), "select dead letters by"),
        (("replay", target, "--all", "--reason", "x"), "select dead letters by"),
        (("replay", target, "--all", "--new-target", "elsewhere"), "does not carry"),
        (("replay", target, "nonsense"), "not a position"),
        (("show", target, "1:2:3"), "no dead letter"),
        (("discard", target, "--all", "--count", "3"), "4 dead letters"),
    ):
        refused = invoke("dlq", *arguments)
        assert refused.exit_code in (1, 2), refused.output
        assert words in refused.stderr
    another = world.plain_client.subscribe(source_of(description).topic, "delaylevel")
    assert "another" in invoke("dlq", "replay", target, "--all").stderr
    another.close()
    assert len(world.stored(target)) == 0
    some = [row["id"] for row in listed if "delaylevel.due" in row["reason"]]
    replay = ("dlq", "replay", target, "1:2:3", *some, listed[1]["id"], "--at", "-1s")
    outcomes = {row["id"]: row["outcome"] for row in answer(*replay, exits=1)}
    assert outcomes == {
        **dict.fromkeys(some, "delivered"),
        listed[1]["id"]: "still dead",
        "1:2:3": "not found",
    }
    assert sorted(item.value or b"" for item in world.stored(target)) == [b"no due", b"\xff\x00"]
    assert world.stored(target)[0].properties["mine"] == "1"
    discarded = answer("dlq", "discard", target, "--all", "--count", "2")
    assert [row["outcome"] for row in discarded] == ["discarded"] * 2
    assert answer("dlq", "list", target) == []
