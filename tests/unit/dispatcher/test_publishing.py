"""Tests of publishing and its records step by step, against the simulated broker."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from delaylevel.cluster.targets.pool import TargetKey
from delaylevel.dispatcher.journal.records import UNCERTAIN, Commit, Intent, Released, decode
from delaylevel.dispatcher.pending import DISK_FULL_PARTITION, PendingIndex, WaitingQueues
from delaylevel.dispatcher.publishing.in_flight import expired
from delaylevel.dispatcher.publishing.publisher import TargetState
from delaylevel.dispatcher.record import Batch, WindowMessage
from delaylevel.model import envelope as env
from delaylevel.model.level_topic import Expired
from delaylevel.structures.segments.pending import PendingSegments
from support.fakes import describe
from support.simulation import TARGETS, Simulation

ORDERS, INVOICES = TARGETS


def few_at_once(patch: pytest.MonkeyPatch, *, in_flight: int, batch: int) -> None:
    """Lower the limits of a target's messages in flight, and of those that are launched at once."""
    patch.setattr("delaylevel.dispatcher.publishing.in_flight.IN_FLIGHT_MESSAGES", in_flight)
    patch.setattr("delaylevel.dispatcher.publishing.publisher._BATCH", batch)


def opened(run: Simulation, targets: Sequence[str] = (ORDERS,)) -> Simulation:
    """Return a simulation with an open producer for some targets, and nothing in flight."""
    for target in targets:
        run.send(1, target, too_big=False)
    run.rounds(20, 0.1)
    assert not run.publisher.busy
    return run


def delivered(run: Simulation, target: str = ORDERS) -> list[str]:
    return run.broker.topics[target].delivered


def held(run: Simulation) -> list[str]:
    """Return the IDs in the held topic."""
    topic = run.broker.topics.get(run.description.held_topic.partition(0).full)
    return [properties[env.ID] for _, properties in topic.messages] if topic else []


# -- a target that is slow, or refuses


def is_full(run: Simulation) -> None:
    run.send(30, ORDERS, too_big=False)
    run.progress(10, 0.1)
    run.send(5, ORDERS, too_big=False, compression="LZ4")


def refuses(run: Simulation) -> None:
    run.broker.topics[ORDERS].refuses = True
    run.send(200, ORDERS, too_big=False)


def takes_nothing_so_large(run: Simulation) -> None:
    run.send(200, ORDERS, too_big=True)


def refuses_as_the_held_topic_does(run: Simulation) -> None:
    refuses(run)
    run.broker.topic(run.description.held_topic.partition(0).full).refuses = True


def has_expired(run: Simulation) -> None:
    run.description = replace(run.description, expired=Expired.DEAD_LETTER)
    run.send(100, ORDERS, too_big=False, expires_after_ms=(1,))
    run.wait(1)


def is_unknown(run: Simulation) -> None:
    properties = {env.ID: "unreadable", env.REASON: "it has no due time"}
    message = WindowMessage("", 0, 0, "", "", 0, "unreadable", "", "", 0, properties, b"?")
    run.window += [message] * 100


def is_refused_when_the_intents_are_written(run: Simulation) -> None:
    opened(run, TARGETS)
    run.pool.refuse(ORDERS, "", "over quota")
    run.send(50, ORDERS, too_big=False)
    for _ in range(10):
        run.work()
        run.cycle()
        run.wait(0.02)
    run.wait(1)
    run.cycle()
    run.pool.refuse(ORDERS, "", "over quota")


