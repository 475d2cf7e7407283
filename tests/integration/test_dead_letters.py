"""Tests of dead letters on a real broker: list, show, replay and discard."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from click.testing import Result

from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.mover.dead_letters import source_of
from support.world import RealWorld

HOUR_MS = 3_600_000

MINUTES = Levels(PartitionStrategy(partition_by="MINUTE", maximum_delay=timedelta(minutes=5)))


@pytest.fixture
def run(invoke: Callable[..., Result]) -> Callable[..., Result]:
    return functools.partial(invoke, "dlq")


@pytest.fixture
def description(world: RealWorld, clock: Any) -> LevelTopicDescription:
    """A level topic with four dead letters, stored as one batch."""
    made = world.level_topic(MINUTES)
    due = str(clock.now_ms() + 90_000)
    other = f"persistent://{world.namespace}/invoices"
    producer = world.plain_client.create_producer(
        made.name.partition(0).full, batching_enabled=True, batching_max_publish_delay_ms=10_000
    )
    for body, properties in (
        (b"no due", {"delaylevel.target": made.targets[0], "mine": "1"}),
        (b"foreign", {"delaylevel.due": due, "delaylevel.target": other}),
        (b"\xff\x00", {"delaylevel.due": "soon", "delaylevel.target": made.targets[0]}),
        (b"named", {"delaylevel.due": due, "delaylevel.target": other, "delaylevel.id": "mine-7"}),
    ):
        producer.send_async(body, None, properties=properties, partition_key="k")
    producer.flush()
    producer.close()
    clock.advance(HOUR_MS)
    moving = world.mover(made, clock)
    assert sum(moving.run_once().dead.values()) == 4
    moving.close()
    clock.advance(-HOUR_MS)
    return made


def test_repaired_and_delivered_by_command(
    world: RealWorld, description: LevelTopicDescription, run: Callable[..., Result]
) -> None:
    target = description.targets[0]
    listed = [json.loads(line) for line in run("list", target, "-o", "jsonl").stdout.splitlines()]
    assert [row["size"] for row in listed] == [6, 7, 2, 5]
    shown = json.loads(run("show", target, listed[2]["id"], "-o", "json").stdout)
    assert (shown["encoding"], shown["value"]) == ("base64", "/wA=")
    assert "mine=1" in run("show", target, listed[0]["id"]).stdout

    for arguments, words in (
        (("replay", target), "select dead letters by"),
        (("replay", target, "--all", "--reason", "x"), "select dead letters by"),
        (("replay", target, "--all", "--new-target", "elsewhere"), "does not carry"),
        (("replay", target, "nonsense"), "not a position"),
        (("show", target, "1:2:3"), "no dead letter"),
        (("discard", target, "--all", "--count", "3"), "4 dead letters"),
    ):
        refused = run(*arguments)
        assert refused.exit_code in (1, 2), refused.output
        assert words in refused.stderr
    other = world.plain_client.subscribe(source_of(description).topic, "delaylevel")
    assert "another" in run("replay", target, "--all").stderr
    other.close()
    assert len(world.stored(target)) == 0

    some = [row["id"] for row in listed if "delaylevel.due" in row["reason"]]
    answer = run("replay", target, "1:2:3", *some, listed[1]["id"], "--at", "-1s", "-o", "json")
    assert answer.exit_code == 1, answer.output
    outcomes = {row["id"]: row["outcome"] for row in json.loads(answer.stdout)}
    assert outcomes == {
        **dict.fromkeys(some, "delivered"),
        listed[1]["id"]: "still dead",
        "1:2:3": "not found",
    }
    assert sorted(item.value or b"" for item in world.stored(target)) == [b"no due", b"\xff\x00"]
    assert world.stored(target)[0].properties["mine"] == "1"
    answer = run("discard", target, "--all", "--count", "2", "-o", "json")
    assert answer.exit_code == 0, answer.output
    assert [row["outcome"] for row in json.loads(answer.stdout)] == ["discarded"] * 2
    assert json.loads(run("list", target, "-o", "json").stdout) == []
    assert run("list", target).exit_code == 0
