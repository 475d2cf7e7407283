"""Tests of dead letters on a real broker: list, show, replay and discard."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from click.testing import Result

from delaylevel import topics
from delaylevel.errors import AlreadyRunningError, LevelTopicError, StillPendingError
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import Position
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.mover import dead_letters as deadletters
from delaylevel.topics import lifecycle
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


def bodies(found: Any) -> list[bytes | None]:
    return [letter.message.value for letter in found]


def test_dead_letters_are_listed_and_stay(
    world: RealWorld, description: LevelTopicDescription
) -> None:
    for _ in range(2):
        found = list(deadletters.dead_letters(world.plain_client, world.admin, description))
        assert bodies(found) == [b"no due", b"foreign", b"\xff\x00", b"named"]
    assert "delaylevel.due is missing" in found[0].reason
    assert "is not one of level topic" in found[1].reason
    assert {letter.source.rpartition(":")[2] for letter in found} == {"0", "1", "2", "3"}
    assert lifecycle.pending_entries(world.admin, description).dead_letters == 1
    with pytest.raises(StillPendingError, match="dlq"):
        lifecycle.delete(world.plain_client, world.admin, description)


def test_a_part_is_replayed_once_its_target_is_known_and_the_rest_stays(
    world: RealWorld, description: LevelTopicDescription, clock: Any
) -> None:
    foreign = [
        letter
        for letter in deadletters.dead_letters(world.plain_client, world.admin, description)
        if "is not one of" in letter.reason
    ]
    report = deadletters.replay(
        world.plain_client, world.admin, description, lambda _: True, clock=clock
    )
    assert (report.replayed, sum(report.refused.values())) == (0, 4)
    assert len(list(deadletters.dead_letters(world.plain_client, world.admin, description))) == 4

    target = str(foreign[0].target)
    world.plain_client.create_producer(target).close()
    wanted = topics.create(
        world.admin,
        replace(description, targets=(*description.targets, target)),
    )
    positions = {letter.position for letter in foreign}
    report = deadletters.replay(
        world.plain_client,
        world.admin,
        wanted,
        lambda letter: letter.position in positions,
        clock=clock,
    )
    assert (report.forwarded.parked.total(), report.refused) == (2, {})
    assert bodies(deadletters.dead_letters(world.plain_client, world.admin, wanted)) == [
        b"no due",
        b"\xff\x00",
    ]
    parked = [item for item in world.stored(wanted.topic) if item.value in (b"foreign", b"named")][
        -2:
    ]
    assert [item.properties["delaylevel.id"] for item in parked] == [foreign[0].source, "mine-7"]
    assert all("delaylevel.reason" not in item.properties for item in parked)
    assert {item.key for item in parked} == {"k"}
    again = deadletters.replay(
        world.plain_client,
        world.admin,
        wanted,
        lambda letter: letter.position in positions,
        clock=clock,
    )
    assert again.replayed == 0


def test_repaired_and_delivered_by_command(
    description: LevelTopicDescription,
    run: Callable[..., Result],
    stored: Callable[[str], list[ParkedMessage]],
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
    assert len(stored(target)) == 0

    some = [row["id"] for row in listed if "delaylevel.due" in row["reason"]]
    answer = run("replay", target, "1:2:3", *some, listed[1]["id"], "--at", "-1s", "-o", "json")
    assert answer.exit_code == 1, answer.output
    outcomes = {row["id"]: row["outcome"] for row in json.loads(answer.stdout)}
    assert outcomes == {
        **dict.fromkeys(some, "delivered"),
        listed[1]["id"]: "still dead",
        "1:2:3": "not found",
    }
    assert sorted(item.value or b"" for item in stored(target)) == [b"no due", b"\xff\x00"]
    assert stored(target)[0].properties["mine"] == "1"
    answer = run("discard", target, "--all", "--count", "2", "-o", "json")
    assert answer.exit_code == 0, answer.output
    assert [row["outcome"] for row in json.loads(answer.stdout)] == ["discarded"] * 2
    assert json.loads(run("list", target, "-o", "json").stdout) == []
    assert run("list", target).exit_code == 0


def test_one_replay_at_a_time(world: RealWorld, description: LevelTopicDescription) -> None:
    topic = deadletters.source_of(description).topic
    other = world.plain_client.subscribe(topic, "delaylevel", receiver_queue_size=0)
    with pytest.raises(AlreadyRunningError):
        deadletters.replay(world.plain_client, world.admin, description, lambda _: True)
    other.close()
    with pytest.raises(LevelTopicError):
        deadletters.find(world.plain_client, world.admin, description, Position(1, 2, 3))


def test_a_replay_of_nothing_fails(
    description: LevelTopicDescription, run: Callable[..., Result]
) -> None:
    answer = run("replay", description.targets[0], "--reason", "no such reason")
    assert answer.exit_code == 1, answer.output
    assert "There is no such dead letter" in answer.stderr
