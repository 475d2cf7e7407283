"""Tests that the delay queue releases each message once, in order, when it is due."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from delaylevel.dispatcher.delay_queue import DelayQueue
from delaylevel.dispatcher.journal.records import LowWatermark, encode, pack, unpack
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.dispatcher.record import DueBatch, FetchedBatch, OfferResult
from delaylevel.errors import DelayLevelError, InvalidInputError
from delaylevel.structures.segments.pending import PendingSegments, SpillFullError
from delaylevel.testing import ManualClock
from support.fakes import SmallDisk

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
            directory, precision_ms=1, budget_bytes=1 << 20, clock=self.clock.now_ms, **options
        )
        self.state = state or JournalState(CAPACITY)
        self.queue = DelayQueue(self.state, self.segments, clock=self.clock)

    def offer(self, *rows: Spec) -> OfferResult:
        return self.queue.offer(fetched(*rows))

    def take(self, due: int, most: int = 1000) -> list[int]:
        """Release at most ``most`` due messages; return their entry numbers."""
        batch = self.queue.advance(T0 + due, most)
        if batch is not None:
            self.queue.intent(batch)
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
    assert (len(fix.queue), fix.queue.in_flight) == (1, 5)
    assert fix.queue.advance(T0 + 89) is None
    assert entries(fix.queue.advance(T0 + 90)) == [6]


class Named(NamedTuple):
    """A record as a named tuple."""

    id_key: str
    id: int
    value: bytes | None


def test_a_named_tuple_is_released_as_a_plain_tuple(fix: Fixture, tmp_path: Path) -> None:
    some = fetched((1, 1), (2, 1))
    some.records = [Named("a", 1, b"x"), Named("a", 2, None)]
    fix.queue.offer(some)
    batch = fix.queue.advance(T0 + 1)
    assert batch is not None
    assert batch.records == [("a", 1, b"x"), ("a", 2, None)]
    fix.queue.intent(batch)
    later = restored(fix, tmp_path / "b")
    later.queue.offer(some)
    later.queue.resolve(0, [False, True])
    again = later.queue.advance(T0 + 1)
    assert again is not None
    assert again.records == [("a", 1, b"x")]
    assert {type(record) for record in again.records + batch.records} == {tuple}


def test_a_batch_has_at_most_the_given_number_of_messages(fix: Fixture) -> None:
    fix.offer(*((entry, entry % 3) for entry in range(10)))
    assert fix.take(5, 4) == [0, 3, 6, 9]
    assert fix.take(5, 0) == []
    assert fix.take(5, 4) == [1, 4, 7, 2]
    assert fix.take(5, 4) == [5, 8]


def test_batch_numbers_are_unique_across_takeovers(fix: Fixture, tmp_path: Path) -> None:
    fix.offer((1, 1), (2, 2), (3, 3))
    first, second = fix.queue.advance(T0 + 1), fix.queue.advance(T0 + 2)
    assert first is not None
    assert second is not None
    assert (first.number, second.number) == (0, 1)
    fix.queue.intent(second)
    later = restored(fix, tmp_path / "b")
    later.offer((1, 1))
    assert [batch.number for batch in [later.queue.advance(T0 + 1)] if batch] == [2]


def test_late_messages_keep_their_order(fix: Fixture) -> None:
    fix.offer((1, 100), (2, 105))
    fix.clock.move_to(T0 + 110)
    fix.offer((3, 102), (4, 101), (5, 120))
    assert fix.take(110) == [1, 4, 3, 2]
    assert fix.take(120) == [5]


def test_messages_that_are_already_due_are_tracked(tmp_path: Path) -> None:
    clock = ManualClock(T0 + 50)
    segments = PendingSegments(tmp_path, precision_ms=1, clock=clock.now_ms)
    queue = DelayQueue(JournalState(CAPACITY), segments, clock=clock)
    queue.offer(fetched((1, 60), (2, 50), (3, 10), (4, 51), (5, 10), (6, 70)))
    assert len(queue.pending.tracker) == 6
    assert len(queue) == 6
    assert queue.next_due_ms() == T0 + 10
    assert queue.pending.tracker.counts([T0, T0 + 11, T0 + 51, T0 + 61]).tolist() == [2, 1, 2]
    assert entries(queue.advance(T0 + 10, 1)) == [3]
    queue.offer(fetched((7, 20)))
    assert entries(queue.advance(T0 + 60)) == [5, 7, 2, 4, 1]
    assert entries(queue.advance(T0 + 70)) == [6]


def test_next_due_time_counts_and_queries(fix: Fixture) -> None:
    assert fix.queue.next_due_ms() is None
    rows = fetched((1, 30), (2, 10), (3, -5), (4, 500))
    rows.attribute = [3.0, 1.0, 9.0, 5.0]
    fix.queue.offer(rows)
    assert fix.queue.next_due_ms() == T0 - 5
    edges = [T0 - 100, T0, T0 + 100, T0 + 1000]
    pending = fix.queue.pending
    assert pending.tracker.counts(edges).tolist() == [1, 2, 1]
    frozen = pending.segments.freeze(T0, T0 + 1000)
    assert [entry >> 10 for entry in frozen.table(2.0)["entry_id"].to_pylist()] == [1, 4]
    frozen.close()
    batch = fix.queue.advance(T0 + 10)
    assert batch is not None
    assert pending.tracker.counts(edges).tolist() == [0, 1, 1]
    assert fix.queue.next_due_ms() == T0 + 30


# --- copies


def test_copies_are_dropped_if_the_first_is_pending_in_flight_or_released(fix: Fixture) -> None:
    offered = fix.offer((1, 10, "a", 5), (2, 10, "a", 5), (3, 10, "b", 5), (4, 10, "a", 6))
    assert offered == OfferResult(3, 1, 0)
    assert fix.offer((5, 10, "a", 5)) == OfferResult(0, 1, 0)
    batch = fix.queue.advance(T0 + 10)
    assert batch is not None
    assert entries(batch) == [1, 3, 4]
    assert fix.offer((6, 10, "a", 5)) == OfferResult(0, 1, 0)
    fix.queue.intent(batch)
    fix.queue.commit(batch.number)
    assert fix.offer((7, 10, "a", 5), (8, 10, "a", 7)) == OfferResult(1, 1, 0)
    assert fix.take(10) == [8]


def test_many_copies_under_many_keys_are_dropped(fix: Fixture) -> None:
    rows = [(entry, 10, "abcdefg"[entry % 7], entry // 3 % 50) for entry in range(900)]
    first: dict[Any, int] = {}
    for entry, _, *identity in rows:
        first.setdefault(tuple(identity), entry)
    assert fix.offer(*rows[:400]).duplicates > 0
    fix.offer(*rows[400:])
    assert fix.take(10) == sorted(first.values())


def test_messages_without_a_key_are_never_copies(fix: Fixture, tmp_path: Path) -> None:
    assert fix.offer((1, 1, "", 5), (2, 1, "", 5)) == OfferResult(2, 0, 0)
    assert fix.take(1) == [1, 2]
    assert fix.offer((3, 1, "", 5)) == OfferResult(1, 0, 0)
    assert len(fix.state.memory) == 0


def test_a_position_is_tracked_once(fix: Fixture) -> None:
    assert fix.offer((1, 5), (1, 5), (2, 5)) == OfferResult(2, 0, 0)
    assert fix.offer((1, 5), (2, 5), (3, 5)) == OfferResult(1, 0, 0)
    batch = fix.queue.advance(T0 + 5)
    assert batch is not None
    assert entries(batch) == [1, 2, 3]
    assert fix.offer((1, 5), (2, 5), (3, 5)) == OfferResult(0, 0, 0)
    fix.queue.intent(batch)
    fix.queue.commit(batch.number)
    assert fix.offer((1, 5), (2, 5), (3, 5)) == OfferResult(0, 0, 3)
    fix.queue.checkpoint()
    assert fix.offer((1, 5), (2, 5), (3, 5)) == OfferResult(0, 0, 3)
    assert len(fix.queue) == 0


def test_a_copy_is_dropped_unless_the_first_is_a_dead_letter(fix: Fixture, tmp_path: Path) -> None:
    fix.offer((1, 1, "a", 1), (2, 1, "a", 2), (3, 90, "a", 3))
    batch = fix.queue.advance(T0 + 1)
    assert batch is not None
    fix.queue.intent(batch)
    fix.queue.commit(batch.number, held=[position(2)])
    # It may be a replay, also for the owner that made it a dead letter.
    assert fix.offer((4, 1, "a", 2)) == OfferResult(1, 0, 0)
    later = restored(fix, tmp_path / "b")
    assert later.offer((1, 1, "a", 1), (2, 1, "a", 2)) == OfferResult(0, 0, 2)
    assert later.offer((3, 90, "a", 3), (5, 1, "a", 1), (6, 1, "a", 3)) == OfferResult(1, 2, 0)
    assert later.offer((7, 1, "a#1", 2)) == OfferResult(1, 0, 0)


# --- intents


def test_an_intent_lists_the_messages_of_its_batch(fix: Fixture) -> None:
    fix.offer((1, 3, "a", 10), (2, 1, "", 0), (3, 2, "b", 30), (4, 4, "a", 40))
    batch = fix.queue.advance(T0 + 9)
    assert batch is not None
    intent = fix.queue.intent(batch, [("x", 1), ("y", 7)], [1, 0, 1, 1])
    assert intent.number == batch.number
    assert intent.positions.tolist() == batch.positions.tolist()
    assert [intent.id_keys[index] for index in intent.key_index] == ["", "b", "a", "a"]
    assert intent.ids.tolist() == [0, 30, 10, 40]
    assert intent.sequence_ids().tolist() == [7, 1, 8, 9]
    assert fix.state.sequences == {"x": 2, "y": 10}
    assert fix.state.open_intents == {0: intent}
    with pytest.raises(InvalidInputError, match="already has an intent"):
        fix.queue.intent(batch)


def test_used_sequence_ids_are_refused(fix: Fixture) -> None:
    fix.offer((1, 1), (2, 2))
    first, second = fix.queue.advance(T0 + 1), fix.queue.advance(T0 + 2)
    assert first is not None
    assert second is not None
    with pytest.raises(InvalidInputError, match="begin at 1"):
        fix.queue.intent(first, [("x", 0)], [0])
    with pytest.raises(InvalidInputError, match="given twice"):
        fix.queue.intent(first, [("x", 1), ("x", 1)], [0])
    fix.queue.intent(first, [("x", 1)], [0])
    with pytest.raises(InvalidInputError, match="begin at 2"):
        fix.queue.intent(second, [("x", 1)], [0])
    fix.queue.intent(second, [("x", 2)], [0])


def test_batches_can_be_committed_in_any_order(fix: Fixture) -> None:
    fix.offer(*((entry, entry) for entry in range(4)))
    batches = [fix.queue.advance(T0 + due) for due in range(4)]
    for batch in batches:
        assert batch is not None
        fix.queue.intent(batch)
    for number, entry in ((2, 0), (0, 1), (3, 1), (1, None)):
        fix.queue.commit(number)
        assert fix.queue.low_watermark() == (position(3) + 1 if entry is None else position(entry))


def test_invalid_commits_are_refused(fix: Fixture) -> None:
    fix.offer((1, 1))
    with pytest.raises(InvalidInputError, match="no batch 0"):
        fix.queue.commit(0)
    batch = fix.queue.advance(T0 + 1)
    assert batch is not None
    with pytest.raises(InvalidInputError, match="has no intent"):
        fix.queue.commit(0)
    fix.queue.intent(batch)
    with pytest.raises(InvalidInputError, match="held position"):
        fix.queue.commit(0, held=[position(9)])
    fix.queue.commit(0)
    with pytest.raises(InvalidInputError, match="no batch 0"):
        fix.queue.commit(0)


# --- after a takeover


def with_open_intent(fix: Fixture, directory: Path) -> Fixture:
    """Return a queue after a takeover: 0, 1 released, 2, 3 in an open intent, 4, 5 pending."""
    fix.offer(*((entry, 1) for entry in range(6)))
    fix.take(1, 2)
    batch = fix.queue.advance(T0 + 1, 2)
    assert batch is not None
    fix.queue.intent(batch, [("o", 1)], [0, 0])
    return restored(fix, directory)


def test_an_intent_can_be_resolved_before_its_messages_are_read_again(
    fix: Fixture, tmp_path: Path
) -> None:
    later = with_open_intent(fix, tmp_path / "b")
    record = later.queue.resolve(1, [True, False])
    assert record.released.tolist() == [position(2)]
    assert later.offer(*((entry, 1) for entry in range(6))) == OfferResult(3, 0, 3)
    assert later.take(1) == [3, 4, 5]
    assert later.queue.low_watermark() == position(5) + 1


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


def test_invalid_resolutions_are_refused(fix: Fixture, tmp_path: Path) -> None:
    later = with_open_intent(fix, tmp_path / "b")
    with pytest.raises(InvalidInputError, match="2 messages, the mask 1"):
        later.queue.resolve(1, [True])
    later.offer((4, 1))
    batch = later.queue.advance(T0 + 1)
    assert batch is not None
    with pytest.raises(InvalidInputError, match="resolve it first"):
        later.queue.intent(batch, [("o", 3)], [0])
    later.queue.resolve(1, [False, False])
    later.queue.intent(batch, [("o", 3)], [0])


def test_a_position_can_be_in_two_open_intents(fix: Fixture, tmp_path: Path) -> None:
    fix.offer((1, 1), (2, 1))
    batch = fix.queue.advance(T0 + 1)
    assert batch is not None
    first = fix.queue.intent(batch)
    journal = [encode(first), encode(replace(first, number=1))]
    later = Fixture(tmp_path / "b", JournalState.read(journal, CAPACITY))
    later.offer((1, 1), (2, 1))
    later.queue.resolve(0, [False, False])
    assert later.take(1) == []
    later.queue.resolve(1, [False, True])
    assert later.take(1) == [1]
    assert later.queue.low_watermark() == position(2) + 1


def test_messages_that_are_pending_again_are_not_released_early(
    fix: Fixture, tmp_path: Path
) -> None:
    fix.offer((1, 50), (2, 60))
    batch = fix.queue.advance(T0 + 60)
    assert batch is not None
    fix.queue.intent(batch)
    later = restored(fix, tmp_path / "b")
    later.offer((1, 50), (2, 60))
    later.queue.resolve(0, [False, False])
    assert later.take(49) == []
    assert later.take(50) == [1]


# --- the low watermark


def test_the_low_watermark_follows_positions_not_due_times(fix: Fixture) -> None:
    assert fix.queue.low_watermark() == 0
    assert fix.queue.checkpoint() is None
    fix.offer((1, 30), (2, 10), (3, 20), (4, 10, "a", 2))
    assert fix.queue.low_watermark() == position(1)
    assert fix.queue.checkpoint() == LowWatermark(position(1))
    assert fix.queue.checkpoint() is None
    assert fix.take(20) == [2, 3]
    assert fix.queue.low_watermark() == position(1)
    assert len(fix.state.released) == 2
    assert fix.take(30) == [1]
    assert fix.queue.checkpoint() == LowWatermark(
        position(4) + 1
    )  # the dropped copy counts as released
    assert len(fix.state.released) == 0
    assert fix.state.low_watermark == position(4) + 1


def test_the_low_watermark_never_decreases(fix: Fixture, tmp_path: Path) -> None:
    fix.offer((5, 1))
    fix.take(1)
    before = fix.queue.low_watermark()
    assert fix.offer((3, 1)) == OfferResult(0, 0, 1)  # below the low watermark
    assert fix.queue.low_watermark() == before
    fix.queue.checkpoint()
    later = restored(fix, tmp_path / "b")
    assert later.queue.low_watermark() == before
    later.offer((2, 1))
    assert later.queue.low_watermark() == before
    later.offer((9, 1))
    assert later.queue.low_watermark() == position(9)


def test_messages_out_of_order_above_the_low_watermark_are_not_lost(fix: Fixture) -> None:
    fix.offer((5, 1), (2, 9))
    assert fix.take(1) == [5]
    fix.offer((4, 1), (3, 2))
    assert fix.take(2) == [4, 3]
    assert fix.queue.low_watermark() == position(2)


# --- faults


def test_a_batch_refused_by_a_full_disk_can_be_offered_later(tmp_path: Path) -> None:
    disk = SmallDisk(0)
    fix = Fixture(tmp_path, opener=disk)
    calls = []
    for start in range(0, 2000, 100):
        some = fetched(*((entry, 100_000 + entry) for entry in range(start, start + 100)))
        some.records = [(*record, bytes(1000)) for record in some.records]
        calls.append(some)
    taken = 0
    while fix.segments.state == "open":
        fix.queue.offer(calls[taken])
        taken += 1
    while fix.segments.memory_bytes + 115_000 < fix.segments.budget_bytes:
        fix.queue.offer(calls[taken])
        taken += 1
    before = len(fix.queue), fix.queue.low_watermark(), fix.queue.next_due_ms()
    with pytest.raises(SpillFullError):
        fix.queue.offer(calls[taken])
    assert (len(fix.queue), fix.queue.low_watermark(), fix.queue.next_due_ms()) == before
    assert before[0] == 100 * taken > 0
    disk.free = 1 << 30
    fix.clock.advance(timedelta(seconds=5))
    for some in calls[taken:]:
        assert fix.queue.offer(some) == OfferResult(100, 0, 0)
    out: list[int] = []
    while more := fix.take(200_000):
        out += more
    assert out == list(range(2000))
    assert fix.queue.low_watermark() == position(1999) + 1


def test_an_invalid_batch_changes_nothing(fix: Fixture) -> None:
    fix.offer((1, 10))
    good = fetched((2, 10), (3, 10))
    for name, value in (
        ("ledger_ids", [1 << 28, 7]),
        ("ledger_ids", [7]),
        ("due_ms", [T0, "x"]),
        ("due_ms", [T0, 1 << 63]),
        ("records", [("a", 2), ("a", -1)]),
        ("records", [("a", 2), ("a",)]),
        ("records", [("a", 2), ("a", 1 << 63)]),
        ("records", [("a", 2), ("a", 3, object())]),
    ):
        bad = fetched((2, 10), (3, 10))
        setattr(bad, name, value)
        with pytest.raises(InvalidInputError):
            fix.queue.offer(bad)
        assert len(fix.queue) == 1
    assert fix.queue.offer(good) == OfferResult(2, 0, 0)
    assert fix.take(10) == [1, 2, 3]
    assert fix.queue.offer(FetchedBatch()) == OfferResult(0, 0, 0)


def test_segments_that_are_inexact_or_not_empty_are_refused(tmp_path: Path) -> None:
    clock = ManualClock(T0)
    state = JournalState(CAPACITY)
    with pytest.raises(InvalidInputError, match="precision_ms=1"):
        DelayQueue(state, PendingSegments(tmp_path), clock=clock)
    exact = PendingSegments(tmp_path, precision_ms=1)
    exact.append([T0], [1], [1], [b"x"])
    with pytest.raises(InvalidInputError, match="empty"):
        DelayQueue(state, exact, clock=clock)


def test_a_row_missing_in_the_segments_is_an_error(fix: Fixture) -> None:
    fix.offer((1, 1), (2, 2), (3, 3))
    fix.segments.tracker.put(np.array([[T0 + 2], [7], [9 << 10]]))
    with pytest.raises(DelayLevelError, match="disagree"):
        fix.queue.advance(T0 + 3)


def test_a_backlog_beyond_the_budget_is_released_in_order(fix: Fixture) -> None:
    rng = np.random.default_rng(1)
    dues = rng.integers(-1000, 100_000, 5000).tolist()
    for start in range(0, 5000, 250):
        some = fetched(*((entry, dues[entry]) for entry in range(start, start + 250)))
        some.records = [(*record, bytes(500)) for record in some.records]
        fix.queue.offer(some)
        assert fix.segments.memory_bytes <= 1 << 20
    assert fix.segments.disk_bytes > 1 << 20
    assert fix.queue.memory_bytes < 2 << 20
    out: list[int] = []
    for due in range(-1000, 102_000, 3000):
        while more := fix.take(due, 300):
            out += more
            assert all(dues[entry] <= due for entry in more)
    assert out == sorted(range(5000), key=lambda entry: (dues[entry], entry))
    fix.queue.close()
    assert list(fix.segments.directory.iterdir()) == []
