"""Tests of intents that are ahead of the due times, against the simulated broker."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pulsar
import pytest

from delaylevel.dispatcher.journal.records import Commit, Intent, Record, Resolved, decode
from delaylevel.dispatcher.journal.state import JournalState
from support.simulation import TARGETS, Simulation

ORDERS, INVOICES = TARGETS
BOTH = pytest.mark.parametrize("numbered", [False, True])


def ready(numbered: bool, directory: Path) -> Simulation:
    """Return a simulation with open producers."""
    run = Simulation(numbered, directory)
    for target in TARGETS:
        run.send(1, target, too_big=False)
    for _ in range(10):
        turn(run)
    assert not run.publisher.busy
    return run


def turn(run: Simulation, seconds: float = 0.1, store: bool = True) -> None:
    """Let everything make progress, then some time pass."""
    if store:
        run.work()
    run.cycle()
    for producer in list(run.broker.producers):
        producer.store(len(producer.wire))
        producer.confirm(len(producer.answers))
    run.wait(seconds)


def until(run: Simulation, at_s: float, every_s: float = 0.005) -> None:
    """Run turns up to a time of the simulation."""
    while run.clock.seconds < at_s:
        turn(run, every_s)


def send(run: Simulation, due_in_ms: Sequence[int], target: str = ORDERS) -> list[str]:
    """Send messages; return their IDs in due order."""
    first = len(run.sent)
    run.send(len(due_in_ms), target, too_big=False, due_in_ms=due_in_ms)
    return [
        f"id-{first + index}" for index in sorted(range(len(due_in_ms)), key=due_in_ms.__getitem__)
    ]


def records(run: Simulation) -> list[Record]:
    """Return all records of the journal, stored or not."""
    data = [*run.journal_topic.confirmed, *(each for each, _ in run.journal.tail)]
    return [decode(each) for each in data]


def delivered(run: Simulation, target: str = ORDERS) -> list[str]:
    """Return the IDs in a target, without the one that opened it."""
    return run.broker.topics[target].delivered[1:]


@BOTH
def test_one_intent_and_one_commit_cover_a_fraction_of_a_second(
    numbered: bool, tmp_path: Path
) -> None:
    run = ready(numbered, tmp_path)
    before = len(records(run))
    ids = send(run, range(40, 240, 10))
    until(run, run.clock.seconds + 0.6)
    assert delivered(run) == ids
    kinds = [type(each) for each in records(run)[before:]]
    assert kinds == [Intent, Commit]


@BOTH
def test_each_message_is_sent_when_it_is_due(numbered: bool, tmp_path: Path) -> None:
    run = ready(numbered, tmp_path)
    start_s = run.clock.seconds
    send(run, [50, 100, 150])
    for due_s, count in ((0.047, 0), (0.051, 1), (0.097, 1), (0.101, 2), (0.151, 3)):
        while run.clock.seconds < start_s + due_s:
            turn(run, 0.001)
        turn(run, 0)
        assert len(delivered(run)) == count


@BOTH
def test_nothing_is_sent_before_its_intent_is_confirmed(numbered: bool, tmp_path: Path) -> None:
    run = ready(numbered, tmp_path)
    ids = send(run, [30, 60])
    for _ in range(5):
        turn(run, 0.02, store=False)
    assert delivered(run) == []
    run.journal.store(1)
    turn(run)
    assert delivered(run) == ids


@BOTH
@pytest.mark.parametrize("together", [False, True])
def test_messages_that_arrive_later_keep_the_order_of_due_times(
    numbered: bool, together: bool, tmp_path: Path
) -> None:
    run = ready(numbered, tmp_path)
    start_s = run.clock.seconds
    send(run, [100, 150, 200, 250])
    until(run, start_s + 0.09)
    send(run, [50, 60, 60, 110, 160, 190])  # one before, and some at the same times
    until(run, start_s + 0.095)
    if together:  # the process has no turn until all are due
        run.wait(0.3)
    until(run, start_s + 0.6)
    stored = {message.message_id: number for number, message in enumerate(run.window)}
    order = [(run.window[stored[each]].due_ms, stored[each]) for each in delivered(run)]
    assert order == sorted(order)
    assert len(order) == 10
    resolved = [each for each in records(run) if isinstance(each, Resolved)]
    assert len(resolved) == (1 if numbered else 0)


@BOTH
def test_a_message_that_arrives_overdue_is_sent_at_once(numbered: bool, tmp_path: Path) -> None:
    run = ready(numbered, tmp_path)
    start_s = run.clock.seconds
    planned = send(run, [200, 250])
    until(run, start_s + 0.16)
    late = send(run, [-20])
    until(run, start_s + 0.19)
    assert delivered(run) == late
    until(run, start_s + 0.3)
    assert delivered(run) == late + planned


@BOTH
def test_a_stop_withdraws_what_is_planned(numbered: bool, tmp_path: Path) -> None:
    run = ready(numbered, tmp_path)
    start_s = run.clock.seconds
    first, *rest = send(run, [60, 150, 250])
    until(run, start_s + 0.08)
    assert delivered(run) == [first]
    run.publisher.withdraw_plans()
    run.publisher.process()
    run.publisher.write_commits()
    assert not len(run.publisher)
    run.journal.store(len(run.journal.tail))
    state = JournalState.read(run.journal_topic.confirmed, 1000)
    assert not state.open_intents
    until(run, start_s + 0.1, 0.01)
    run.takeover(random.Random(0))
    for _ in range(20):
        turn(run)
    assert delivered(run) == [first, *rest]


def test_the_next_owner_cancels_nothing_that_may_be_stored(tmp_path: Path) -> None:
    run = Simulation(False, tmp_path)
    run.desk.start()
    run.wait(3600)  # of what is due before, the journal does not tell what is sent
    run.send(1, ORDERS, too_big=False)
    until(run, run.clock.seconds + 0.5, 0.1)
    start_s = run.clock.seconds
    sent, planned = send(run, [60, 250])
    until(run, start_s + 0.055)
    run.wait(0.01)
    run.cycle()
    (producer,) = (each for each in run.broker.producers if each.topic.name == ORDERS)
    producer.store(1)
    producer.fail(pulsar.Result.Timeout)  # stored, but nobody knows
    run.publisher.withdraw_plans()
    run.publisher.process()
    run.publisher.write_commits()
    assert not len(run.publisher)
    run.journal.store(len(run.journal.tail))
    run.takeover(random.Random(0))
    for each in (sent, planned):
        run.cancel(int(each.removeprefix("id-")), ORDERS)
    run.settle()
    assert run.outcomes()[sent] == {"too late"}
    run.check()


@BOTH
def test_a_target_that_refuses_at_the_due_time_gets_nothing(numbered: bool, tmp_path: Path) -> None:
    run = ready(numbered, tmp_path)
    start_s = run.clock.seconds
    send(run, [60, 100])
    until(run, start_s + 0.03)
    run.pool.refuse(ORDERS, "", "it is over its quota")
    until(run, start_s + 0.5, 0.02)
    assert delivered(run) == []
    held = run.broker.topics[run.description.held_topic.partition(0).full]
    assert len(held.messages) == 2
    assert not run.publisher.busy


@BOTH
def test_a_slow_target_keeps_what_is_planned_and_delays_no_other(
    numbered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delaylevel.dispatcher.publishing.publisher.IN_FLIGHT_MESSAGES", 1)
    run = ready(numbered, tmp_path)
    start_s = run.clock.seconds
    slow = send(run, [60, 70, 80, 90])
    fast = send(run, [75, 85], INVOICES)
    while run.clock.seconds < start_s + 0.9:
        run.work()
        run.cycle()
        for producer in run.broker.producers:
            if producer.topic.name == INVOICES:
                producer.store(len(producer.wire))
                producer.confirm(len(producer.answers))
        run.wait(0.01)
    assert delivered(run, INVOICES) == fast
    assert run.queue.in_flight <= len(slow)
    for _ in range(20):
        turn(run)
    assert delivered(run) == slow


@BOTH
def test_a_crash_repeats_nothing_that_was_not_sent(numbered: bool, tmp_path: Path) -> None:
    run = ready(numbered, tmp_path)
    start_s = run.clock.seconds
    ids = send(run, [60, 100, 200, 300])
    until(run, start_s + 0.12)
    assert delivered(run) == ids[:2]
    run.takeover(random.Random(0))
    for _ in range(20):
        turn(run)
    copies = [] if numbered else ids[:2]
    assert sorted(delivered(run)) == sorted(ids + copies)
