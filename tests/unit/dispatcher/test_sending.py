"""Tests of the journal records around a send, against the simulated broker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from delaylevel.cluster.targets.pool import TargetKey
from delaylevel.dispatcher.journal.records import Commit, Intent, Paused, Record, Released, decode
from delaylevel.model.level_topic import ALL
from support.simulation import TARGETS, Simulation

ORDERS, INVOICES = TARGETS
BOTH = pytest.mark.parametrize("numbered", [False, True])


def turn(run: Simulation, seconds: float = 0.1, work: bool = True) -> None:
    """Let everything make progress, then some time pass."""
    if work:
        run.work()
    run.cycle()
    for producer in list(run.broker.producers):
        producer.store(len(producer.wire))
        producer.confirm(len(producer.answers))
    run.wait(seconds)


def ready(numbered: bool, directory: Path) -> Simulation:
    """Return a simulation with open producers, and nothing in flight."""
    run = Simulation(numbered, directory)
    for target in TARGETS:
        run.send(1, target, too_big=False)
    for _ in range(10):
        turn(run)
    assert not run.publisher.busy
    return run


def kinds(run: Simulation) -> list[type[Record]]:
    """Return the kinds of the records that name messages."""
    data = [*run.journal_topic.confirmed, *(each for each, _ in run.journal.tail)]
    every = [type(decode(each)) for each in data]
    return [kind for kind in every if kind in (Intent, Released, Commit, Paused)]


@BOTH
def test_the_records_of_a_fraction_of_a_second(numbered: bool, tmp_path: Path) -> None:
    run = ready(numbered, tmp_path)
    before = len(kinds(run))
    run.send(20, ORDERS, too_big=False, due_in_ms=range(40, 240, 10))
    for _ in range(60):
        turn(run, 0.01)
    assert len(run.broker.topics[ORDERS].delivered) == 21
    found = kinds(run)[before:]
    if numbered:
        assert set(found) == {Intent, Commit}
        assert found.count(Intent) == found.count(Commit) > 10
    else:
        # Batches without sequence IDs have one record each, and these are gathered.
        assert set(found) == {Released}
        assert len(found) <= 5


@BOTH
def test_each_message_is_sent_when_it_is_due(numbered: bool, tmp_path: Path) -> None:
    run = ready(numbered, tmp_path)
    start_s = run.clock.seconds
    run.send(3, ORDERS, too_big=False, due_in_ms=(50, 100, 150))
    for due_s, count in ((0.047, 0), (0.051, 1), (0.097, 1), (0.101, 2), (0.151, 3)):
        while run.clock.seconds < start_s + due_s:
            turn(run, 0.001)
        turn(run, 0)
        assert len(run.broker.topics[ORDERS].delivered) == 1 + count


def test_no_numbered_message_is_sent_before_its_intent_is_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delaylevel.dispatcher.publishing.flights._MANY", 1)
    run = ready(True, tmp_path)
    run.send(2, ORDERS, too_big=False)
    for _ in range(5):
        turn(run, 0.02, work=False)
    assert run.broker.topics[ORDERS].delivered == ["id-0"]
    turn(run)
    turn(run)
    assert run.broker.topics[ORDERS].delivered == ["id-0", "id-2", "id-3"]


@BOTH
def test_targets_are_opened_some_time_before_the_next_message(
    numbered: bool, tmp_path: Path
) -> None:
    run = ready(numbered, tmp_path)
    run.send(1, ORDERS, too_big=False, due_in_ms=(60_000,))
    run.wait(59.5)
    turn(run, 0.15)
    assert not run.pool.producer(TargetKey(ORDERS)).is_open
    for _ in range(4):
        turn(run, 0.05)
    assert run.clock.now_ms() < run.window[-1].due_ms
    assert run.pool.producer(TargetKey(ORDERS)).is_open
    assert run.journal.proof_age_s < 1
    assert run.broker.topics[ORDERS].delivered == ["id-0"]
    assert not run.pool.producer(TargetKey(INVOICES)).is_open


@BOTH
def test_a_proof_that_only_the_wall_clock_calls_old_is_renewed(
    numbered: bool, tmp_path: Path
) -> None:
    """A machine was suspended: its monotonic clock stood still."""
    run = ready(numbered, tmp_path)
    run.send(1, ORDERS, too_big=False)
    run.wait(0.02)
    run.journal.fails_after = 0
    run.journal._proven_s = run.clock.seconds - 1.5
    processes = run.processes
    run.cycle()
    assert run.processes == processes + 1, "it sent a message without a proof"


@BOTH
def test_nothing_is_set_aside_without_a_fresh_proof(numbered: bool, tmp_path: Path) -> None:
    """A held message comes back with its next attempt, which no cancellation names."""
    run = ready(numbered, tmp_path)
    run.pool.refuse(ORDERS, "", "it is over its quota")
    run.send(1, ORDERS, too_big=False)
    run.wait(0.02)
    run.journal.fails_after = 0
    run.journal._proven_s = run.clock.seconds - 1.5
    processes = run.processes
    run.cycle()
    assert run.processes == processes + 1, "it set a message aside without a proof"
    assert run.description.held_topic.partition(0).full not in run.broker.topics


@BOTH
def test_a_pause_and_its_end_are_in_the_journal(numbered: bool, tmp_path: Path) -> None:
    run = ready(numbered, tmp_path)
    now_ms = run.clock.now_ms()
    paused = run.description.pauses.pause(ALL, now_ms)
    run.description = replace(run.description, pauses=paused)
    run.send(2, ORDERS, too_big=False)
    for _ in range(3):
        turn(run)
    assert kinds(run)[-1] is Paused
    assert list(run.queue.state.paused) == [ORDERS]
    resumed = paused.resume(ALL, run.clock.now_ms())
    run.description = replace(run.description, pauses=resumed)
    for _ in range(3):
        turn(run)
    assert run.queue.state.paused == {}
    assert len(run.broker.topics[ORDERS].delivered) == 3
