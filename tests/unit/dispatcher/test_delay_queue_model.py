"""Tests of a dispatcher that crashes at any step, with a simulated journal, source and targets."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import pytest

from delaylevel.dispatcher.delay_queue import DelayQueue
from delaylevel.dispatcher.journal import state as journal_state
from delaylevel.dispatcher.journal.records import (
    UNCERTAIN,
    Commit,
    Intent,
    LowWatermark,
    Record,
    Released,
    Resolved,
    SnapshotChunk,
    decode,
    encode,
)
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.dispatcher.record import DueBatch, FetchedBatch
from delaylevel.structures.segments.pending import PendingSegments
from delaylevel.testing import ManualClock
from support.seeds import seeds

T0 = 1_700_000_000_000
CAPACITY = 10_000
TARGETS = ("orders-0", "orders-1")
Identity = tuple[str, int]


class Row(NamedTuple):
    """A message of the source topic."""

    ledger: int
    entry_id: int
    due: int
    key: str
    id: int
    payload: bytes

    @property
    def position(self) -> int:
        return self.ledger << 35 | self.entry_id

    @property
    def identity(self) -> Identity:
        """The identity that copies share; the position if the message has no key."""
        return (self.key, self.id) if self.key else ("", self.position)

    @property
    def target(self) -> int:
        return self.id % 2


class Model:
    """A plain Python model of the state after a whole journal."""

    def __init__(self, journal: list[bytes]) -> None:
        self.low_watermark = 0
        self.released: set[int] = set()
        self.ids: set[Identity] = set()
        self.intents: dict[int, Intent] = {}
        self.sequences: dict[str, int] = {}
        self.next_number = 0
        for data in journal:
            self.apply(decode(data))

    def apply(self, record: Record) -> None:
        if isinstance(record, LowWatermark):
            self.low_watermark = record.position
        elif isinstance(record, Intent):
            self.intents[record.number] = record
            self.next_number = max(self.next_number, record.number + 1)
            if record.target:
                self.sequences[record.target] = record.first + len(record.positions)
        elif isinstance(record, Released | Commit | Resolved):
            one = record if isinstance(record, Released) else self.intents.pop(record.number)
            for position, identity in zip(
                one.positions.tolist(), one.ids.identities(), strict=True
            ):
                if not isinstance(record, Resolved) or position in record.released:
                    self.released.add(position)
                    if not isinstance(record, Resolved) and position in record.held:
                        continue
                    self.ids.add(identity)


class Simulation:
    """Journal, source and targets, and the one dispatcher process that runs at a time."""

    def __init__(self, seed: int, deduplicating: bool, directory: Path) -> None:
        self.rng = random.Random(seed)
        self.deduplicating = deduplicating
        self.directory = directory
        self.now = T0
        self.size = self.rng.choice([10, 10, 10, 6000])
        self.source: list[Row] = []
        self.journal: list[bytes] = []  # confirmed
        self.tail: list[bytes] = []  # appended, not confirmed
        self.acknowledged = 0
        self.stored: Counter[Identity] = Counter()
        self.held: list[Row] = []
        self.ever_held: set[Identity] = set()
        self.last = dict.fromkeys(TARGETS, 0)
        self.allowed: Counter[Identity] = Counter()  # copies from intents without a commit
        self.crashes = 0
        self.seen: Counter[str] = Counter()
        self.start()

    # --- the process

    def start(self) -> None:
        journal = self.journal[self.rng.randint(0, self.snapshot_start()) :]
        self.clock = ManualClock(self.now - self.rng.choice([0, 0, 40]))
        segments = PendingSegments(self.directory, budget_bytes=1 << 20, clock=self.clock.now_ms)
        state = JournalState.read(journal, CAPACITY)
        self.delay_queue = DelayQueue(state, segments, clock=self.clock)
        self.check_state(Model(self.journal))
        self.known = self.released_positions()
        self.reader = self.index_of(self.rng.randint(0, self.acknowledged))
        unresolved = self.delay_queue.unresolved_intents()
        for intent in unresolved:
            if intent.first == UNCERTAIN:
                self.delay_queue.reopen(intent.number)
        self.to_resolve = [each.number for each in unresolved if each.first != UNCERTAIN]
        self.rng.shuffle(self.to_resolve)
        self.flights: dict[int, DueBatch] = {}
        self.queues: list[list[tuple[int, int, Row]]] = [[], [], []]  # number, sequence id, message
        self.waiting: Counter[int] = Counter()  # number -> messages without an outcome
        self.aside: dict[int, list[int]] = {}
        self.unconfirmed: set[int] = set()  # intents in the tail
        self.chunks: list[bytes] = []

    def released_positions(self) -> set[int]:
        positions = np.array([row.position for row in self.source], dtype=np.int64)
        self.rng.shuffle(positions)
        return set(positions[self.delay_queue.state.is_released(positions)].tolist())

    def index_of(self, position: int) -> int:
        return bisect_left(self.source, position, key=lambda row: row.position)

    def append(self, record: Record) -> None:
        self.tail.append(encode(record))

    def flush(self) -> None:
        self.journal += self.tail
        self.tail = []
        self.unconfirmed.clear()

    def resolve_one(self) -> None:
        number = self.to_resolve.pop()
        intent = self.delay_queue.state.open_intents[number]
        mask = intent.stored(self.last.get(intent.target, 0))
        for record in self.delay_queue.resolve(number, mask):
            self.append(record)
        self.known.update(intent.positions[mask].tolist())

    def row_at(self, position: int) -> Row:
        return self.source[self.index_of(position)]

    # --- steps

    def arrive(self) -> None:
        for _ in range(self.rng.randint(1, 8)):
            last = self.source[-1] if self.source else Row(3, 0, 0, "", 0, b"")
            ledger, entry_id = last.ledger, last.entry_id
            step = self.rng.random()
            if step < 0.1:
                ledger, entry_id = ledger + 2, 0
            elif step < 0.4:
                entry_id += 1  # the same batch
            else:
                entry_id = (entry_id >> 10) + 1 << 10
            if self.source and self.rng.random() < 0.25:
                like = self.rng.choice(self.source)
                if "#" in like.key:
                    continue
                row = like._replace(ledger=ledger, entry_id=entry_id)
            elif self.held and self.rng.random() < 0.7:
                like = self.held.pop(0)
                row = like._replace(
                    ledger=ledger, entry_id=entry_id, key=f"{like.key}#{self.crashes}", due=self.now
                )
                if (row.key, row.id) in {(each.key, each.id) for each in self.source}:
                    row = row._replace(key=f"{row.key}/{row.position}")
            else:
                key = self.rng.choice(["", "a", "a", "b", "c"])
                due = self.now + self.rng.choice([-500, 5, 300, 2000, 20_000, 200_000])
                due += self.rng.randint(0, 20)
                identity = self.rng.choice([len(self.source), self.rng.getrandbits(62)])
                row = Row(ledger, entry_id, due, key, identity, b"")
                if row.identity in {each.identity for each in self.source}:
                    continue
                row = row._replace(payload=self.rng.randbytes(self.size))
            self.source.append(row)

    def read(self) -> None:
        if self.rng.random() < 0.1:  # the consumer connects again
            self.reader = self.index_of(self.rng.randint(0, self.acknowledged))
        rows = self.source[self.reader : self.reader + self.rng.randint(1, 12)]
        self.offer(rows)
        self.reader += len(rows)

    def offer(self, rows: list[Row]) -> None:
        offered = self.delay_queue.offer(
            FetchedBatch(
                [row.ledger for row in rows],
                [row.entry_id for row in rows],
                [row.due for row in rows],
                [(row.key, row.id, row.payload) for row in rows],
            )
        )
        assert sum(offered) <= len(rows)
        self.seen["duplicates"] += offered.duplicates
        self.seen["released before"] += offered.released

    def time_passes(self) -> None:
        step = self.rng.choice([1, 10, 300, 3000, 30_000])
        self.now += step
        self.clock.advance(timedelta(milliseconds=step))

    def advance(self) -> None:
        if self.deduplicating and self.to_resolve:
            return  # after a publication, the target's last ID no longer resolves intents
        batch = self.delay_queue.advance(self.clock.now_ms(), self.rng.choice([1, 3, 10, 100]))
        if batch is None:
            return
        order = list(zip(batch.due_ms.tolist(), batch.positions.tolist(), strict=True))
        assert order == sorted(set(order))
        assert order[-1][0] <= self.clock.now_ms()
        rows = [self.row_at(position) for position in batch.positions.tolist()]
        assert [(row.key, row.id, row.payload) for row in rows] == batch.records
        assert [row.due for row in rows] == batch.due_ms.tolist()
        assert not self.known & {row.position for row in rows}
        # The dispatcher knows that some are refused: 2.
        targets = [2 if self.rng.random() < 0.03 else row.target for row in rows]
        used = sorted(set(targets))
        parts = [[i for i, one in enumerate(targets) if one == target] for target in used]
        for target, part in zip(used, self.delay_queue.divide(batch, parts), strict=True):
            self.launch(part, target)

    def launch(self, batch: DueBatch, target: int) -> None:
        self.flights[batch.number] = batch
        first = 0
        if self.deduplicating:
            name = "" if target == 2 else TARGETS[target]
            first = self.delay_queue.state.next_sequence(name) if name else 0
            self.append(self.delay_queue.intent(batch, name, first))
            self.unconfirmed.add(batch.number)
        else:
            self.delay_queue.launch(batch)
        self.waiting[batch.number] = len(batch)
        for sequence, position in enumerate(batch.positions.tolist(), first):
            self.queues[target].append((batch.number, sequence, self.row_at(position)))

    def publish(self) -> None:
        target = self.rng.choice([0, 0, 1, 1, 2])
        queue = self.queues[target]
        for _ in range(self.rng.randint(1, 15)):
            if not queue or queue[0][0] in self.unconfirmed:
                return
            number, sequence, row = queue.pop(0)
            if target == 2 or self.rng.random() < 0.06:
                self.held.append(row)
                self.ever_held.add(row.identity)
                self.aside.setdefault(number, []).append(row.position)
            else:
                self.store(sequence, row)
            self.waiting[number] -= 1

    def store(self, sequence: int, row: Row) -> None:
        name = TARGETS[row.target]
        if self.deduplicating:
            if sequence <= self.last[name]:
                raise AssertionError(
                    "a target would silently drop a message whose sequence ID was used before"
                )
            self.last[name] = sequence
        assert row.due <= self.now
        self.stored[row.identity] += 1

    def commit(self) -> None:
        ready = [number for number in self.flights if not self.waiting[number]]
        if not ready:
            return
        number = self.rng.choice(ready)
        self.append(self.delay_queue.commit(number, self.aside.get(number, [])))
        self.known.update(self.flights.pop(number).positions.tolist())
        self.seen["held"] += len(self.aside.get(number, []))

    def checkpoint(self) -> None:
        for closed in self.delay_queue.close_reopened():
            self.append(closed)
        position = self.delay_queue.low_watermark()
        self.check_low_watermark(position)
        record = self.delay_queue.checkpoint()
        if record is not None:
            assert record.position == position
            self.append(record)
            if self.rng.random() < 0.5:
                self.flush()
                self.acknowledged = position
        assert self.delay_queue.checkpoint() is None

    def snapshot(self) -> None:
        self.write_chunks(len(self.chunks))
        self.chunks = self.delay_queue.state.snapshot()
        self.write_chunks(1)

    def write_chunks(self, count: int) -> None:
        self.tail += self.chunks[:count]
        del self.chunks[:count]

    def crash(self) -> None:
        """Drop some of the unconfirmed records; the messages sent last may be stored."""
        self.crashes += 1
        for queue in self.queues[:2]:
            for number, sequence, row in queue[: self.rng.choice([0, 0, 1, 4, 100])]:
                if number in self.unconfirmed:
                    break
                self.store(sequence, row)
        kept = self.rng.randint(0, len(self.tail))
        self.journal += self.tail[:kept]
        if not self.deduplicating:  # what was sent and has no record may come again
            lost = [each for each in map(decode, self.tail[kept:]) if isinstance(each, Released)]
            for batch in [*self.flights.values(), *lost]:
                for position in batch.positions.tolist():
                    self.allowed[self.row_at(position).identity] += 1
        self.tail = []
        self.delay_queue.close()
        self.start()

    def step(self) -> None:
        if self.to_resolve and self.rng.random() < 0.5:
            self.resolve_one()
            return
        steps = {
            self.arrive: 10,
            self.read: 14,
            self.time_passes: 8,
            self.advance: 12,
            self.flush: 10,
            self.publish: 12,
            self.commit: 10,
            self.checkpoint: 5,
            self.snapshot: 1,
            self.crash: 2,
        }
        self.rng.choices(list(steps), list(steps.values()))[0]()
        self.write_chunks(self.rng.choice([0, 0, 1, 3]))

    def finish(self) -> None:
        """Run without faults until every message is out."""
        while self.to_resolve:
            self.resolve_one()
        while self.held or self.reader < len(self.source) or len(self.delay_queue) or self.flights:
            if self.held:
                self.arrive()
            rows = self.source[self.reader :]
            self.offer(rows)
            self.reader = len(self.source)
            self.now += 300_000
            self.clock.move_to(self.now)
            self.advance()
            self.flush()
            while any(self.queues):
                self.publish()
            self.commit()

    # --- checks

    def snapshot_start(self) -> int:
        """Return the index of the first chunk of the last complete snapshot; 0 without one."""
        begin = found = serial = -1
        count = 0
        for index, data in enumerate(self.journal):
            record = decode(data)
            if isinstance(record, SnapshotChunk):
                if record.part == 0:
                    begin, serial, count = index, record.serial, 0
                if record.serial == serial:
                    count += 1
                    if count == record.parts:
                        found = begin
                        self.seen["snapshots"] += 1
                        self.seen["long snapshots"] += count > 1
        return max(found, 0)

    def check_state(self, model: Model) -> None:
        state = self.delay_queue.state
        assert state.low_watermark == model.low_watermark
        assert set(state.released) == {
            each for each in model.released if each >= model.low_watermark
        }
        assert self.released_positions() == {
            row.position
            for row in self.source
            if row.position < model.low_watermark or row.position in model.released
        }
        for row in self.source:
            if row.key:
                known = state.memory.is_duplicate(row.id, row.key)
                assert known == ((row.key, row.id) in model.ids)
        assert list(map(encode, state.open_intents.values())) == list(
            map(encode, model.intents.values())
        )
        assert state.sequences == model.sequences
        assert state.next_number == model.next_number

    def check_low_watermark(self, low_watermark: int) -> None:
        for row in self.source:
            if row.position < low_watermark:
                assert self.stored[row.identity] or row.identity in self.ever_held
        for batch in self.flights.values():
            assert int(batch.positions.min()) >= low_watermark
        for number in self.to_resolve:
            assert int(self.delay_queue.state.open_intents[number].positions.min()) >= low_watermark

    def check_end(self) -> None:
        assert self.delay_queue.in_flight == len(self.delay_queue) == 0
        assert self.delay_queue.low_watermark() == self.source[-1].position + 1
        for row in self.source:
            count = self.stored[row.identity]
            if row.identity in self.ever_held:
                assert count <= 1 + self.allowed[row.identity]
            else:
                assert 1 <= count <= 1 + self.allowed[row.identity], row
        # Held messages have returned under another key.
        again = {(row.key.split("#")[0], row.id) for row in self.source if "#" in row.key}
        assert {(key.split("#")[0], number) for key, number in self.ever_held if key} <= again


@pytest.fixture(autouse=True)
def _small_chunks() -> Iterator[None]:
    with patch.object(journal_state, "_CHUNK_BYTES", 300):
        yield


def run(seed: int, deduplicating: bool, directory: Path) -> Simulation:
    simulation = Simulation(seed, deduplicating, directory)
    for step in range(300):
        simulation.step()
        if step % 40 == 0:
            simulation.check_state(Model(simulation.journal + simulation.tail))
    simulation.finish()
    simulation.check_state(Model(simulation.journal + simulation.tail))
    simulation.check_end()
    return simulation


@pytest.mark.parametrize("deduplicating", [True, False])
@pytest.mark.parametrize("seed", seeds(16))
def test_no_message_is_lost_early_or_released_twice(
    seed: int, deduplicating: bool, tmp_path: Path
) -> None:
    run(seed, deduplicating, tmp_path)
