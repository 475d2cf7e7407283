"""Tests of queries about pending messages on a real broker: counts, rows and charts."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("duckdb")


from delaylevel.cluster.rest.admin import Admin
from delaylevel.inspection import Inspector, Selection
from delaylevel.model.clock import SystemClock
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription
from delaylevel.model.strategy import Levels, PartitionStrategy
from support.world import RealWorld

HOUR = 3_600_000


def fronts(admin: Admin, description: LevelTopicDescription) -> dict[Any, Any]:
    """Return the position and the consumers of every subscription of a level topic."""
    return {
        (member.topic, index, name): (
            admin.mark_delete_position(member.topic.partition(index), name)
            if one.durable
            else None,
            [consumer.name for consumer in one.consumers],
        )
        for member in description.members()
        for index, stats in admin.partitioned_stats(member.topic).items()
        for name, one in stats.subscriptions.items()
    }


def test_the_window_is_read_through_the_journal_while_a_dispatcher_runs(
    world: RealWorld,
) -> None:
    levels = Levels([PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(hours=5))])
    description = world.level_topic(levels, final_window=FinalWindow.TRACKER, window_partitions=2)
    topic = description.targets[0]
    dispatcher = world.serving(description, checkpoint_ms=100)
    producer = world.client().create_producer(topic, enable_delay_level_topic=True)
    now = SystemClock().now_ms()
    # Messages that are due soon alternate with later ones, so the position cannot follow.
    due = {
        str(n): now + (800, HOUR // 2, 3 * HOUR, 4 * HOUR)[n % 4] + (n % 4 and n)
        for n in range(120)
    }
    for number, due_ms in due.items():
        producer.send_async(
            b"", lambda *_: None, deliver_at=due_ms, partition_key=number, properties={"n": number}
        )
    producer.flush()
    pending = {number: at for number, at in due.items() if int(number) % 4}
    world.eventually(lambda: len(world.stored(topic)) == 30, "the release of due messages")
    look = Inspector(world.plain_client, world.admin, topic)
    world.eventually(lambda: len(list(look.rows())) == len(pending), "the journal entries")

    before = fronts(world.admin, description)
    rows = list(look.rows())
    assert {row.properties["n"]: row.due_ms for row in rows} == pending
    in_window = [row for row in rows if row.role == "window"]
    assert len(in_window) == 30
    for exact in (False, True):
        found = look.horizon(exact=exact)
        assert found.exact
        assert not found.window_by_clock
        assert found.within[0].messages == 0
        assert found.within[2].parts["window"] == 30
        assert found.messages == len(pending)
    assert look.find(in_window[3].id) == [in_window[3]]
    assert look.find(f"{in_window[3].topic.removeprefix('persistent://')}:1:2:3") == []
    assert look.average("size", Selection(where="role = 'window'")).messages == 30
    assert {row.properties["n"] for row in look.rows(Selection(key="4"))} == set()
    assert fronts(world.admin, description) == before, (
        "a query moved, locked or left a subscription"
    )

    # The queries did not block the dispatcher. A message that it releases is no longer pending.
    producer.send(b"", deliver_at=SystemClock().now_ms() + 300)
    world.eventually(lambda: len(world.stored(topic)) == 31, "one more")
    dispatcher.stop()
    assert {row.properties["n"] for row in look.rows()} == set(pending)
    # No dispatcher runs any more: an overdue message is reported as overdue.
    producer.send(b"", deliver_at=SystemClock().now_ms() + 300)
    world.eventually(lambda: look.horizon().within[0].messages == 1, "the overdue message")
    assert look.horizon().messages == len(pending) + 1
