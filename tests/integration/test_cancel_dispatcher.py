"""Tests of a dispatcher's decisions on cancellations, on a real broker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from delaylevel.dispatcher import Dispatcher, DispatchSettings
from delaylevel.dispatcher.cancelling.desk import OutcomeTopic, expire_outcomes
from delaylevel.model import envelope as env
from delaylevel.model.delivery import Delivery
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, MissingTarget
from delaylevel.model.outcome import Outcome
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.mover.dead_letters import dead_letters
from support.background import Serving
from support.world import MakeLevelTopic, RealWorld

pytestmark = pytest.mark.broker

LEVELS = Levels([PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(hours=3))])
GRACE_MS = 700
HOUR_MS = 3_600_000


class Window:
    """A level topic with one window partition, and plain producers into it."""

    def __init__(
        self, world: RealWorld, description: LevelTopicDescription, directory: Path
    ) -> None:
        self.world = world
        self.description = description
        self.directory = directory
        self.target = description.targets[0]
        self._producer: Any = None
        self._processes = 0

    def serving(self, delivery: Delivery = Delivery.AT_LEAST_ONCE) -> Serving:
        self._processes += 1
        settings = DispatchSettings(
            directory=self.directory / str(self._processes),
            delivery=delivery,
            checkpoint_ms=200,
            cancel_grace_ms=GRACE_MS,
        )
        settings.directory.mkdir()
        world = self.world
        return Serving(
            Dispatcher(world.plain_client, world.admin, [self.description.topic], settings)
        )

    def message(self, name: str, due_ms: int, target: str = "") -> None:
        self._send(name.encode(), name, due_ms, target, {})

    def cancel(self, name: str, due_ms: int, target: str = "") -> None:
        self._send(b"cancel", name, due_ms, target, {env.KIND: env.CANCEL})

    def _send(self, body: bytes, name: str, due_ms: int, target: str, more: dict[str, str]) -> None:
        if self._producer is None:
            topic = self.description.window_topic.partition(0).full
            self._producer = self.world.plain_client.create_producer(topic)
        properties = {env.DUE: str(due_ms), env.TARGET: target or self.target, env.ID: name}
        self._producer.send(body, properties={**properties, **more})

    def outcomes(self) -> list[Outcome]:
        topic = self.description.outcomes_topic.partition(0).full
        return [Outcome.read(each.properties) for each in self.world.stored(topic)]

    def wait_for(self, *names: str) -> dict[str, Outcome]:
        """Return the last outcome of each message once all have one."""
        found: dict[str, Outcome] = {}

        def complete() -> bool:
            found.update({each.id: each for each in self.outcomes()})
            return set(names) <= set(found)

        self.world.eventually(complete, f"outcomes of {names}")
        return found

    def released(self) -> list[str]:
        return [(each.value or b"").decode() for each in self.world.stored(self.target)]

    def wait_until_acknowledged(self) -> None:
        partition = self.description.window_topic.partition(0)

        def done() -> bool:
            stats = self.world.admin.partition_stats(partition)
            return not stats.subscriptions["delaylevel"].backlog_entries

        self.world.eventually(done, "the acknowledgement of everything")


MakeWindow = Callable[..., Window]


@pytest.fixture
def window(world: RealWorld, level_topic: MakeLevelTopic, tmp_path: Path) -> MakeWindow:
    def make(**values: Any) -> Window:
        description = level_topic(
            LEVELS,
            final_window=FinalWindow.TRACKER,
            window_partitions=1,
            **values,
        )
        return Window(world, description, tmp_path)

    return make


@pytest.mark.parametrize("delivery", list(Delivery))
def test_outcomes_are_true(window: MakeWindow, world: RealWorld, delivery: Delivery) -> None:
    if delivery is Delivery.EFFECTIVELY_ONCE:
        world.deduplicate()
    topic = window()
    now_ms = world.clock.now_ms()
    soon_ms, later_ms = now_ms + 3_000, now_ms + 4_000
    for name in ("kept", "cancelled", "twice", "copied"):
        topic.message(name, soon_ms)
    topic.message("waits", later_ms)
    with topic.serving(delivery) as serving:
        topic.cancel("cancelled", soon_ms)
        topic.cancel("twice", soon_ms)
        topic.cancel("twice", soon_ms)
        topic.cancel("overtakes", soon_ms)
        topic.cancel("waits", later_ms)
        topic.cancel("never", now_ms)
        topic.cancel("copied", soon_ms)
        found = topic.wait_for("cancelled", "twice", "waits", "copied")
        assert {found[name].status for name in ("cancelled", "twice", "waits", "copied")} == {
            "cancelled"
        }
        assert world.clock.now_ms() < soon_ms, "outcomes come before the due times"
        assert "overtakes" not in found
        topic.message("overtakes", soon_ms)
        topic.message("copied", soon_ms)
        assert topic.wait_for("overtakes")["overtakes"].status == "cancelled"
        unknown = topic.wait_for("never")["never"]
        assert unknown.status == "unknown"
        assert unknown.decided_ms is not None
        assert unknown.decided_ms >= now_ms + GRACE_MS
        world.eventually(lambda: topic.released() == ["kept"], "the release", seconds=15)
        released_ms = world.clock.now_ms()
        topic.cancel("kept", soon_ms)
        late = topic.wait_for("kept")["kept"]
        assert late.status == "too late"
        assert late.released_ms is not None
        assert soon_ms <= late.released_ms <= released_ms
        world.eventually(lambda: len(topic.outcomes()) >= 9, "the last outcome of each")
        topic.wait_until_acknowledged()
        stats = next(iter(serving.dispatcher.stats().values()))
        assert stats.pending == stats.in_flight == 0
        assert stats.outcomes["cancelled"] >= 6
        assert stats.outcomes["too late"] == stats.outcomes["unknown"] == 1
    assert topic.released() == ["kept"]
    assert [each.status for each in topic.outcomes() if each.id == "twice"] == ["cancelled"] * 2


def test_a_wrong_due_time_target_or_id_cancels_nothing(
    window: MakeWindow, world: RealWorld
) -> None:
    topic = window(targets=("orders", "invoices"))
    orders, invoices = sorted(topic.description.targets, reverse=True)
    due_ms = world.clock.now_ms() + 2_500
    topic.message("late", due_ms, orders)
    topic.message("early", due_ms + 1_000, orders)
    topic.message("other", due_ms, orders)
    with topic.serving():
        topic.cancel("other", due_ms - 2_500, invoices)
        topic.cancel("othre", due_ms - 2_500, orders)
        found = topic.wait_for("other", "othre")
        assert {found["other"].status, found["othre"].status} == {"unknown"}
        # With a wrong due time, the ID still names the message.
        topic.cancel("early", due_ms - 2_500, orders)
        assert topic.wait_for("early")["early"].status == "cancelled"
        world.eventually(lambda: len(world.stored(orders)) == 2, "the other messages")
        topic.cancel("late", due_ms + HOUR_MS, orders)
        assert topic.wait_for("late")["late"].status == "too late"


@pytest.mark.parametrize("policy", list(MissingTarget))
def test_messages_without_a_target(
    window: MakeWindow, world: RealWorld, policy: MissingTarget
) -> None:
    topic = window(on_missing_target=policy)
    world.admin.delete(world.name("orders"), force=True)
    due_ms = world.clock.now_ms() + 500
    with topic.serving() as serving:
        topic.message("gone", due_ms)
        stats = serving.dispatcher.stats
        world.eventually(
            lambda: any(s.dead or s.dropped or s.held for s in stats().values()), "its end"
        )
        topic.cancel("gone", due_ms)
        outcome = topic.wait_for("gone")["gone"]
        topic.wait_until_acknowledged()
    assert outcome.status == "unknown"
    expected = {
        MissingTarget.HOLD: "held",
        MissingTarget.DROP: "dropped",
        MissingTarget.DEAD_LETTER: "no such message",
    }
    assert expected[policy] in outcome.reason
    letters = list(dead_letters(world.plain_client, world.admin, topic.description))
    assert len(letters) == (policy is MissingTarget.DEAD_LETTER)


@pytest.mark.parametrize("delivery", list(Delivery))
def test_the_next_dispatcher_knows_what_was_decided(
    window: MakeWindow,
    world: RealWorld,
    delivery: Delivery,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if delivery is Delivery.EFFECTIVELY_ONCE:
        world.deduplicate()
    topic = window()
    due_ms = world.clock.now_ms() + 4_000
    topic.message("cancelled", due_ms)
    topic.message("kept", due_ms)
    decided = threading.Event()
    send = OutcomeTopic.send

    def die(self: OutcomeTopic, stored: int) -> None:
        if self.waits_for_journal and self._decided[0][0] <= stored:
            decided.set()
            raise RuntimeError("killed between the record and the outcome")

    monkeypatch.setattr(OutcomeTopic, "send", die)
    first = topic.serving(delivery)
    topic.cancel("cancelled", due_ms)
    assert decided.wait(20)
    assert topic.outcomes() == []
    monkeypatch.setattr(OutcomeTopic, "send", send)
    try:
        # The dispatcher takes the partition again, with the state from the journal.
        assert topic.wait_for("cancelled")["cancelled"].status == "cancelled"
        world.eventually(lambda: topic.released() == ["kept"], "the other message", seconds=15)
        topic.wait_until_acknowledged()
    finally:
        first.stop()
    assert topic.released() == ["kept"]


def test_old_outcomes_are_deleted(window: MakeWindow, world: RealWorld) -> None:
    topic = window()
    partition = topic.description.outcomes_topic.partition(0)
    producer = world.plain_client.create_producer(partition.full)
    producer.send(b"old")
    expire_outcomes(world.admin, topic.description)  # nothing is older than a day
    stats = world.admin.partition_stats

    def backlog() -> int:
        return stats(partition).subscriptions["delaylevel"].backlog_entries

    assert backlog() == 1

    def is_gone() -> bool:
        world.admin.expire_messages(partition, "delaylevel", 1)
        return not backlog()

    world.eventually(is_gone, "the end of what is older than a second")