@pytest.mark.parametrize(
    "fault",
    [
        *(is_full, refuses, takes_nothing_so_large, refuses_as_the_held_topic_does),
        *(has_expired, is_unknown, is_refused_when_the_intents_are_written),
    ],
)
def test_what_a_target_does_not_take_stops_no_other_target(
    run: Simulation, fault: Callable[[Simulation], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few messages are set aside at a time, and the held and the dead-letter topic are slow."""
    few_at_once(monkeypatch, in_flight=10, batch=5)
    monkeypatch.setattr(TargetState.OPENING, "stops_from", 5)
    monkeypatch.setattr("delaylevel.dispatcher.publishing.in_flight._MANY", 1)
    monkeypatch.setattr("delaylevel.dispatcher.publishing.publisher._PREPARED", 10)
    fault(run)
    before = len(delivered(run, INVOICES))
    for _ in range(50):
        run.send(2, INVOICES, too_big=False)
        run.work()
        run.cycle()
        run.broker.answer(INVOICES.__eq__)
        run.wait(0.05)
        assert run.queue.in_flight <= 60
    assert run.processes == 1
    assert len(delivered(run, INVOICES)) - before >= 96
    run.settle()
    run.check()


def test_large_properties_share_no_batch_when_they_are_set_aside(tmp_path: Path) -> None:
    run = Simulation(False, tmp_path)
    run.broker.topics[ORDERS].refuses = True
    run.send(2, ORDERS, too_big=False)
    run.window[0].properties["large"] = "x" * 5_000  # type: ignore[union-attr]
    run.progress(10, 0.1)
    assert sorted(held(run)) == ["id-0", "id-1"]
    name = run.description.held_topic.partition(0).full
    holding = [each for each in run.broker.producers if each.topic.name == name]
    assert sorted(each.settings["batching_enabled"] for each in holding) == [False, True]


def test_no_message_passes_those_that_wait_for_the_same_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_at_once(monkeypatch, in_flight=4, batch=3)
    run = Simulation(False, tmp_path)
    run.send(30, ORDERS, too_big=False)
    run.progress(10, 0.1)  # it is slow
    waiting = run.queue.waiting.count(TargetKey(ORDERS))
    assert waiting
    run.broker.answer(ORDERS.__eq__)  # it has room before those that wait are looked at
    for _ in range(2):
        run.publisher.in_flight.process()
        run.work()
    assert not len(run.publisher.in_flight)
    run.send(5, ORDERS, too_big=False)
    run.wait(1.0)
    run.offer()
    batch = run.queue.advance(run.clock.now_ms(), 5)
    assert batch is not None
    run.publisher.publish(batch)
    assert run.queue.waiting.count(TargetKey(ORDERS)) == waiting + len(batch)
    run.settle()
    run.check()
    assert delivered(run) == [f"id-{number}" for number in range(35)]


def test_messages_wait_in_memory_if_there_is_no_other_place(
    run: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target is slow, the disk full, and the held topic as slow."""
    few_at_once(monkeypatch, in_flight=4, batch=3)
    monkeypatch.setattr("delaylevel.dispatcher.pending._IN_MEMORY", 4)
    run.send(60, ORDERS, too_big=False)
    run.disk_full = True
    aside = TargetKey(ORDERS, partition=DISK_FULL_PARTITION)
    for _ in range(100):
        run.work()
        run.cycle()
        run.wait(0.02)
        if run.queue.waiting.count(aside):
            break
    assert run.queue.waiting.count(aside)
    assert not run.publisher.ready  # nothing else is taken
    assert len(run.queue) > 30
    run.settle()
    run.check()
    assert not run.queue.waiting.targets


def test_many_targets_that_wait_share_the_memory(run: Simulation, tmp_path: Path) -> None:
    run.send(1, ORDERS, too_big=False)
    record = run.window[0]._replace(value=bytes(25_000))  # type: ignore[call-arg]
    names = itertools.count()

    def overflow() -> PendingIndex:
        return PendingIndex(PendingSegments(tmp_path / f"{next(names)}", budget_bytes=1 << 20), "")

    waiting = WaitingQueues(run.clock, overflow, 1 << 20)
    for first in (0, 8):
        batch = Batch(np.full(8, record.due_ms), np.arange(first, first + 8), [record] * 8)
        for number in range(40):
            waiting.put(TargetKey(f"target-{number}"), batch)
    assert waiting.memory_bytes < 5 << 20  # of 16 MiB
    while waiting.targets:
        assert len(waiting.take(waiting.targets[0], 8)) == 8
    assert waiting.memory_bytes == 0


# -- the journal around a send


def kinds(run: Simulation) -> list[type[Any]]:
    """Return the kinds of the records that name messages."""
    data = [*run.journal_topic.confirmed, *(each for each, _ in run.journal.tail)]
    every = [type(decode(each)) for each in data]
    return [kind for kind in every if kind in (Intent, Released, Commit)]


def test_the_records_of_a_fraction_of_a_second(run: Simulation) -> None:
    opened(run, TARGETS)
    before = len(kinds(run))
    run.send(20, ORDERS, too_big=False, due_in_ms=range(40, 240, 10))
    run.rounds(100, 0.01)
    assert len(delivered(run)) == 21
    found = kinds(run)[before:]
    if run.numbered:
        assert set(found) == {Intent, Commit}
        assert found.count(Intent) == found.count(Commit) > 10
    else:
        # Batches without sequence IDs have one record each, and these are gathered.
        assert set(found) == {Released}
        assert len(found) <= 5


def test_a_burst_that_is_confirmed_at_once_has_several_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker takes no record above its limit, and each target may have 2,000 in a burst."""
    run = opened(Simulation(False, tmp_path))
    monkeypatch.setattr("delaylevel.dispatcher.publishing.in_flight._UNCOMMITTED", 10)
    run.send(60, ORDERS, too_big=False)
    run.wait(0.02)
    run.progress(5)
    run.broker.answer(ORDERS.__eq__)
    run.progress(5, 0.1)
    data = [*run.journal_topic.confirmed, *(each for each, _ in run.journal.tail)]
    sizes = [record.positions.size for record in map(decode, data) if isinstance(record, Released)]
    assert sum(sizes) == len(delivered(run)) == 61
    assert max(sizes) <= 10


def pause_after(run: Simulation, messages: int) -> float:
    """Return the time until the next send, in s, if some messages are due at once."""
    run.wait(3.01)
    run.send(messages, ORDERS, too_big=False)
    run.wait(0.02)
    run.progress(1)
    assert run.publisher.in_flight.sent_ms == run.clock.now_ms()
    return run.publisher.in_flight.pause_s


def test_messages_of_quiet_hours_go_together_in_all_partitions_at_once(run: Simulation) -> None:
    opened(run)
    for messages, pause_s in ((1, 0.2), (50, 1 / 15)):
        left_s = pause_after(run, messages)
        end_s = run.clock.monotonic_s() + left_s
        assert 0 < left_s <= pause_s
        assert end_s == pytest.approx(round(end_s / pause_s) * pause_s, rel=0, abs=1e-6)
    assert pause_after(run, 500) < 0.01, "a burst after idle times is not taken for quiet hours"


def test_no_numbered_message_is_sent_before_its_intent_is_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delaylevel.dispatcher.publishing.in_flight._MANY", 1)
    run = opened(Simulation(True, tmp_path), TARGETS)
    run.send(2, ORDERS, too_big=False)
    for _ in range(5):
        run.round(0.02, work=False)
    assert delivered(run) == ["id-0"]
    run.round(0.1)
    run.round(0.1)
    assert delivered(run) == ["id-0", "id-2", "id-3"]


def test_a_burst_is_sent_without_a_wait_for_its_intents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delaylevel.dispatcher.publishing.in_flight._MANY", 5)
    monkeypatch.setattr("delaylevel.dispatcher.publishing.publisher._PREPARED", 10)
    run = opened(Simulation(True, tmp_path))
    run.send(100, ORDERS, too_big=False)
    run.wait(0.02)
    producer = run.pool.producer(TargetKey(ORDERS))
    for _ in range(3):
        run.cycle()
        assert not producer.messages  # no intent is confirmed
        assert run.publisher.in_flight.prepared == 10  # and no more of them are written
    run.journal.store(len(run.journal.tail))
    run.cycle()
    assert producer.messages == 10
    run.settle()
    run.check()


@pytest.mark.parametrize("recorded", [False, True])
def test_no_message_passes_a_refusal_that_the_journal_does_not_know(
    recorded: bool, tmp_path: Path
) -> None:
    """The sequence ID of the later one would tell the next owner that both are stored."""
    run = opened(Simulation(True, tmp_path))
    run.send(1, ORDERS, too_big=True)
    run.send(1, ORDERS, too_big=False)
    run.wait(0.02)
    for _ in range(3 if recorded else 1):
        run.cycle()  # the dead-letter topic does not answer
    for _ in range(2):  # the second owner reads the snapshot of the first one
        run.takeover(random.Random(0), worst=True)
    run.settle()
    run.check()


def test_what_the_journal_calls_released_is_not_published_again_when_its_id_is_forgotten(
    run: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Simulation, "remember", 2)
    run.takeover(random.Random(0))
    run.send(10, ORDERS, too_big=False, due_in_ms=(60_000, 10, 10))  # some hold the low watermark
    run.rounds(20)
    run.takeover(random.Random(0))
    run.settle()
    assert sorted(delivered(run)) == sorted(run.sent)


@pytest.mark.parametrize("refused", [False, True])
def test_without_a_fresh_proof_nothing_is_sent_or_set_aside(run: Simulation, refused: bool) -> None:
    """A machine was suspended, and its monotonic clock stood still: the proof only seems fresh.

    A held message comes back with its next attempt, which no cancellation names.
    """
    opened(run, TARGETS)
    if refused:
        run.pool.refuse(ORDERS, "", "it is over its quota")
    run.send(1, ORDERS, too_big=False)
    run.wait(0.02)
    run.journal.fails_after = 0
    run.journal._proven_s = run.clock.seconds - 1.5
    processes = run.processes
    run.cycle()
    assert run.processes == processes + 1, "it went on without a proof"
    assert run.description.held_topic.partition(0).full not in run.broker.topics


def test_targets_are_opened_some_time_before_the_next_message(run: Simulation) -> None:
    opened(run, TARGETS)
    run.send(1, ORDERS, too_big=False, due_in_ms=(60_000,))
    run.wait(59.5)
    run.round(0.15)
    assert not run.pool.producer(TargetKey(ORDERS)).state.is_open
    run.rounds(4, 0.05)
    assert run.clock.now_ms() < run.window[-1].due_ms
    assert run.pool.producer(TargetKey(ORDERS)).state.is_open
    assert run.journal.proof_age_s < 1
    assert delivered(run) == ["id-0"]
    assert not run.pool.producer(TargetKey(INVOICES)).state.is_open


# -- expiry


@pytest.mark.parametrize("left_ms", [0, 1])
def test_a_message_expires_in_the_millisecond_of_its_expiry(run: Simulation, left_ms: int) -> None:
    opened(run)
    expires_ms = run.clock.now_ms() + 500
    run.add("x", ORDERS, 0, b"x", expires_ms=expires_ms)
    while run.clock.now_ms() < expires_ms - left_ms:  # the process has no turn
        run.wait(0.0005)
    run.cycle()
    run.progress(3, 0.1)
    run.broker.answer(ORDERS.__eq__)
    assert delivered(run)[1:] == (["x"] if left_ms else [])
    assert held(run) == []


@pytest.mark.parametrize("refused", [False, True])
def test_a_message_that_expires_while_the_journal_confirms_is_not_sent_or_held(
    run: Simulation, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    opened(run)
    store = run.journal.store

    def slowly(count: int) -> None:
        run.wait(1)
        if refused:
            run.pool.refuse(ORDERS, "", "over quota")
        store(count)

    run.add("x", ORDERS, 0, b"x", expires_ms=run.clock.now_ms() + 500)
    run.wait(0.02)
    run.journal._proven_s = float("-inf")
    with monkeypatch.context() as patch:
        patch.setattr(run.journal, "store", slowly)
        run.cycle()
    for _ in range(2):
        run.progress(3, 0.1)
        run.broker.answer(ORDERS.__eq__)
    assert delivered(run) == ["id-0"]
    assert held(run) == []
    assert run.stats.now().expired == 1


def test_what_expires_at_its_due_time_expires_also_where_it_is_released_early() -> None:
    messages = [SimpleNamespace(due_ms=1_000, expires_ms=each) for each in (0, 999, 1_000, 1_001)]
    assert expired(describe(), cast(Any, messages), 990) == {1: 999, 2: 1_000}


@pytest.mark.parametrize("takeovers", [1, 2])
def test_a_message_that_an_earlier_owner_may_still_send_does_not_expire(
    takeovers: int, tmp_path: Path
) -> None:
    """Its client sends it once the name of its producer is free, unless a later one was stored."""
    run = opened(Simulation(True, tmp_path))
    run.add("x", ORDERS, 0, b"x", expires_ms=run.clock.now_ms() + 1_000)
    run.wait(0.02)
    run.cycle()
    (producer,) = (each for each in run.broker.producers if each.wire)
    producer.wire.clear()
    for _ in range(takeovers):
        run.takeover(random.Random(0))
        for _ in range(3):
            run.work()
            run.publisher.in_flight.process()
        run.journal.store(len(run.journal.tail))
        (left,) = run.queue.state.open_intents.values()
        assert left.first == UNCERTAIN, "its intent is resolved, and one of what is uncertain left"
    run.wait(2)
    run.progress(5, 0.1)
    run.broker.answer(ORDERS.__eq__)
    assert delivered(run) == ["id-0", "x"]


def test_only_the_flights_of_a_target_are_looked_at_for_what_it_refuses(
    run: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a burst to many targets, each is asked for, and thousands of flights are open."""

    class Unread(set[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("all flights were looked at")

    opened(run, TARGETS)
    flights = run.publisher.in_flight
    monkeypatch.setattr(flights, "_open", Unread(flights._open))
    run.send(3, ORDERS, too_big=True)
    loads = []
    for _ in range(10):
        run.work()
        run.cycle()
        run.broker.answer(ORDERS.__eq__)
        run.wait(0.1)
        loads.append(flights.refused_load(ORDERS)[0])
        assert flights.refused_load(INVOICES) == (0, 0)
    assert max(loads) == 3
    run.progress(20, 0.1)
    assert flights.refused_load(ORDERS) == (0, 0)
