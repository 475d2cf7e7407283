"""Random runs of a delay queue with cancellations: an outcome that was reported is true for ever.

The delay queue and the state of the journal are the real ones. Simulated are the journal, of which
a crash keeps a random part, the window topic, the targets and the outcomes topic."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from delaylevel.cluster.targets.pool import TargetKey
from delaylevel.dispatcher.cancellations import UNCLEAR_MS, CancelRequest
from delaylevel.dispatcher.delay_queue import DelayQueue
from delaylevel.dispatcher.journal import state as journal_state
from delaylevel.dispatcher.journal.records import DispositionKind, Record, encode, pack
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.dispatcher.record import (
    Cancellation,
    DueBatch,
    FetchedBatch,
    WindowMessage,
    identity,
)
from delaylevel.structures.segments.pending import PendingSegments
from delaylevel.testing import ManualClock
from support.seeds import seeds

T0 = 1_700_000_000_000
GRACE_MS = 2_000
TARGET = "persistent://public/default/orders"
KEY = TargetKey(TARGET)

# It finds the fault that nothing is known of the time before the journal kept account.
RARE = 267


class Stored(NamedTuple):
    """A record of the window topic."""

    position: int
    due_ms: int
    record: tuple[Any, ...]
    stored_ms: int

    @property
    def name(self) -> str:
        """The ID of the message, or that of the message to cancel."""
        return str(self.record[6] if len(self.record) > 5 else self.record[4])

    @property
    def is_cancellation(self) -> bool:
        return type(self.record) is Cancellation


class Flight:
    """A batch with an intent."""

    def __init__(self, batch: DueBatch, first: int) -> None:
        self.batch = batch
        self.first = first  # sequence ID, with deduplication
        self.confirmed = False  # the intent
        self.sent = 0
        self.aside: dict[int, str] = {}  # by index


class World:
    """The topics, and the one dispatcher process that runs at a time."""

    def __init__(self, seed: int, numbered: bool, directory: Path, *, copies: bool = True) -> None:
        self.rng = random.Random(seed)
        self.numbered = numbered
        self.directory = directory
        self.copies = copies
        self.clock = ManualClock(T0)
        self.window: list[Stored] = []
        self.names = 0  # number of messages, stored or not
        self.dues: dict[str, int] = {}
        self.journal: list[bytes] = []
        self.tail: list[bytes] = []
        self.last = 0  # sequence ID
        self.delivered: Counter[str] = Counter()
        self.aside: dict[str, set[str]] = {"held": set(), "dropped": set(), "dead": set()}
        self.reported: dict[str, set[str]] = {}
        self.answers: Counter[int] = Counter()
        self.acknowledged = 0
        self.started = False
        self.start()

    # -- the process

    def start(self) -> None:
        state = JournalState.read(self.journal, 10_000)
        unclear_until_ms = self.clock.now_ms() + UNCLEAR_MS if self.started else 0
        self.started = True
        self.segments = 0
        self.queue = DelayQueue(
            state, self.new_segments(), clock=self.clock, overflow=self.new_segments,
            grace_ms=GRACE_MS, unclear_until_ms=unclear_until_ms,
        )  # fmt: skip
        low_watermark = max(state.low_watermark, self.acknowledged)
        self.reader = bisect_left(self.window, low_watermark, key=lambda each: each.position)
        self.reader = self.rng.randint(0, self.reader)
        self.flights: list[Flight] = []
        self.waits = False
        self.outcomes: list[tuple[int, CancelRequest]] = []  # number of records to be confirmed
        self.unanswered: list[int] = []
        for intent in self.queue.unresolved_intents():
            if intent.target:
                for record in self.queue.resolve(intent.number, intent.stored(self.last)):
                    self.append(record)
            else:
                self.queue.reopen(intent.number)

    def new_segments(self) -> PendingSegments:
        self.segments += 1
        directory = self.directory / str(self.segments)
        return PendingSegments(directory, budget_bytes=1 << 20, clock=self.clock.now_ms)

    def append(self, record: Record) -> None:
        self.tail.append(encode(record))

    @property
    def written(self) -> int:
        return len(self.journal) + len(self.tail)

    def flush(self, count: int | None = None) -> None:
        count = len(self.tail) if count is None else count
        self.journal += self.tail[:count]
        del self.tail[:count]
        if not self.tail:
            for flight in self.flights:
                flight.confirmed = True

    # -- arrivals

    def name(self) -> str:
        if self.names and self.rng.random() < 0.4:
            return f"id-{self.rng.randrange(self.names)}"
        self.names += 1
        name = f"id-{self.names - 1}"
        delay_ms = self.rng.choice([-500, 5, 300, 2_000, 20_000]) + self.rng.randint(0, 20)
        self.dues[name] = self.clock.now_ms() + delay_ms
        return name

    def arrive(self) -> None:
        for _ in range(self.rng.randint(1, 5)):
            name, key_number = self.name(), None
            key_number = identity(name, TARGET, "")
            due_ms = self.dues[name]
            if self.rng.random() < 0.45:
                wrong = self.rng.choice([0, 0, 0, 0, -3_000, 3_000])
                message_id = "wrong" if self.rng.random() < 0.03 else name
                key_number = identity(message_id, TARGET, "")
                self.store(
                    due_ms + wrong,
                    Cancellation(*key_number, due_ms + wrong, TARGET, message_id, ""),
                )
                continue
            if not self.copies and any(
                each.name == name and not each.is_cancellation for each in self.window
            ):
                continue
            fields = (*key_number, due_ms, TARGET, "", 0, name, "", "", 0, {}, b"x")
            self.store(due_ms, tuple(WindowMessage(*fields)))

    def store(self, due_ms: int, record: tuple[Any, ...]) -> None:
        position = pack(3, len(self.window) << 10)
        self.window.append(Stored(position, due_ms, record, self.clock.now_ms()))

    def read(self) -> None:
        some = self.window[self.reader : self.reader + self.rng.randint(1, 12)]
        batch = FetchedBatch(
            [3] * len(some),
            [each.position & ((1 << 35) - 1) for each in some],
            [each.due_ms for each in some],
            [each.record for each in some],
            cancellations=sum(each.is_cancellation for each in some),
        )
        if len(batch) > 1 and self.rng.random() < 0.3:
            for part in batch.split(self.rng.randint(1, len(batch) - 1)):
                self.queue.offer(part)
        else:
            self.queue.offer(batch)
        self.reader += len(some)

    # -- releases

    def time_passes(self) -> None:
        self.clock.advance(timedelta(milliseconds=self.rng.choice([1, 10, 300, 3_000])))

    def advance(self) -> None:
        batch = self.queue.advance(self.clock.now_ms(), self.rng.choice([1, 3, 10]))
        if batch is not None:
            self.place(batch)

    def place(self, batch: DueBatch) -> None:
        """Let a batch without an intent get one, or let it wait somewhere."""
        way = self.rng.random()
        if way < 0.15:
            self.queue.put_back(batch)
        elif way < 0.45 and not self.queue.waiting.count(KEY):
            self.queue.defer(batch, KEY)
        elif way < 0.55 and len(batch) > 1:
            parts = [range(len(batch))[start::2] for start in (0, 1)]
            for part in self.queue.divide(batch, parts):
                self.launch(part)
        else:
            self.launch(batch)

    def launch(self, batch: DueBatch) -> None:
        first = self.queue.state.sequences.get("orders", 1)
        flight = Flight(batch, first)
        if self.numbered:
            self.append(self.queue.intent(batch, "orders", first))
        else:
            self.queue.launch(batch)
            flight.confirmed = True
        self.flights.append(flight)

    def publish_waiting(self) -> None:
        while self.queue.waiting.count(KEY):
            part = self.queue.advance_waiting(KEY, 5)
            if part is not None:
                self.launch(part)

    def send(self) -> None:
        for flight in list(self.flights):
            if not flight.confirmed:
                return
            while flight.sent < len(flight.batch):
                if self.rng.random() < 0.2:
                    return
                self.send_one(flight)

    def send_one(self, flight: Flight) -> None:
        index, flight.sent = flight.sent, flight.sent + 1
        name = flight.batch.messages[index].message_id
        if self.rng.random() < 0.08 and not self.numbered:
            kind = self.rng.choice(list(self.aside))
            flight.aside[index] = kind
            self.aside[kind].add(name)
            return
        number = flight.first + index
        if self.numbered:
            if number <= self.last:
                return
            self.last = number
        self.deliver(name)

    def deliver(self, name: str) -> None:
        assert "cancelled" not in self.reported.get(name, ()), f"{name} was reported cancelled"
        self.delivered[name] += 1

    def commit(self) -> None:
        for flight in [each for each in self.flights if each.sent == len(each.batch)]:
            number = flight.batch.number
            for kind, name in (
                (DispositionKind.HELD, "held"),
                (DispositionKind.DROPPED, "dropped"),
            ):
                index = [each for each, where in flight.aside.items() if where == name]
                if index:
                    self.append(self.queue.dispose(number, kind, index))
            dead = [each for each, where in flight.aside.items() if where == "dead"]
            self.append(self.queue.commit(number, flight.batch.positions[dead]))
            self.flights.remove(flight)

    # -- cancellations

    def decide(self) -> None:
        queue = self.queue.cancelling
        proof_ms, now_ms = queue.proof_ms, self.clock.now_ms()
        if proof_ms is not None and proof_ms <= now_ms and self.reader == len(self.window):
            queue.everything_is_read(now_ms)
        records, decisions = queue.decide()
        for record in records:
            self.append(record)
        if decisions and self.rng.random() < 0.1:
            queue.postpone(decisions, now_ms + 100)
            return
        self.outcomes += [(self.written, each) for each in decisions]

    def report(self) -> None:
        """Publish the outcomes whose records are confirmed."""
        while self.outcomes and self.outcomes[0][0] <= len(self.journal):
            _, decision = self.outcomes.pop(0)
            self.check_outcome(decision)
            assert decision.outcome is not None
            names = self.reported.setdefault(decision.cancellation.message_id, set())
            names.add(decision.outcome.status.value)
            if decision.position is not None:
                self.answers[decision.position] += 1
                self.unanswered.append(decision.position)

    def answer(self) -> None:
        if self.unanswered:
            positions, self.unanswered = sorted(set(self.unanswered)), []
            self.append(self.queue.cancelling.answered(np.array(positions, dtype=np.int64)))

    def check_outcome(self, decision: CancelRequest) -> None:
        name, outcome = decision.cancellation.message_id, decision.outcome
        assert outcome is not None
        if outcome.status == "cancelled":
            assert not self.delivered[name], f"{name} was delivered"
            assert name not in self.aside["held"] | self.aside["dropped"]
        elif outcome.status == "too late":
            assert self.delivered[name], f"{name} was not delivered"
            assert outcome.released_ms is None or outcome.released_ms <= self.clock.now_ms()
        elif "held" in outcome.reason:
            assert name in self.aside["held"]
        elif "dropped:" in outcome.reason:
            assert name in self.aside["dropped"]
        elif "no such" in outcome.reason:
            deadline_ms = decision.cancellation.due_ms + GRACE_MS
            assert self.clock.now_ms() >= deadline_ms
            times = [e.stored_ms for e in self.window if e.name == name and not e.is_cancellation]
            lost = name in self.aside["dead"] or not self.copies
            assert lost or not times or min(times) >= deadline_ms, f"{name} was there"

    # -- the rest

    def checkpoint(self) -> None:
        for record in self.queue.close_reopened():
            self.append(record)
        record = self.queue.checkpoint()
        if record is not None:
            self.append(record)
            if self.rng.random() < 0.5:
                self.flush()
                self.acknowledged = record.position

    def snapshot(self) -> None:
        self.flush()
        self.journal += self.queue.state.snapshot()

    def crash(self) -> None:
        """Keep some of the unconfirmed records; what is launched may be sent meanwhile."""
        kept = self.rng.randint(0, len(self.tail))
        for flight in self.flights:
            if not flight.confirmed:
                break
            for _ in range(self.rng.choice([0, 1, 5])):
                if flight.sent < len(flight.batch):
                    self.send_one(flight)
            if self.numbered and flight.sent < len(flight.batch):
                break
        self.flush(kept)
        self.tail = []
        self.queue.close()
        self.start()

    def step(self) -> None:
        steps: dict[Callable[[], None], int] = {
            self.arrive: 10, self.read: 14, self.time_passes: 8, self.advance: 10, self.send: 10,
            self.publish_waiting: 5, self.flush: 10, self.commit: 8, self.decide: 14,
            self.report: 10, self.answer: 4, self.checkpoint: 5, self.snapshot: 1, self.crash: 2,
        }  # fmt: skip
        self.rng.choices(list(steps), list(steps.values()))[0]()

    def finish(self) -> None:
        for _ in range(400):
            self.read()
            self.clock.advance(timedelta(milliseconds=500))
            self.decide()
            self.advance()
            self.publish_waiting()
            self.flush()
            self.send()
            self.commit()
            self.report()
            self.answer()
            self.checkpoint()
            low_watermark = self.queue.low_watermark()
            if self.window and low_watermark > self.window[-1].position and not self.flights:
                return
        raise AssertionError("it does not come to rest")

    def check_end(self) -> None:
        assert len(self.queue) == self.queue.in_flight == 0
        assert self.queue.cancelling.passed_over == 0
        aside = set().union(*self.aside.values())
        for each in self.window:
            if each.is_cancellation:
                assert self.answers[each.position], f"no outcome for {each.name}"
                continue
            name, copies = each.name, self.delivered[each.name]
            id_key, number = each.record[:2]
            cancelled = self.queue.state.cancelled.is_duplicate(number, id_key)
            if not self.copies:
                cancelled |= "cancelled" in self.reported.get(name, ())
            if name not in aside:
                assert bool(copies) != cancelled, f"{name}: {copies} copies, {cancelled=}"
            if self.numbered:
                assert copies <= 1, f"{name} was published {copies} times"


def run(seed: int, numbered: bool, directory: Path, *, copies: bool = True) -> World:
    world = World(seed, numbered, directory, copies=copies)
    for _ in range(350):
        world.step()
    world.finish()
    world.check_end()
    return world


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("seed", seeds(16))
def test_every_outcome_stays_true(seed: int, numbered: bool, tmp_path: Path) -> None:
    run(seed, numbered, tmp_path)


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("seed", seeds(8))
def test_no_cancelled_message_is_forgotten_while_it_is_pending(
    seed: int, numbered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = journal_state.CancelledIds.__init__

    def tiny(self: Any, capacity: int) -> None:
        create(self, 2)

    monkeypatch.setattr(journal_state.CancelledIds, "__init__", tiny)
    run(seed, numbered, tmp_path, copies=False)


def test_the_runs_reach_everything(tmp_path: Path) -> None:
    found: Counter[str] = Counter()
    for seed in range(6, 18):
        world = run(seed, False, tmp_path / str(seed))
        for name, outcomes in world.reported.items():
            found.update(outcomes)
            found["several outcomes"] += len(outcomes) > 1
            found["released twice"] += world.delivered[name] > 1
    every = {"cancelled", "too late", "unknown", "released twice", "several outcomes"}
    assert {each for each, count in found.items() if count} == every
