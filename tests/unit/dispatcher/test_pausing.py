"""Tests of pauses in a dispatcher's publishing, against the simulated broker."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from delaylevel.model.level_topic import ALL
from support.simulation import TARGETS, Simulation

ORDERS, INVOICES = TARGETS


def put(run: Simulation, target: str = ORDERS, due_in_ms: int = 10) -> str:
    """Put a message into the window topic, and return its ID."""
    (found,) = run.send(1, target, False, "", (due_in_ms,))
    return found


def run_for(run: Simulation, seconds: float) -> None:
    end_s = run.clock.seconds + seconds
    while run.clock.seconds < end_s:
        run.round()


def paused(run: Simulation, count: int) -> list[str]:
    """Pause everything, and let this many messages become due; return their IDs."""
    put(run)
    run_for(run, 1)
    run.pause()
    waits = [put(run) for _ in range(count)]
    run_for(run, 1)
    return waits


def test_messages_of_a_paused_target_wait_and_others_do_not(run: Simulation) -> None:
    before = put(run)
    run_for(run, 1)
    run.pause(ORDERS)
    waits = [put(run) for _ in range(5)]
    passes = put(run, INVOICES)
    run_for(run, 3)
    assert set(run.sent_ms) == {before, passes}
    assert not run.publisher.has_waiting
    assert run.publisher.next_spread_ms is None
    assert run.stats.now().next_due_ms is None
    assert (len(run.queue), list(run.queue.state.paused)) == (5, [ORDERS])
    run.takeover(random.Random(1))
    run_for(run, 3)
    assert set(run.sent_ms) == {before, passes}
    run.resume()
    run_for(run, 1)
    assert run.broker.topics[ORDERS].delivered == [before, *waits]
    assert run.broker.topics[INVOICES].delivered == [passes]
    assert run.queue.state.paused == {}


def test_what_waits_for_its_target_is_not_overdue_while_that_is_paused(run: Simulation) -> None:
    run.broker.topics[ORDERS].away = True
    put(run)
    run_for(run, 1)
    run.pause(ORDERS)
    run_for(run, 2)
    assert (len(run.queue), run.stats.now().next_due_ms) == (1, None)


@pytest.mark.parametrize("behind_ms", [0, 3_000])
def test_a_spread_is_even_and_later_messages_are_on_time(run: Simulation, behind_ms: int) -> None:
    """It begins by the clock of the machine where it was resumed."""
    waits = paused(run, 300)
    begin_ms = run.clock.now_ms() + behind_ms
    pauses = run.description.pauses.resume(ALL, begin_ms, 10_000)
    run.description = replace(run.description, pauses=pauses)
    later_ms = range(500, 9_500, 500)
    dues = {put(run, due_in_ms=behind_ms + each): begin_ms + each for each in later_ms}
    run_for(run, 12 + behind_ms / 1000)
    for message_id, due_ms in dues.items():
        assert run.sent_ms[message_id] - due_ms < 150
    after_ms = [run.sent_ms[message_id] - begin_ms for message_id in waits]
    assert after_ms == sorted(after_ms)
    assert after_ms[-1] < 10_100
    by_second = Counter(each // 1000 for each in after_ms)
    assert all(27 <= by_second[second] <= 33 for second in range(10)), by_second


def test_a_spread_by_a_clock_that_is_far_ahead_delays_nothing_later(run: Simulation) -> None:
    (waits,) = paused(run, 1)
    pauses = run.description.pauses.resume(ALL, run.clock.now_ms() + 30_000, 10_000)
    run.description = replace(run.description, pauses=pauses)
    run_for(run, 1)
    assert waits in run.sent_ms
    due_ms = run.clock.now_ms() + 25_000
    later = put(run, due_in_ms=25_000)
    run_for(run, 26)
    assert run.sent_ms[later] - due_ms < 150


@pytest.mark.parametrize("partitions", [0, 1])
def test_a_spread_keeps_the_order_after_a_takeover(partitions: int, tmp_path: Path) -> None:
    run = Simulation(True, tmp_path, partitions)
    run.pause()
    waits = [put(run) for _ in range(30)]
    run_for(run, 1)
    run.resume(spread_ms=10_000)
    run.takeover(random.Random(1))
    run_for(run, 12)
    assert list(run.sent_ms) == waits
