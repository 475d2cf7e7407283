"""Random runs of a delay queue: each message is released once, when it is due, or cancelled.

The delay queue and the state of the journal are the real ones. Simulated are the journal, of which
a crash keeps a random part, the window topic, the targets and the outcomes topic.
"""

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
from delaylevel.dispatcher.journal.records import (
    DispositionKind,
    Intent,
    Record,
    Released,
    SnapshotChunk,
    decode,
    encode,
    pack,
)
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
Identity = tuple[str, int]


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

    def __init__(self, batch: DueBatch, partition: int, first: int) -> None:
        self.batch = batch
        self.partition = partition
        self.first = first  # sequence ID, with deduplication
        self.confirmed = False  # the intent
        self.sent = 0
        self.aside: dict[int, str] = {}  # by index


def partition_of(name: str) -> int:
    """Return the partition of the target to which a message goes."""
    return len(name) % 2


class World:
    """The topics, and the one dispatcher process that runs at a time."""

    def __init__(self, seed: int, numbered: bool, directory: Path, *, copies: bool = True) -> None:
        self.rng = random.Random(seed)
        self.numbered = numbered
        self.directory = directory
        self.copies = copies
        self.size = self.rng.choice([1, 1, 1, 6_000])  # of a message, in bytes
        self.now_ms = T0
        self.window: list[Stored] = []
        self.names = 0  # number of messages, stored or not
        self.dues: dict[str, int] = {}
        self.journal: list[bytes] = []
        self.tail: list[bytes] = []
        self.last = [0, 0]  # sequence ID of each partition of the target
        self.delivered: Counter[str] = Counter()
        self.allowed: Counter[str] = Counter()  # copies of what was sent without a record
        self.aside: dict[str, set[str]] = {"held": set(), "dropped": set(), "dead": set()}
        self.reported: dict[str, set[str]] = {}
        self.answers: Counter[int] = Counter()
        self.acknowledged = 0
        self.started = False
        self.start()

    # -- the process

    def start(self) -> None:
        # The clock of the next process may be behind.
        self.clock = ManualClock(self.now_ms - self.rng.choice([0, 0, 40]))
        journal = self.journal[self.rng.randint(0, self.snapshot_start()) :]
        state = JournalState.read(journal, 10_000)
        unclear_until_ms = self.clock.now_ms() + UNCLEAR_MS if self.started else 0
        self.started = True
        self.segments = 0
        self.queue = DelayQueue(
            state, self.new_segments(), clock=self.clock, overflow=self.new_segments,
            grace_ms=GRACE_MS, unclear_until_ms=unclear_until_ms,
        )  # fmt: skip
        self.released = self.released_positions()
        self.reader = self.rng.randint(0, self.index_of(self.acknowledged))
        self.flights: list[Flight] = []
        self.chunks: list[bytes] = []
        self.outcomes: list[tuple[int, CancelRequest]] = []  # number of records to be confirmed
        self.unanswered: list[int] = []
        self.unresolved: list[Intent] = []
        for intent in self.queue.unresolved.intents:
            if intent.target:
                self.unresolved.append(intent)
            else:
                self.queue.reopen(intent.number)
        self.rng.shuffle(self.unresolved)

    def resolve(self) -> None:
        """Ask the target about one intent of the last process; before, nothing is published."""
        intent = self.unresolved.pop()
        last = self.last[int(intent.target)]
        stored = np.arange(intent.positions.size) <= last - intent.first
        for record in self.queue.resolve(intent.number, stored):
            self.append(record)
        self.released.update(intent.positions[stored].tolist())

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

    def index_of(self, position: int) -> int:
        return bisect_left(self.window, position, key=lambda each: each.position)

    def released_positions(self) -> set[int]:
        found = [each.position for each in self.window]
        self.rng.shuffle(found)
        positions = np.array(found, dtype=np.int64)
        return set(positions[self.queue.state.is_released(positions)].tolist())

    # -- arrivals

    def name(self) -> str:
        number = self.names
        if number and self.rng.random() < 0.4:
            number = self.rng.randrange(number)
        else:
            self.names += 1
        # Some have the ID that a position gives them.
        name = f"levels:7:{number}:0" if number % 3 == 0 else f"id-{number}"
        if name not in self.dues:
            delay_ms = self.rng.choice([-500, 5, 300, 2_000, 20_000]) + self.rng.randint(0, 20)
            self.dues[name] = self.now_ms + delay_ms
        return name

    def arrive(self) -> None:
        for _ in range(self.rng.randint(1, 5)):
            name = self.name()
            due_ms = self.dues[name]
            if self.rng.random() < 0.45:
                wrong = self.rng.choice([0, 0, 0, 0, -3_000, 3_000])
                message_id = "wrong" if self.rng.random() < 0.03 else name
                id_key, number = identity(message_id, TARGET, "")
                cancel = Cancellation(id_key, number, due_ms + wrong, TARGET, message_id, "")
                self.store(due_ms + wrong, cancel)
                continue
            if not self.copies and any(
                each.name == name and not each.is_cancellation for each in self.window
            ):
                continue
            body = self.rng.randbytes(self.size)
            head = *identity(name, TARGET, ""), due_ms, TARGET, "", 0, name, "", "", 0
            self.store(due_ms, tuple(WindowMessage(*head, {}, body)))

    def store(self, due_ms: int, record: tuple[Any, ...]) -> None:
        last = self.window[-1].position if self.window else pack(3, 0)
        way = self.rng.random()
        if way < 0.1:
            position = ((last >> 35) + 2) << 35  # in another ledger
        elif way < 0.4:
            position = last + 1  # in the same batch
        else:
            position = ((last >> 10) + 1) << 10
        self.window.append(Stored(position, due_ms, record, self.now_ms))

    def read(self) -> None:
        if self.rng.random() < 0.05:  # the consumer connects again
            self.reader = self.rng.randint(0, self.index_of(self.acknowledged))
        some = self.window[self.reader : self.reader + self.rng.randint(1, 12)]
        batch = FetchedBatch(
            [each.position >> 35 for each in some],
            [each.position & ((1 << 35) - 1) for each in some],
            [each.due_ms for each in some],
            [each.record for each in some],
            cancellations=sum(each.is_cancellation for each in some),
        )
        self.queue.offer(batch)
        self.reader += len(some)

    # -- releases

    def time_passes(self, ms: int = 0) -> None:
        ms = ms or self.rng.choice([1, 10, 300, 3_000])
        self.now_ms += ms
        self.clock.advance(timedelta(milliseconds=ms))

    def advance(self) -> None:
        now_ms = self.clock.now_ms()
        before = self.queue.cancelling.passed_over
        batch = self.queue.advance(now_ms, self.rng.choice([1, 3, 10]))
        if batch is None:
            next_ms = self.queue.pending.next_due_ms
            # After many cancelled messages, the next ones are left to the next call.
            dropped = before - self.queue.cancelling.passed_over
            assert next_ms is None or next_ms > now_ms or dropped >= 20, "a message is late"
        else:
            self.check_batch(batch)
            self.place(batch)

    def place(self, batch: DueBatch) -> None:
        """Let a batch without an intent get one, or let it wait somewhere."""
        way = self.rng.random()
        if way < 0.15:
            self.queue.put_back(batch)
        elif way < 0.45 and not self.queue.waiting.count(KEY):
            self.queue.waiting.put(KEY, batch)
        else:
            self.launch(batch)

    def launch(self, batch: DueBatch) -> None:
        """Launch a part of a batch for each partition of the target."""
        partitions = [partition_of(each.message_id) for each in batch.messages]
        used = sorted(set(partitions))
        parts = [[i for i, each in enumerate(partitions) if each == one] for one in used]
        for partition, part in zip(used, batch.divide(parts), strict=True):
            target = str(partition)
            flight = Flight(part, partition, self.queue.state.next_sequence(target))
            if self.numbered:
                self.append(self.queue.intent(part, target, flight.first))
            else:
                self.queue.launch(part)
                flight.confirmed = True
            self.flights.append(flight)

    def publish_waiting(self) -> None:
        while self.queue.waiting.count(KEY):
            part = self.queue.advance_waiting(KEY, 5)
            if part is not None:
                self.launch(part)

    def send(self) -> None:
        for partition in (0, 1):
            for flight in [each for each in self.flights if each.partition == partition]:
                if not flight.confirmed:
                    break
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
        if self.numbered:
            number = flight.first + index
            # A target drops a message whose sequence ID was used before.
            assert number > self.last[flight.partition], f"{name} would be lost"
            self.last[flight.partition] = number
        assert self.dues[name] <= self.now_ms, f"{name} is early"
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
            self.released.update(flight.batch.positions.tolist())
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

    # -- the rest

    def checkpoint(self) -> None:
        for closed in self.queue.unresolved.close_reopened():
            self.append(closed)
        position = self.queue.low_watermark()
        self.check_low_watermark(position)
        record = self.queue.checkpoint()
        if record is not None:
            assert record.position == position
            self.append(record)
            if self.rng.random() < 0.5:
                self.flush()
                self.acknowledged = position
        assert self.queue.checkpoint() is None

    def snapshot(self) -> None:
        self.write_chunks(len(self.chunks))
        self.chunks = self.queue.state.snapshot()
        self.write_chunks(1)

    def write_chunks(self, count: int) -> None:
        self.tail += self.chunks[:count]
        del self.chunks[:count]

    def crash(self) -> None:
        """Keep some of the unconfirmed records; what is launched may be sent meanwhile."""
        kept = self.rng.randint(0, len(self.tail))
        for partition in (0, 1):
            for flight in [each for each in self.flights if each.partition == partition]:
                if not flight.confirmed:
                    break
                for _ in range(self.rng.choice([0, 1, 5])):
                    if flight.sent < len(flight.batch):
                        self.send_one(flight)
                if self.numbered and flight.sent < len(flight.batch):
                    break
        if not self.numbered:  # what was sent and has no record may come again
            lost = [each for each in map(decode, self.tail[kept:]) if isinstance(each, Released)]
            batches = [flight.batch.positions for flight in self.flights]
            batches += [each.positions for each in lost]
            for position in [each for batch in batches for each in batch.tolist()]:
                self.allowed[self.window[self.index_of(position)].name] += 1
        self.flush(kept)
        self.tail = []
        self.queue.close()
        self.start()

    @property
    def waits_for_intents(self) -> set[Callable[[], None]]:
        return {self.advance, self.publish_waiting, self.decide}

    def step(self) -> None:
        if self.unresolved and self.rng.random() < 0.1:
            self.resolve()
            return
        steps: dict[Callable[[], None], int] = {
            self.arrive: 10, self.read: 14, self.time_passes: 8, self.advance: 10, self.send: 10,
            self.publish_waiting: 5, self.flush: 10, self.commit: 8, self.decide: 14,
            self.report: 10, self.answer: 4, self.checkpoint: 5, self.snapshot: 1, self.crash: 2,
        }  # fmt: skip
        if self.unresolved:  # before, nothing is published, and nothing decided
            steps = {each: steps[each] for each in steps if each not in self.waits_for_intents}
        self.rng.choices(list(steps), list(steps.values()))[0]()
        self.write_chunks(self.rng.choice([0, 0, 1, 3]))

    def finish(self) -> None:
        while self.unresolved:
            self.resolve()
        for _ in range(400):
            self.read()
            self.time_passes(500)
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

    # -- checks

    def snapshot_start(self) -> int:
        """Return the index of the first chunk of the last complete snapshot; 0 without one."""
        begin = found = serial = -1
        count = 0
        for index, data in enumerate(self.journal):
            record = decode(data)
            if isinstance(record, SnapshotChunk):
                if record.part == 0:
                    begin, serial, count = index, record.serial, 0
                count += record.serial == serial
                if count == record.parts:
                    found = begin
        return max(found, 0)

    def check_batch(self, batch: DueBatch) -> None:
        order = list(zip(batch.due_ms.tolist(), batch.positions.tolist(), strict=True))
        assert order == sorted(set(order))
        assert order[-1][0] <= self.clock.now_ms()
        rows = [self.window[self.index_of(position)] for _, position in order]
        assert [tuple(each) for each in batch.messages] == [each.record for each in rows]
        assert [each.due_ms for each in rows] == batch.due_ms.tolist()
        assert not self.released & {each.position for each in rows}

    def check_low_watermark(self, low_watermark: int) -> None:
        aside = set().union(*self.aside.values())
        for each in self.window[: self.index_of(low_watermark)]:
            if each.is_cancellation:
                assert self.answers[each.position], f"no outcome for {each.name}"
            elif not self.delivered[each.name] and each.name not in aside:
                assert self.queue.state.cancelled.is_duplicate(
                    each.record[1], each.record[0]
                ) or "cancelled" in self.reported.get(each.name, ()), f"{each.name} is lost"
        launched = [flight.batch.positions for flight in self.flights]
        for positions in (*launched, *(intent.positions for intent in self.unresolved)):
            assert int(positions.min()) >= low_watermark

    def check_outcome(self, decision: CancelRequest) -> None:
        name, outcome = decision.cancellation.message_id, decision.outcome
        assert outcome is not None
        if outcome.status == "cancelled":
            assert not self.delivered[name], f"{name} was delivered"
            assert name not in self.aside["held"] | self.aside["dropped"]
        elif outcome.status == "too late":
            assert self.delivered[name], f"{name} was not delivered"
            assert outcome.released_ms is None or outcome.released_ms <= self.now_ms
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

    def check_end(self) -> None:
        assert len(self.queue) == self.queue.in_flight == 0
        assert self.queue.cancelling.passed_over == 0
        assert self.queue.low_watermark() == self.window[-1].position + 1
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
                assert copies <= 1 + self.allowed[name], f"{name} was published {copies} times"


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_state, "_CHUNK_BYTES", 300)


def run(seed: int, numbered: bool, directory: Path, *, copies: bool = True) -> World:
    world = World(seed, numbered, directory, copies=copies)
    for _ in range(350):
        world.step()
    world.finish()
    world.check_end()
    return world


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("seed", seeds(20))
def test_no_message_is_lost_early_or_released_twice_and_every_outcome_stays_true(
    seed: int, numbered: bool, tmp_path: Path
) -> None:
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
