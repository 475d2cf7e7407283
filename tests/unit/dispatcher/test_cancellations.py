"""Tests of cancellations of what an earlier owner may have sent, and of messages that are late."""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path

import pytest

from delaylevel.model.level_topic import SUBSCRIPTION
from delaylevel.model.outcome import KEY
from delaylevel.structures.id_columns import IdColumns, RecentTimes
from delaylevel.testing import MemoryPulsar
from support.simulation import TARGETS, Simulation

ORDERS = TARGETS[0]


@pytest.fixture
def run(tmp_path: Path) -> Simulation:
    # Without sequence IDs, the journal tells nothing of what an earlier owner has sent just now.
    return Simulation(False, tmp_path)


def work(run: Simulation) -> dict[str, set[str]]:
    """Let everything but the targets make progress; return the outcomes so far, by ID."""
    run.progress(6)
    return run.outcomes()


@pytest.mark.parametrize("due_in_ms", [-3_600_000, 0, 5_000, 5_001, 3_600_000])
def test_what_was_due_at_a_takeover_is_not_cancelled_before_its_release(
    due_in_ms: int, run: Simulation
) -> None:
    run.takeover(random.Random(0))
    run.send(1, ORDERS, too_big=False, due_in_ms=(due_in_ms,))
    run.cancel(0, ORDERS, due_in_ms)
    if due_in_ms > 5_000:
        assert work(run) == {"id-0": {"cancelled"}}
        return
    assert work(run) == {}
    run.wait(max(due_in_ms, 0) / 1000)
    assert work(run) == {}
    run.rounds(20)
    assert work(run) == {"id-0": {"too late"}}


def test_what_waits_for_the_end_of_a_pause_is_cancelled_after_a_takeover(run: Simulation) -> None:
    run.send(1, ORDERS, too_big=False)
    run.rounds(40, 0.25)
    run.pause(ORDERS)
    run.send(2, ORDERS, too_big=False, due_in_ms=(0, 60_000))
    work(run)
    run.wait(3_600)
    run.takeover(random.Random(0))
    first_ms, waits_ms, _ = (each.due_ms for each in run.window)
    run.add("as the first", ORDERS, 0, b"x", due_in_ms=first_ms - run.clock.now_ms())
    run.name = ["id-0", "id-1", "id-2", "as the first"].__getitem__
    for number in (1, 2, 3):
        run.cancel(number, ORDERS)
    before = {"id-1": {"cancelled"}, "id-2": {"cancelled"}}
    assert work(run) == before
    # After the pause, one message is sent to the target. Now all may have been.
    run.resume()
    run.rounds(20)
    run.takeover(random.Random(0))
    run.pause(ORDERS)
    run.add("as the second", ORDERS, 0, b"x", due_in_ms=waits_ms - run.clock.now_ms())
    run.name = lambda _: "as the second"
    run.cancel(0, ORDERS)
    assert work(run) == before | {"as the first": {"too late"}}


def test_what_is_set_aside_after_a_pause_is_not_cancelled_after_a_takeover(run: Simulation) -> None:
    """It comes back with its next attempt, which no cancellation names."""
    run.pause(ORDERS)
    run.send(1, ORDERS, too_big=False)
    run.wait(60)
    work(run)
    run.resume()
    run.pool.refuse(ORDERS, "", "it is over its quota")
    assert work(run) == {}
    assert run.broker.topics[run.description.held_topic.partition(0).full].messages
    run.takeover(random.Random(0), worst=True)
    run.cancel(0, ORDERS)
    run.settle()
    assert run.outcomes() == {"id-0": {"too late"}}
    run.check()


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("takeovers", [1, 2])
def test_what_was_sent_by_a_clock_that_was_ahead_is_not_cancelled_after_a_takeover(
    takeovers: int, numbered: bool, tmp_path: Path
) -> None:
    run = Simulation(numbered, tmp_path)
    run.send(1, ORDERS, too_big=False)
    run.rounds(20, 0.1)
    run.clock.ahead_ms = 60_000
    run.send(2, ORDERS, too_big=False, due_in_ms=(10, 60_000))
    run.wait(0.01)
    work(run)
    assert list(run.sent_ms) == ["id-0", "id-1"]
    run.clock.ahead_ms = 0
    for _ in range(takeovers):
        run.takeover(random.Random(0), worst=True)
    run.broker.topics[ORDERS].away = True  # it does not tell what it has stored
    run.cancel(1, ORDERS, 60_000)
    run.cancel(2, ORDERS, 120_000)
    assert work(run) == {"id-2": {"cancelled"}}
    run.settle()
    assert run.outcomes() == {"id-1": {"too late"}, "id-2": {"cancelled"}}
    run.check()


def test_a_clock_that_was_far_ahead_keeps_nothing_later_from_being_cancelled(
    run: Simulation,
) -> None:
    run.clock.ahead_ms = 3_600_000
    run.takeover(random.Random(0))
    run.clock.ahead_ms = 0
    # An earlier owner may have read the first message.
    for number, due_in_ms in enumerate((180_000, 60_000)):
        run.send(1, ORDERS, too_big=False, due_in_ms=(due_in_ms,))
        run.cancel(number, ORDERS)
        run.progress(8, seconds=1)
    assert work(run) == {"id-1": {"cancelled"}}
    run.wait(170)
    run.settle()
    assert run.outcomes() == {"id-0": {"too late"}, "id-1": {"cancelled"}}
    run.check()


def test_a_message_that_waits_for_its_target_is_cancelled(run: Simulation) -> None:
    run.pause(ORDERS)
    run.send(3, ORDERS, too_big=False)
    run.wait(0.02)
    work(run)
    run.cancel(1, ORDERS)
    assert work(run) == {"id-1": {"cancelled"}}
    run.resume()
    run.rounds(20)
    assert run.broker.topics[ORDERS].delivered == ["id-0", "id-2"]


def test_the_last_release_of_each_of_the_last_messages_is_known() -> None:
    times = RecentTimes(most=2_500)
    for at_ms in range(6_000):
        times.add(IdColumns.of([(f"k{at_ms % 3}", at_ms), ("again", 1)]), at_ms)
    last = [(f"k{number % 3}", number) for number in range(6_000)]
    known = {number: at_ms for (_, number), at_ms in times.times_of(last).items()}
    assert known == {number: number for number in range(min(known), 6_000)}
    assert 1_250 <= len(known) <= 1_250 + 1_000
    assert times.times_of([("again", 1), ("k0", 1)]) == {("again", 1): 5_999}


def test_an_outcome_that_is_too_large_keeps_nothing_from_being_acknowledged(
    memory_pulsar: MemoryPulsar, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has the key of its message twice."""
    monkeypatch.setattr("delaylevel.testing.memory.producer.MAX_MESSAGE_BYTES", 50_000)
    client = memory_pulsar.client()
    producer = client.create_producer("orders", enable_delay_level_topic=True)
    for key in ("k" * 30_000, "k"):
        receipt = producer.schedule(b"x", partition_key=key, deliver_after=timedelta(hours=1))
        producer.cancel(receipt)
    memory_pulsar.advance(timedelta(hours=2))
    assert memory_pulsar.delivered("orders") == []
    (described,) = memory_pulsar._broker.level_topics()
    for partition in range(described.window_partitions):
        stats = memory_pulsar.admin.partition_stats(described.window_topic.partition(partition))
        assert stats.subscriptions[SUBSCRIPTION].backlog_entries == 0, partition
    (outcome,) = memory_pulsar.delivered(described.outcomes_topic.full)
    assert outcome.properties[KEY] == "k"
    assert caplog.text.count("too large to be stored") == 1
