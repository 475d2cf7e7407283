"""Tests that the delay queue releases each message once, in order, when it is due."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from delaylevel.dispatcher.delay_queue import DelayQueue
from delaylevel.dispatcher.journal.records import pack, unpack
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.dispatcher.record import DueBatch, FetchedBatch, OfferResult
from delaylevel.errors import InvalidInputError
from delaylevel.structures.segments.pending import PendingSegments
from delaylevel.testing import ManualClock

T0 = 1_700_000_000_000
CAPACITY = 10_000
Spec = tuple[Any, ...]  # entry, due - T0, and optionally key and ID


def fetched(*rows: Spec) -> FetchedBatch:
    found = FetchedBatch()
    for entry, due, *identity in rows:
        found.ledger_ids.append(7)
        found.entry_ids.append(entry << 10)
        found.due_ms.append(T0 + due)
        key, number = identity or ("a", entry)
        found.records.append((key, number, b"%d" % entry, ("x", 1.5)))
    return found


def position(entry: int) -> int:
    return pack(7, entry << 10)


def entries(batch: DueBatch | None) -> list[int]:
    return [] if batch is None else (unpack(batch.positions)[1] >> 10).tolist()


class Fixture:
    """A delay queue with its clock, segments and journal state."""

    def __init__(self, directory: Path, state: JournalState | None = None, **options: Any) -> None:
        self.clock = ManualClock(T0)
        self.segments = PendingSegments(
            directory, budget_bytes=1 << 20, clock=self.clock.now_ms, **options
        )
        self.state = state or JournalState(CAPACITY)
        self.queue = DelayQueue(self.state, self.segments, clock=self.clock)

    def offer(self, *rows: Spec) -> OfferResult:
        return self.queue.offer(fetched(*rows))

    def take(self, due: int, most: int = 1000) -> list[int]:
        """Release at most ``most`` due messages; return their entry numbers."""
        batch = self.queue.advance(T0 + due, most)
        if batch is not None:
            self.queue.launch(batch)
            self.queue.commit(batch.number)
        return entries(batch)


@pytest.fixture
def fix(tmp_path: Path) -> Fixture:
    return Fixture(tmp_path)


def restored(fix: Fixture, directory: Path) -> Fixture:
    """Return the state of the next process, which reads the whole journal."""
    return Fixture(directory, JournalState.read(fix.state.snapshot(), CAPACITY))


# --- order


def test_due_messages_are_released_by_due_time_then_position(fix: Fixture) -> None:
    offered = fix.offer((1, 50), (2, 20), (3, 50), (4, -10), (5, 20), (6, 90))
    assert offered == OfferResult(6, 0, 0)
    assert len(fix.queue) == 6
    batch = fix.queue.advance(T0 + 50)
    assert batch is not None
    assert entries(batch) == [4, 2, 5, 1, 3]
    assert batch.due_ms.tolist() == [T0 - 10, T0 + 20, T0 + 20, T0 + 50, T0 + 50]
    assert unpack(batch.positions)[0].tolist() == [7] * 5
    assert batch.positions.tolist() == [position(entry) for entry in (4, 2, 5, 1, 3)]
    assert batch.records[0] == ("a", 4, b"4", ("x", 1.5))
    assert len(batch) == 5
    fix.queue.launch(batch)
    assert (len(fix.queue), fix.queue.in_flight) == (1, 5)
    assert fix.queue.advance(T0 + 89) is None
    assert entries(fix.queue.advance(T0 + 90)) == [6]


# --- copies


def test_copies_are_dropped_if_the_first_is_pending_in_flight_or_released(fix: Fixture) -> None:
    offered = fix.offer((1, 10, "a", 5), (2, 10, "a", 5), (3, 10, "b", 5), (4, 10, "a", 6))
    assert offered == OfferResult(3, 1, 0)
    assert fix.offer((20, 90, "c", 5), (21, 90, "c", 5)) == OfferResult(1, 1, 0)  # only two
    assert fix.offer((5, 10, "a", 5)) == OfferResult(0, 1, 0)
    batch = fix.queue.advance(T0 + 10)
    assert batch is not None
    assert entries(batch) == [1, 3, 4]
    assert fix.offer((6, 10, "a", 5)) == OfferResult(0, 1, 0)
    fix.queue.launch(batch)
    fix.queue.commit(batch.number)
    assert fix.offer((7, 10, "a", 5), (8, 10, "a", 7)) == OfferResult(1, 1, 0)
    assert fix.take(10) == [8]


def test_a_copy_is_dropped_unless_the_first_is_a_dead_letter(fix: Fixture, tmp_path: Path) -> None:
    fix.offer((1, 1, "a", 1), (2, 1, "a", 2), (3, 90, "a", 3))
    batch = fix.queue.advance(T0 + 1)
    assert batch is not None
    fix.queue.launch(batch)
    fix.queue.commit(batch.number, held=[position(2)])
    # It may be a replay, also for the owner that made it a dead letter.
    assert fix.offer((4, 1, "a", 2)) == OfferResult(1, 0, 0)
    later = restored(fix, tmp_path / "b")
    assert later.offer((1, 1, "a", 1), (2, 1, "a", 2)) == OfferResult(0, 0, 2)
    assert later.offer((3, 90, "a", 3), (5, 1, "a", 1), (6, 1, "a", 3)) == OfferResult(1, 2, 0)
    assert later.offer((7, 1, "a#1", 2)) == OfferResult(1, 0, 0)


# --- after a takeover


def with_open_intent(fix: Fixture, directory: Path) -> Fixture:
    """Return a queue after a takeover: 0, 1 released, 2, 3 in an open intent, 4, 5 pending."""
    fix.offer(*((entry, 1) for entry in range(6)))
    fix.take(1, 2)
    batch = fix.queue.advance(T0 + 1, 2)
    assert batch is not None
    fix.queue.intent(batch, "o", 1)
    return restored(fix, directory)


def test_an_intent_can_be_resolved_after_its_messages_are_read_again(
    fix: Fixture, tmp_path: Path
) -> None:
    later = with_open_intent(fix, tmp_path / "b")
    assert later.offer(*((entry, 1) for entry in range(6))) == OfferResult(4, 0, 2)
    assert later.offer((2, 1), (7, 1, "a", 2)) == OfferResult(
        0, 1, 0
    )  # entry 7 is a copy of entry 2
    assert (len(later.queue), later.queue.in_flight) == (2, 2)
    assert later.take(1) == [4, 5]  # those of the open intent stay in flight
    assert later.queue.low_watermark() == position(2)
    later.queue.resolve(1, [True, False])
    assert (len(later.queue), later.queue.in_flight) == (1, 0)
    assert later.queue.low_watermark() == position(3)
    assert later.take(1) == [3]
    assert later.queue.low_watermark() == position(7) + 1
    with pytest.raises(InvalidInputError, match="no intent 1"):
        later.queue.resolve(1, [True, False])


def test_an_open_intent_pins_the_low_watermark_before_it_is_read_again(
    fix: Fixture, tmp_path: Path
) -> None:
    later = with_open_intent(fix, tmp_path / "b")
    assert later.queue.low_watermark() == 0  # no message was read yet
    later.offer((0, 1), (1, 1))
    assert later.queue.low_watermark() == position(1) + 1
    later.offer((8, 1))  # a reader that skipped messages
    assert later.queue.low_watermark() == position(2)
    later.queue.resolve(1, [True, True])
    assert later.queue.low_watermark() == position(8)


def test_messages_that_are_pending_again_are_not_released_early(
    fix: Fixture, tmp_path: Path
) -> None:
    fix.offer((1, 50), (2, 60))
    batch = fix.queue.advance(T0 + 60)
    assert batch is not None
    fix.queue.intent(batch, "o", 1)
    later = restored(fix, tmp_path / "b")
    later.offer((1, 50), (2, 60))
    later.queue.resolve(0, [False, False])
    assert later.take(49) == []
    assert later.take(50) == [1]
