"""Tests of pauses and expiry in a dispatcher's publishing, against the simulated broker."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from delaylevel.model import envelope as env
from delaylevel.model.level_topic import Expired
from support.simulation import TARGETS, Simulation, is_target

ORDERS, INVOICES = TARGETS


def put(run: Simulation, target: str, due_in_ms: int = 10, expires_after_ms: int = 0) -> str:
    """Put a message into the window topic, and return its ID."""
    (found,) = run.send(1, target, False, "", (due_in_ms,), (expires_after_ms,))
    return found


def run_for(run: Simulation, seconds: float) -> None:
    end_s = run.clock.seconds + seconds
    while run.clock.seconds < end_s:
        run.round()


def delivered(run: Simulation) -> Counter[str]:
    topics = (each for each in run.broker.every_topic if is_target(each.name))
    return Counter(each for topic in topics for each in topic.delivered)


@pytest.mark.parametrize("numbered", [False, True])
def test_messages_of_a_paused_target_wait_and_others_do_not(numbered: bool, tmp_path: Path) -> None:
    run = Simulation(numbered, tmp_path)
    before = put(run, ORDERS)
    run_for(run, 1)
    run.pause(ORDERS)
    waits = [put(run, ORDERS) for _ in range(5)]
    passes = put(run, INVOICES)
    run_for(run, 3)
    assert set(run.sent_ms) == {before, passes}
    assert not run.publisher.has_waiting
    assert run.publisher.next_spread_ms is None
    assert run.queue.waiting.first_due_ms is None
    assert len(run.queue) == 5
    run.takeover(random.Random(1))
    run_for(run, 3)
    assert set(run.sent_ms) == {before, passes}
    run.resume()
    run_for(run, 1)
    assert delivered(run) == Counter({before: 1, passes: 1, **dict.fromkeys(waits, 1)})
    assert run.broker.topics[ORDERS].delivered == [before, *waits]


@pytest.mark.parametrize("numbered", [False, True])
def test_a_spread_is_even_and_later_messages_are_on_time(numbered: bool, tmp_path: Path) -> None:
    run = Simulation(numbered, tmp_path)
    put(run, ORDERS)
    run_for(run, 1)
    run.pause()
    waits = [put(run, ORDERS) for _ in range(300)]
    run_for(run, 1)
    begin_ms = run.clock.now_ms()
    run.resume(spread_ms=10_000)
    dues = {put(run, ORDERS, due_in_ms=at_ms): begin_ms + at_ms for at_ms in range(500, 9_500, 500)}
    run_for(run, 12)
    for message_id, due_ms in dues.items():
        assert run.sent_ms[message_id] - due_ms < 150
    after_ms = [run.sent_ms[message_id] - begin_ms for message_id in waits]
    assert after_ms == sorted(after_ms)
    assert after_ms[-1] < 10_100
    by_second = Counter(each // 1000 for each in after_ms)
    assert all(27 <= by_second[second] <= 33 for second in range(10))


@pytest.mark.parametrize("partitions", [0, 1])
def test_a_spread_keeps_the_order_after_a_takeover(partitions: int, tmp_path: Path) -> None:
    run = Simulation(True, tmp_path, partitions)
    run.pause()
    waits = [put(run, ORDERS) for _ in range(30)]
    run_for(run, 1)
    run.resume(spread_ms=10_000)
    run.takeover(random.Random(1))
    run_for(run, 12)
    assert list(run.sent_ms) == waits


def test_a_spread_of_a_few_messages_has_one_release_for_each(tmp_path: Path) -> None:
    run = Simulation(False, tmp_path)
    put(run, ORDERS)
    run_for(run, 1)
    run.pause()
    waits = [put(run, ORDERS) for _ in range(4)]
    run_for(run, 1)
    begin_ms = run.clock.now_ms()
    run.resume(spread_ms=8_000)
    times: list[int] = []
    while len(run.sent_ms) < 5:
        run.cycle()
        next_ms = run.publisher.next_spread_ms
        run.round(0 if next_ms is None else max(next_ms - run.clock.now_ms(), 0) / 1000)
        times.append(run.clock.now_ms())
        assert len(times) < 30
    assert [round((run.sent_ms[each] - begin_ms) / 1000) for each in waits] == [2, 4, 6, 8]


@pytest.mark.parametrize("policy", Expired)
@pytest.mark.parametrize("numbered", [False, True])
def test_messages_expire_while_their_target_is_paused_or_refuses(
    numbered: bool, policy: Expired, tmp_path: Path
) -> None:
    run = Simulation(numbered, tmp_path)
    run.description = replace(run.description, expired=policy, expire_after_ms=5_000)
    run.pause(ORDERS)
    run.broker.topics[INVOICES].refuses = True
    lost = [
        *(put(run, ORDERS, 10, 1_000), put(run, ORDERS, 20)),
        *(put(run, INVOICES, 10, 1_000), put(run, INVOICES, 20)),
    ]
    kept = [put(run, ORDERS, 30, 60_000), put(run, INVOICES, 30, 60_000)]
    for _ in range(8):
        run_for(run, 1)
        run.bring_back()  # from the held topic
    assert not set(run.sent_ms) & {kept[0], *lost[:2]}
    assert set(run.expired) == set(lost[2:])
    run.resume()
    run.broker.topics[INVOICES].refuses = False
    run.settle()
    run.check()
    assert run.expired == Counter(lost)
    assert delivered(run) == Counter(kept)
    assert run.stats.now().expired == 4
    assert run.stats.now().dead == 0
    if policy is Expired.DEAD_LETTER:
        letters = run.broker.topics[run.description.dead_letter_topic.partition(0).full]
        reasons = {p[env.ID]: p[env.REASON] for _, p in letters.messages}
        assert set(reasons) == set(lost)
        assert all(reason.startswith("expired at 20") for reason in reasons.values())
        assert len(set(reasons.values())) > 1
