"""Tests of messages with fields that are not UTF-8, on a real broker.

A Java client sets the ordering key. The Java client cannot set such a key or property, but the C++
client can: here, the builder of the Python client's core, which is the C++ client.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import _pulsar
from click.testing import Result

from delaylevel.inspection import Inspector
from delaylevel.mover import dead_letters
from support.world import HOURS, RealWorld

HOUR = 3_600_000
BAD = b"\xff\xfeA"
READABLE = [b"first", b"second", b"third", b"last"]
#: Unreadable messages, and the reasons for which they are dead letters.
REASONS = {
    b"ordering": "the ordering key is not UTF-8",
    b"key": "the key is not UTF-8",
    b"properties": "the properties are not UTF-8",
}


def test_a_mover_delivers_the_others_views_show_all_and_a_replay_refuses_them(
    world: RealWorld,
    ordered: Callable[..., None],
    parked: Callable[..., dict[str, str]],
    invoke: Callable[..., Result],
    clock: Any,
) -> None:
    description = world.level_topic(HOURS)
    topic, due_ms = description.name.partition(1).full, clock.now_ms() + HOUR
    properties = parked(due_ms, mine="1")
    producer = world.plain_client.create_producer(topic, batching_enabled=False)

    def bad(value: bytes, **fields: Any) -> None:
        builder = _pulsar.MessageBuilder().content(value)
        for name, field in {"properties": properties, **fields}.items():
            getattr(builder, name)(field)
        producer._producer.send(builder.build())

    sends = (
        lambda: ordered(topic, BAD, b"ordering", properties=properties),
        lambda: bad(b"key", partition_key=BAD),
        lambda: bad(b"properties", partition_key="k", properties={**properties, "mine": BAD}),
        producer.close,
    )
    for body, send in zip(READABLE, sends, strict=True):
        producer.send(body, properties=properties, partition_key="k")
        send()
    look = Inspector(world.plain_client, world.admin, description.targets[0])
    rows = {row.value: row for row in look.rows(value=True)}
    assert rows.keys() == {*READABLE, *REASONS}
    assert rows[b"ordering"].ordering_key == rows[b"key"].key == "\ufffd\ufffdA"
    assert rows[b"ordering"].due_ms == rows[b"key"].due_ms == due_ms
    assert rows[b"properties"].due_ms is None
    listed = invoke("pending", "list", description.topic, "-o", "jsonl")
    assert listed.exit_code == 0, listed.output
    assert len(listed.stdout.splitlines()) == 7
    for exact in ([], ["--exact"]):
        assert invoke("horizon", description.topic, *exact).exit_code == 0

    def letters() -> dict[bytes | None, str]:
        found = world.stored(description.dead_letter_topic.full)
        return {letter.value: letter.properties["delaylevel.reason"] for letter in found}

    clock.advance(5 * HOUR)
    mover = world.mover(description, clock)
    report = mover.run_once()
    assert (report.dead, report.due) == (len(REASONS), len(READABLE))
    assert mover.run_once().total == 0
    assert [message.value for message in world.stored(description.targets[0])] == READABLE
    world.drained(description)
    assert letters() == REASONS
    listed = invoke("dlq", "list", description.topic, "-o", "jsonl")
    lines = [json.loads(line) for line in listed.stdout.splitlines()]
    assert {line["reason"] for line in lines} == set(REASONS.values())
    assert lines[0]["reason"] in invoke("dlq", "show", description.topic, lines[0]["id"]).stdout
    replayed = dead_letters.replay(world.plain_client, world.admin, description, lambda _: True)
    answer = list(replayed)
    assert not any(one.done for one in answer)
    assert Counter(one.reason for one in answer) == Counter(REASONS.values())
    assert letters() == REASONS
