"""Tests of a dispatcher's decisions on cancellations, on a real broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from delaylevel.dispatcher.publishing.outcomes import expire_outcomes
from delaylevel.model.delivery import Delivery
from support.window_world import GRACE_MS, WindowWorld
from support.world import RealWorld

pytestmark = pytest.mark.broker


@pytest.mark.parametrize("delivery", list(Delivery))
def test_outcomes_are_true(world: RealWorld, tmp_path: Path, delivery: Delivery) -> None:
    if delivery is Delivery.EFFECTIVELY_ONCE:
        world.deduplicate()
    window = WindowWorld(world, tmp_path)
    now_ms = window.now_ms()
    soon_ms, later_ms = now_ms + 300_000, now_ms + 400_000
    for name in ("kept", "cancelled", "twice", "copied"):
        window.put(name, soon_ms)
    window.put("waits", later_ms)
    with window.serving(delivery) as serving:
        window.cancel("cancelled", soon_ms)
        window.cancel("twice", soon_ms)
        window.cancel("twice", soon_ms)
        window.cancel("overtakes", soon_ms)
        window.cancel("waits", later_ms)
        window.cancel("never", now_ms)
        window.cancel("copied", soon_ms)
        found = window.outcomes_of("cancelled", "twice", "waits", "copied")
        assert {found[name].status for name in ("cancelled", "twice", "waits", "copied")} == {
            "cancelled"
        }
        assert "overtakes" not in found
        window.put("overtakes", soon_ms)
        window.put("copied", soon_ms)
        assert window.outcomes_of("overtakes")["overtakes"].status == "cancelled"
        unknown = window.outcomes_of("never")["never"]
        assert unknown.status == "unknown"
        assert unknown.decided_ms is not None
        assert unknown.decided_ms >= now_ms + GRACE_MS
        window.pass_by(later_ms)
        window.wait_for("kept")
        released_ms = window.now_ms()
        window.cancel("kept", soon_ms)
        late = window.outcomes_of("kept")["kept"]
        assert late.status == "too late"
        assert late.released_ms is not None
        assert soon_ms <= late.released_ms <= released_ms
        world.eventually(lambda: len(window.outcomes()) >= 9, "the last outcome of each")
        window.acknowledged()
        stats = next(iter(serving.dispatcher.stats().values()))
        assert stats.pending == stats.in_flight == 0
        assert stats.outcomes["cancelled"] >= 6
        assert stats.outcomes["too late"] == stats.outcomes["unknown"] == 1
    assert set(window.released()) == {"kept"}
    assert [each.status for each in window.outcomes() if each.id == "twice"] == ["cancelled"] * 2


def test_old_outcomes_are_deleted(world: RealWorld, tmp_path: Path) -> None:
    description = WindowWorld(world, tmp_path).description
    partition = description.outcomes_topic.partition(0)
    producer = world.plain_client.create_producer(partition.full)
    producer.send(b"old")
    expire_outcomes(world.admin, description)  # nothing is older than a day
    stats = world.admin.partition_stats

    def backlog() -> int:
        return stats(partition).subscriptions["delaylevel"].backlog_entries

    assert backlog() == 1

    def is_gone() -> bool:
        world.admin.expire_messages(partition, "delaylevel", 1)
        return not backlog()

    world.eventually(is_gone, "the end of what is older than a second")
