"""Tests of a dispatcher's decisions on cancellations, on a real broker."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from delaylevel.dispatcher.cancelling.desk import OutcomeTopic, expire_outcomes
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import MissingTarget
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


def test_a_wrong_due_time_target_or_id_cancels_nothing(world: RealWorld, tmp_path: Path) -> None:
    window = WindowWorld(world, tmp_path, ("orders", "invoices"))
    orders, invoices = sorted(window.description.targets, reverse=True)
    now_ms = window.now_ms()
    due_ms = now_ms + 300_000
    for name in ("late", "early", "other"):
        window.put(name, due_ms, orders)
    with window.serving():
        window.cancel("other", now_ms, invoices)
        window.cancel("othre", now_ms, orders)
        found = window.outcomes_of("other", "othre")
        assert {found["other"].status, found["othre"].status} == {"unknown"}
        # With a wrong due time, the ID still names the message.
        window.cancel("early", now_ms, orders)
        assert window.outcomes_of("early")["early"].status == "cancelled"
        window.pass_by(due_ms)
        window.wait_for("late", "other", target=orders)
        window.cancel("late", due_ms + 3_600_000, orders)
        assert window.outcomes_of("late")["late"].status == "too late"


@pytest.mark.parametrize("policy", list(MissingTarget))
def test_messages_without_a_target(world: RealWorld, tmp_path: Path, policy: MissingTarget) -> None:
    window = WindowWorld(world, tmp_path, on_missing_target=policy)
    world.admin.delete(world.name("orders"), force=True)
    due_ms = window.now_ms()
    with window.serving() as serving:
        window.put("gone", due_ms)
        stats = serving.dispatcher.stats
        world.eventually(
            lambda: any(s.dead or s.dropped or s.held for s in stats().values()), "its end"
        )
        window.cancel("gone", due_ms)
        outcome = window.outcomes_of("gone")["gone"]
        window.acknowledged()
    assert outcome.status == "unknown"
    expected = {
        MissingTarget.HOLD: "held",
        MissingTarget.DROP: "dropped",
        MissingTarget.DEAD_LETTER: "no such message",
    }
    assert expected[policy] in outcome.reason
    assert len(window.dead()) == (policy is MissingTarget.DEAD_LETTER)


@pytest.mark.parametrize("delivery", list(Delivery))
def test_the_next_dispatcher_knows_what_was_decided(
    world: RealWorld, tmp_path: Path, delivery: Delivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    if delivery is Delivery.EFFECTIVELY_ONCE:
        world.deduplicate()
    window = WindowWorld(world, tmp_path)
    due_ms = window.now_ms() + 300_000
    window.put("cancelled", due_ms)
    window.put("kept", due_ms)
    decided = threading.Event()
    send = OutcomeTopic.send

    def die(self: OutcomeTopic, stored: int) -> None:
        if self.waits_for_journal and self._decided[0][0] <= stored:
            decided.set()
            raise RuntimeError("killed between the record and the outcome")

    monkeypatch.setattr(OutcomeTopic, "send", die)
    with window.serving(delivery):
        window.cancel("cancelled", due_ms)
        assert decided.wait(60)
        assert window.outcomes() == []
        monkeypatch.setattr(OutcomeTopic, "send", send)
        # The dispatcher takes the partition again, with the state from the journal.
        assert window.outcomes_of("cancelled")["cancelled"].status == "cancelled"
        window.pass_by(due_ms)
        window.wait_for("kept")
        window.acknowledged()
    assert set(window.released()) == {"kept"}


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
