"""Tests of the deployed Function: messages arrive as sent; deploy, status, logs and delete work."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pulsar
import pytest
from pulsar.schema import AvroSchema, Integer, JsonSchema, Record, String, StringSchema

from delaylevel.broker.distribution import distribution_directory, java
from delaylevel.cluster.connection.settings import Connection
from delaylevel.errors import LevelTopicError
from delaylevel.functions import deployment, health
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription, Mover
from delaylevel.model.strategy import Levels, PartitionStrategy
from support.function_moves import TWO_LEVELS, description, wrapped  # noqa: F401  # noqa: F401
from support.world import RealWorld

SHORT = PartitionStrategy(partition_by=timedelta(seconds=2), maximum_delay=timedelta(seconds=8))


class Order(Record):  # type: ignore[misc]
    name = String()
    count = Integer()


def test_schemas_arrive_as_they_were_sent(world: RealWorld, deployed: Callable[..., Any]) -> None:
    kinds: dict[str, tuple[Any, Any]] = {
        "avro": (AvroSchema(Order), Order(name="a", count=7)),
        "json": (JsonSchema(Order), Order(name="b", count=8)),
        "string": (StringSchema(), "007"),
    }
    levels = Levels([SHORT])
    names = [f"{kind}-orders" for kind in kinds]
    first = world.level_topic(
        levels,
        targets=names,
        mover=Mover.FUNCTION,
        topic=f"persistent://{world.namespace}/typed-delay-level",
    )
    consumers = {}
    connected = world.client()
    for name, (schema, value) in zip(names, kinds.values(), strict=True):
        topic = f"persistent://{world.namespace}/{name}"
        consumers[topic] = world.plain_client.subscribe(
            topic, "app", consumer_type=pulsar.ConsumerType.Shared, schema=schema
        )
        producer = connected.create_producer(
            topic,
            enable_delay_level_topic=True,
            delay_level_topic=first.topic,
            partition_strategy=levels,
            schema=schema,
        )
        producer.send(value, deliver_after=timedelta(seconds=2.5))
        producer.send(
            None, partition_key="k", ordering_key="o", deliver_after=timedelta(seconds=2.5)
        )
    deployed(first)
    for topic, (_, value) in zip(consumers, kinds.values(), strict=True):
        found = [consumers[topic].receive(60_000) for _ in range(2)]
        (null,) = (message for message in found if message.has_null_value())
        (message,) = (message for message in found if not message.has_null_value())
        assert message.value() == value
        assert (null.data(), null.partition_key(), null.ordering_key()) == (b"", "k", "o")
        for item in found:
            assert item.schema_version() == (0).to_bytes(8, "big").decode()


def test_delete_keeps_parked_messages_and_a_new_deployment_moves_them(
    description: LevelTopicDescription,
    deployed: Callable[..., Any],
    world: RealWorld,
    connection: Connection,
) -> None:
    get = world.arrivals(description.targets[0])
    made = deployed(description)
    assert not made.updated
    producer = wrapped(world.client(), description)
    producer.send(b"first", deliver_after=timedelta(seconds=1.5))
    get(1, 60)
    world.drained(description)  # acknowledgement follows arrival
    for number in range(20):
        producer.send(b"%d" % number, deliver_after=timedelta(seconds=8))
    deployment.delete(connection, description, made.function)
    # No mover runs, so these stay whatever their due times.
    for number in range(20, 40):
        producer.send(b"%d" % number, deliver_after=timedelta(seconds=4))
    assert world.backlog(description) >= 20
    for member in description.members():
        assert SUBSCRIPTION in world.admin.subscriptions(member.topic.partition(0))
    with pytest.raises(LevelTopicError, match="is not deployed"):
        deployment.restart(connection, made.function)
    with pytest.raises(LevelTopicError, match="is not deployed"):
        health.status(connection, world.admin, description, made.function, 0)
    assert not deployed(description).updated
    again = deployed(description, parallelism=2)
    assert again.updated
    found = get(40, 120)  # an instance that fails at its start is restarted after 30 s
    assert {item.message.data() for item in found} == {b"%d" % n for n in range(40)}
    at = health.status(connection, world.admin, description, made.function, SystemClock().now_ms())
    assert len(at.instances) == 2


def test_malformed_and_early_messages(
    description: LevelTopicDescription,
    deployed: Callable[..., Any],
    world: RealWorld,
    parked: Callable[..., dict[str, str]],
) -> None:
    get = world.arrivals(description.targets[0])
    deployed(description)
    due_ms = SystemClock().now_ms() + 7_000
    far_ms = due_ms + 3_600_000
    level = world.plain_client.create_producer(description.level_topic(0).partition(0).full)
    level.send(b"not ours")
    level.send(b"damaged", properties={"delaylevel.due": "soon"})
    level.send(b"elsewhere", properties=parked(due_ms, "somebody-elses"))
    # Without deliver_at, like a message of a producer for Spark: the Function gets it at once.
    level.send(b"undue", properties=parked(due_ms))
    level.send(b"far", properties=parked(far_ms))
    dead = world.eventually(
        lambda: len(found := world.stored(description.dead_letter_topic.full)) == 3 and found,
        "three dead letters",
        60,
    )
    assert {item.value for item in dead} == {b"not ours", b"damaged", b"elsewhere"}
    assert all(item.properties["delaylevel.reason"] for item in dead)
    (arrival,) = get(1, 60)
    assert arrival.message.data() == b"undue"
    assert arrival.late_ms > -1500

    def hops(body: bytes) -> int:
        return sum(
            item.value == body
            for level in range(2)
            for item in world.stored(description.level_topic(level).full)
        )

    world.eventually(lambda: hops(b"far") >= 2, "the early message parked again")
    world.eventually(lambda: world.backlog(description) == 1, "every other acknowledgement")
    for body in (b"far", b"undue"):
        assert hops(body) <= 6, "it was parked again in a busy loop"


def test_the_line_for_pulsar_admin(
    description: LevelTopicDescription, connection: Connection, world: RealWorld, tmp_path: Path
) -> None:
    get = world.arrivals(description.targets[0])
    options = deployment.FunctionOptions()
    line = deployment.write_package(tmp_path, description, connection, options)
    done = subprocess.run(
        [distribution_directory() / "bin" / "pulsar-admin", *shlex.split(line)[1:]],
        env={**os.environ, "PATH": f"{Path(java()).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    wrapped(world.client(), description).send(b"1", deliver_after=timedelta(seconds=2))
    get(1, 90)
    deployment.delete(connection, description, deployment.function_name(description))


def test_the_command_line(
    description: LevelTopicDescription,
    connection: Connection,
    world: RealWorld,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from click.testing import CliRunner

    from delaylevel.cli.main import cli

    monkeypatch.setenv("DELAYLEVEL_SERVICE_URL", connection.service_url)
    monkeypatch.setenv("DELAYLEVEL_ADMIN_URL", connection.admin_url)
    target = description.targets[0]

    def run(*arguments: str, code: int = 0) -> Any:
        result = CliRunner().invoke(cli, ["mover", *arguments])
        assert result.exit_code == code, result.output
        return result

    assert "is not deployed" in run("status", target, code=1).stderr
    assert json.loads(run("deploy", target, "-o", "json").stdout)["updated"] is False
    get = world.arrivals(target)
    wrapped(world.client(), description).send(b"1", deliver_after=timedelta(seconds=1.5))
    get(1, 60)
    world.drained(description)  # acknowledgement follows arrival
    at = json.loads(run("status", target, "-o", "json").stdout)
    assert at["running"] == "1 of 1"
    assert at["problems"] == []
    assert "RUNNING" in run("status", target).stdout
    assert "moving" in run("logs", target).stdout
    run("restart", target)
    world.eventually(
        lambda: CliRunner().invoke(cli, ["mover", "status", target]).exit_code == 0,
        "the restarted instance",
        60,
    )
    assert "stays" in run("delete", target).stderr
