"""Tests of pauses and expiry in a dispatcher's publishing, also in random runs with crashes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from delaylevel.dispatcher.journal.records import Intent, unpack
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.dispatcher.publishing.publisher import TargetState
from delaylevel.model import envelope as env
from delaylevel.model.level_topic import ALL, Expired
from support.seeds import SEARCH, seeds
from support.simulation import TARGETS, Simulation, is_target

ORDERS, INVOICES = TARGETS


class PausingSimulation(Simulation):
    """A simulation in which targets are paused, and messages expire.

    Attributes:
        sent_ms: time at which each message was sent to its target for the first time, by ID.
        expired: number of times that a message was set aside because of its expiry, by ID.
        crashed: True once a process has ended.
    """

    def __init__(self, numbered: bool, directory: Path, partitions: int = 0) -> None:
        self.sent_ms: dict[str, int] = {}
        self.expired: Counter[str] = Counter()
        self.expires: dict[str, int] = {}
        self.crashed = False
        self._in_intents: set[str] = set()  # when the last pause began
        self._may_be_sent: set[str] = set()  # by an earlier process, with sequence IDs
        super().__init__(numbered, directory, partitions)
        self.broker.on_send = self._on_send

    def start(self) -> None:
        if self.numbered:
            state = JournalState.read(self.journal_topic.confirmed, 1000)
            for intent in state.open_intents.values():
                if intent.first:
                    self._may_be_sent.update(self._names(intent))
        super().start()
        send = self.set_aside.send
        sender: Any = self.publisher.flights
        launch = sender.launch

        def set_aside(owner: Any, messages: Any, refused: Any) -> Any:
            count, counted = send(owner, messages, refused)
            for index, (counter, _) in zip(sorted(refused), counted, strict=True):
                if counter == "expired":
                    message = messages[index]
                    assert self.expires_ms(message) <= self.clock.now_ms()
                    self.expired[message.message_id] += 1
            return count, counted

        def checked(write: Any) -> Any:
            def write_checked(flights: Any) -> None:
                for flight in flights:
                    if flight.key is not None:
                        pauses = self.description.pauses
                        assert pauses.paused_since_ms(flight.key.topic) is None
                        check_expiry(flight.batch.messages)
                write(flights)

            return write_checked

        def check_expiry(messages: Any) -> None:
            for message in messages:
                if message.message_id not in self._may_be_sent:
                    assert self.expires_ms(message) > self.clock.now_ms()

        opened, watched = self.pool.producer, set[Any]()

        def producer(key: Any) -> Any:
            found: Any = opened(key)
            if found not in watched:
                watched.add(found)
                send_all = found.send_all

                def send_checked(items: Any, messages: Any, first_number: int) -> None:
                    check_expiry(messages)
                    send_all(items, messages, first_number)

                found.send_all = send_checked
            return found

        self.pool.producer = producer  # type: ignore[method-assign]
        self.set_aside.send = set_aside  # type: ignore[method-assign]
        sender.launch = checked(launch)

    def expires_ms(self, message: Any) -> float:
        default_ms = self.description.expire_after_ms
        by_default = message.due_ms + default_ms if default_ms else float("inf")
        return message.expires_ms or by_default

    def _on_send(self, target: str, message_id: str) -> None:
        self.sent_ms.setdefault(message_id, self.clock.now_ms())
        if self.description.pauses.paused_since_ms(target) is not None:
            assert message_id in self._in_intents, f"{message_id} is released during a pause"

    def put(self, target: str, due_in_ms: int = 10, expires_after_ms: int = 0) -> str:
        """Put a message into the window topic."""
        message_id = f"id-{len(self.sent)}"
        self.sent[message_id] = message_id.encode()
        expires_ms = self.clock.now_ms() + due_in_ms + expires_after_ms if expires_after_ms else 0
        self.add(message_id, target, 0, b"-", "", due_in_ms, expires_ms)
        return message_id

    def pause(self, target: str = ALL) -> None:
        pauses = self.description.pauses.pause(target, self.clock.now_ms())
        self.description = replace(self.description, pauses=pauses)
        for intent in self.queue.state.open_intents.values():
            self._in_intents.update(self._names(intent))

    def _names(self, intent: Intent) -> list[str]:
        entries = unpack(intent.positions)[1].tolist()
        return [self.window[entry >> 10].message_id for entry in entries]

    def resume(self, target: str = ALL, spread_ms: int = 0) -> None:
        pauses = self.description.pauses.resume(target, self.clock.now_ms(), spread_ms)
        self.description = replace(self.description, pauses=pauses)

    def round(self, seconds: float = 0.05) -> None:
        """Let everything happen that can happen without faults."""
        self.work()
        for producer in list(self.broker.producers):
            producer.store(len(producer.wire))
            producer.confirm(len(producer.answers))
        self.own_topics_answer()
        self.cycle()
        self.wait(seconds)

    def run_for(self, seconds: float) -> None:
        end_s = self.clock.seconds + seconds
        while self.clock.seconds < end_s:
            self.round()

    def takeover(self, rng: random.Random, *, worst: bool = False) -> None:
        self.crashed = True
        super().takeover(rng, worst=worst)

    def delivered(self) -> Counter[str]:
        topics = (each for each in self.broker.every_topic if is_target(each.name))
        return Counter(each for topic in topics for each in topic.delivered)

    def dead(self) -> list[str]:
        letters = self.broker.topics.get(self.description.dead_letter_topic.partition(0).full)
        return [] if letters is None else [properties[env.ID] for _, properties in letters.messages]

    def check(self) -> None:
        """Check that each message is released, expired or cancelled, and only one of these."""
        delivered, outcomes = self.delivered(), self.outcomes()
        for message_id in self.sent:
            released, expired = delivered[message_id], self.expired[message_id]
            if "cancelled" in outcomes.get(message_id, ()):
                assert not released, f"{message_id} was published and cancelled"
                assert not expired or self.crashed
                continue
            assert released or expired, f"{message_id} is lost"
            if self.numbered:
                assert released <= 1
                assert not (released and expired)
            if not self.crashed:
                assert released + expired == 1
        if self.description.expired is Expired.DEAD_LETTER:
            assert set(self.dead()) == set(+self.expired)
        assert not self.queue.waiting.targets
        if self.window:
            low_watermark = np.array(self.queue.low_watermark())
            assert unpack(low_watermark)[1] >> 10 >= len(self.window) - 1


@pytest.mark.parametrize("numbered", [False, True])
def test_messages_of_a_paused_target_wait_and_others_do_not(numbered: bool, tmp_path: Path) -> None:
    run = PausingSimulation(numbered, tmp_path)
    before = run.put(ORDERS)
    run.run_for(1)
    run.pause(ORDERS)
    waits = [run.put(ORDERS) for _ in range(5)]
    passes = run.put(INVOICES)
    run.run_for(3)
    assert set(run.sent_ms) == {before, passes}
    assert not run.publisher.has_waiting
    assert run.publisher.next_spread_ms is None
    assert run.queue.waiting.first_due_ms is None
    assert len(run.queue) == 5
    run.takeover(random.Random(1))
    run.run_for(3)
    assert set(run.sent_ms) == {before, passes}
    run.resume()
    run.run_for(1)
    assert run.delivered() == Counter({before: 1, passes: 1, **dict.fromkeys(waits, 1)})
    assert run.broker.topics[ORDERS].delivered == [before, *waits]


@pytest.mark.parametrize("numbered", [False, True])
def test_a_spread_is_even_and_later_messages_are_on_time(numbered: bool, tmp_path: Path) -> None:
    run = PausingSimulation(numbered, tmp_path)
    run.put(ORDERS)
    run.run_for(1)
    run.pause()
    waits = [run.put(ORDERS) for _ in range(300)]
    run.run_for(1)
    begin_ms = run.clock.now_ms()
    run.resume(spread_ms=10_000)
    dues = {run.put(ORDERS, due_in_ms=at_ms): begin_ms + at_ms for at_ms in range(500, 9_500, 500)}
    run.run_for(12)
    for message_id, due_ms in dues.items():
        assert run.sent_ms[message_id] - due_ms < 150
    after_ms = [run.sent_ms[message_id] - begin_ms for message_id in waits]
    assert after_ms == sorted(after_ms)
    assert after_ms[-1] < 10_100
    by_second = Counter(each // 1000 for each in after_ms)
    assert all(27 <= by_second[second] <= 33 for second in range(10))


@pytest.mark.parametrize("partitions", [0, 1])
def test_a_spread_keeps_the_order_after_a_takeover(partitions: int, tmp_path: Path) -> None:
    run = PausingSimulation(True, tmp_path, partitions)
    run.pause()
    waits = [run.put(ORDERS) for _ in range(30)]
    run.run_for(1)
    run.resume(spread_ms=10_000)
    run.takeover(random.Random(1))
    run.run_for(12)
    assert list(run.sent_ms) == waits


def test_a_spread_of_a_few_messages_has_one_release_for_each(tmp_path: Path) -> None:
    run = PausingSimulation(False, tmp_path)
    run.put(ORDERS)
    run.run_for(1)
    run.pause()
    waits = [run.put(ORDERS) for _ in range(4)]
    run.run_for(1)
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
    run = PausingSimulation(numbered, tmp_path)
    run.description = replace(run.description, expired=policy, expire_after_ms=5_000)
    run.pause(ORDERS)
    run.broker.topics[INVOICES].refuses = True
    lost = [
        *(run.put(ORDERS, 10, 1_000), run.put(ORDERS, 20)),
        *(run.put(INVOICES, 10, 1_000), run.put(INVOICES, 20)),
    ]
    kept = [run.put(ORDERS, 30, 60_000), run.put(INVOICES, 30, 60_000)]
    for _ in range(8):
        run.run_for(1)
        run.bring_back()  # from the held topic
    assert not set(run.sent_ms) & {kept[0], *lost[:2]}
    assert set(run.expired) == set(lost[2:])
    run.resume()
    run.broker.topics[INVOICES].refuses = False
    run.settle()
    run.check()
    assert run.expired == Counter(lost)
    assert run.delivered() == Counter(kept)
    assert run.stats.now().expired == 4
    assert run.stats.now().dead == 0
    if policy is Expired.DEAD_LETTER:
        letters = run.broker.topics[run.description.dead_letter_topic.partition(0).full]
        reasons = {p[env.ID]: p[env.REASON] for _, p in letters.messages}
        assert set(reasons) == set(lost)
        assert all(reason.startswith("expired at 20") for reason in reasons.values())
        assert len(set(reasons.values())) > 1


ACTIONS = (
    "send", "send", "send", "expiring", "expiring", "ahead", "run", "run", "run", "turn", "turn",
    "pause", "pause all", "resume", "resume", "spread", "spread", "refuse", "accept", "takeover",
    "hand over", "suspend", "held", "store", "confirm", "wait", "cancel",
)  # fmt: skip


def step(run: PausingSimulation, action: str, rng: random.Random, crashes: bool) -> None:
    target, amount = rng.choice(TARGETS), rng.randint(0, 7)
    if action == "send":
        for _ in range(amount):
            run.put(target, rng.choice((10, 10, 40, 250)))
    elif action == "expiring":
        for _ in range(amount):
            run.put(target, rng.choice((10, 250)), rng.choice((30, 200, 1_000, 60_000)))
    elif action == "ahead":
        for _ in range(amount):
            run.put(target, rng.choice((60, 120, 250)))
        for _ in range(3):
            run.work()
            run.wait(0.02)
            run.cycle()
    elif action == "run":
        run.round(rng.choice((0.01, 0.1, 0.5)))
    elif action == "turn":
        run.wait(0.01 * amount)
        run.work()
        run.cycle()
    elif action == "pause":
        run.pause(target)
    elif action == "pause all":
        run.pause()
    elif action == "resume":
        run.resume(rng.choice((ALL, target)))
    elif action == "spread":
        run.resume(rng.choice((ALL, target)), rng.choice((100, 1_000, 3_000)))
    elif action == "refuse":
        run.broker.topics[target].refuses = True
    elif action == "accept":
        run.broker.topics[target].refuses = False
    elif action == "held":
        run.bring_back()
    elif action == "wait":
        run.wait(amount / 4)
    elif action == "cancel":
        for number in range(len(run.sent) - amount, len(run.sent)):
            run.cancel(number, target)
    elif action in ("store", "confirm"):
        for producer in list(run.broker.producers):
            getattr(producer, action)(amount)
    elif crashes and action == "takeover":
        run.takeover(rng)
    elif crashes and action == "hand over":
        run.hand_over(amount // 2, rng)
    elif crashes and action == "suspend":
        run.crashed = True
        run.suspend(1.5 + amount, rng)


def random_run(
    seed: int, numbered: bool, crashes: bool, directory: Path, partitions: int = 0
) -> PausingSimulation:
    rng = random.Random(seed)
    run = PausingSimulation(numbered, directory / str(seed), partitions)
    run.description = replace(
        run.description,
        expired=rng.choice(list(Expired)),
        expire_after_ms=rng.choice((0, 0, 800)),
    )
    for _ in range(rng.randint(8, 60)):
        step(run, rng.choice(ACTIONS), rng, crashes)
    run.resume(spread_ms=rng.choice((0, 2_000)))
    run.settle()
    run.check()
    return run


def random_runs(count: int, *options: Any) -> Sequence[PausingSimulation]:
    # From a seed on after which cancellations have all kinds of outcomes in few runs.
    return [random_run(40 + seed, *options) for seed in seeds(count)]


@pytest.mark.parametrize("partitions", [0, 2])
@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("numbered", [False, True])
def test_each_message_is_released_or_expires(
    numbered: bool, crashes: bool, partitions: int, tmp_path: Path
) -> None:
    runs = random_runs(20, numbered, crashes, tmp_path, partitions)
    assert sum(map(len, (run.expired for run in runs))) > 25 * SEARCH
    assert sum(len(run.sent) for run in runs) > 375 * SEARCH
    outcomes = Counter(each for run in runs for found in run.outcomes().values() for each in found)
    assert min(outcomes["cancelled"], outcomes["too late"], outcomes["unknown"]) > 2 * SEARCH


def test_each_message_is_released_or_expires_with_little_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delaylevel.dispatcher.publishing.flights.IN_FLIGHT_MESSAGES", 4)
    monkeypatch.setattr("delaylevel.dispatcher.publishing.publisher._BATCH", 3)
    monkeypatch.setattr(TargetState.OPENING, "stops_from", 3)
    monkeypatch.setattr("delaylevel.dispatcher.pending._IN_MEMORY", 4)
    random_runs(10, False, True, tmp_path / "unnumbered")
    random_runs(10, True, True, tmp_path / "numbered")
