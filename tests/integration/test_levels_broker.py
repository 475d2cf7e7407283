"""Tests of level topics on a real broker: creation by many at once, and commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pulsar
from click.testing import Result

from delaylevel import topics
from delaylevel.cluster.rest.admin import Admin
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from support.world import RealWorld

MINUTES = Levels(PartitionStrategy(partition_by="MINUTE", maximum_delay=timedelta(minutes=5)))


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
    client: pulsar.Client, namespace: str, invoke: Callable[..., Result]
) -> None:
    orders = f"persistent://{namespace}/orders"

    def created(*more: str) -> Any:
        options = ("--unit", "2s", "--max-delay", "10s", "--then", "500ms:2s:100ms", *more)
        made = invoke("levels", "create", orders, *options, "-o", "json")
        assert made.exit_code == 0, made.output
        assert ("exists already" in made.stderr) is bool(more)
        return json.loads(made.stdout)

    value = created()
    assert value["topic"] == f"persistent://{namespace}/_orders-delay-level"
    assert (value["partitions"], value["final_window"]) == (4 + 3, "tracker")
    assert value["levels"][1] == {"unit_ms": 500, "maximum_ms": 2000, "lead_ms": 100}
    client.create_producer(TopicName.parse(value["topic"]).partition(2).full).send(b"x")
    more = f"persistent://{namespace}/more"
    assert created("--target", more)["targets"] == [more, orders]

    listed = json.loads(invoke("levels", "list", namespace, "-o", "jsonl").stdout)
    assert (listed["topic"], listed["backlog_entries"]) == (value["topic"], 1)
    shown = json.loads(invoke("levels", "describe", orders, "-o", "json").stdout)
    assert (shown["window_entries"], shown["log_entries"], shown["dispatchers"]) == (0, 0, [])
    (row,) = [row for row in shown["rows"] if row["backlog_entries"]]
    assert (row["level"], row["partition"]) == (0, 2)
    assert row["oldest_hand_off_ms"] == row["oldest_publish_ms"] + 3 * 2000 - 500
    assert invoke("levels", "describe", f"{namespace}/more-or-less").exit_code == 1


def test_a_level_topic_is_deleted_only_when_nothing_is_pending(
    world: RealWorld, invoke: Callable[..., Result]
) -> None:
    description = world.level_topic(MINUTES)
    (orders,) = description.targets

    def refused(*arguments: str) -> str:
        answer = invoke("levels", *arguments, orders)
        assert answer.exit_code == 1
        return answer.stderr

    with world.producer(orders) as producer:
        for body in (b"x", b"y"):
            producer.send(body, deliver_after=timedelta(minutes=3))
        assert "in use" in refused("delete", "--discard", "2")
    assert "--discard 2" in refused("delete")
    assert "not 3" in refused("delete", "--discard", "3")
    with world.mover(description):
        assert "another mover" in refused("drain")
    consumer = world.plain_client.subscribe(orders, "one-by-one")
    assert f"one-by-one of {orders} (Exclusive)" in refused("drain")
    consumer.close()
    assert len(world.stored(description.topic)) == 2
    dues = {item.properties["delaylevel.due"] for item in world.stored(description.topic)}

    drained = invoke("levels", "drain", orders, "--allow-early")
    assert drained.exit_code == 0
    assert "2 messages wait in their business topics now" in " ".join(drained.stderr.split())
    answer = invoke("levels", "delete", orders, "-o", "json")
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["deleted"]
    assert world.admin.list_partitioned_topics(world.namespace) == []
    found = world.stored(orders)
    assert [item.value for item in found] == [b"x", b"y"]
    assert {item.properties["delaylevel.due"] for item in found} == dues
