"""Tests of the tracker: it behaves like a plain set at every step, is compact, and checks input."""

from __future__ import annotations

import tracemalloc
from bisect import bisect_right, insort
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from delaylevel.errors import InvalidInputError
from delaylevel.structures import buckets, tracker
from delaylevel.structures.tracker import TimeBucketTracker
from support.invariants import check_tracker
from support.seeds import examples

T0 = 1_700_000_000_000
SMALL = st.integers(0, 3)
SPAN = st.sampled_from([1, 50, 4000, 30_000, 90_000_000])


class TrackerMachine(RuleBasedStateMachine):
    """Random operations with small limits, so that splits and merges happen after a few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = [
            patch.object(buckets, "SPLIT_ROWS", 96),
            patch.object(buckets, "CHUNK_ROWS", 16),
            patch.object(buckets, "_LOOSE_ROWS", 40),
            patch.object(tracker, "_SLICE_ROWS", 8),
            patch.object(tracker, "_STRIDE", 2),
            patch.object(tracker, "_MAX_RUNS", 6),
        ]
        for each in self.patches:
            each.start()
        self.now = T0
        self.model: list[tuple[int, int, int]] = []

    def teardown(self) -> None:
        for each in self.patches:
            each.stop()

    @initialize(bits=st.sampled_from([0, 0, 4, 10, 16]))
    def start(self, bits: int) -> None:
        self.precision = 1 << bits
        self.tracker = TimeBucketTracker(self.precision, clock=lambda: self.now)

    @rule(seed=st.integers(0, 1 << 30), n=st.integers(1, 120), span=SPAN, ahead=SPAN, wide=SMALL)
    def add_many(self, seed: int, n: int, span: int, ahead: int, wide: int) -> None:
        rng = np.random.default_rng(seed)
        dues = self.now + rng.integers(-5, span, n) + ahead
        ledgers = rng.integers(0, (3, 3, 1 << 20, 1 << 45)[wide], n)
        entries = rng.integers(0, (40, 1 << 16, 1 << 27, 1 << 60)[wide], n)
        rows = zip(
            (dues & -self.precision).tolist(), ledgers.tolist(), entries.tolist(), strict=True
        )
        fresh = [row for row in rows if row[0] > self.now]
        assert self.tracker.add_messages(ledgers, entries, dues) == len(fresh)
        self.model = sorted(self.model + fresh)

    @rule(start=st.integers(0, 1 << 20), n=st.integers(1, 300), ahead=SPAN, step=st.integers(0, 60))
    def add_in_order(self, start: int, n: int, ahead: int, step: int) -> None:
        dues = self.now + ahead + np.arange(n) * step
        entries = np.arange(start, start + n)
        self.tracker.add_messages(np.full(n, 7), entries, dues)
        rows = zip((dues & -self.precision).tolist(), [7] * n, entries.tolist(), strict=True)
        self.model = sorted(self.model + [row for row in rows if row[0] > self.now])

    @rule(ledger=SMALL, entry=st.integers(0, 99), ahead=st.integers(-2000, 20_000))
    def add_one(self, ledger: int, entry: int, ahead: int) -> None:
        due = self.now + ahead
        row = (due & -self.precision, ledger, entry)
        tracked = self.tracker.add_message(ledger, entry, due)
        assert tracked == (row[0] > self.now)
        if tracked:
            insort(self.model, row)

    @rule(most=st.integers(0, 200))
    def get(self, most: int) -> None:
        due = [row for row in self.model if row[0] <= self.now][:most]
        ledgers, entries = self.tracker.get_scheduled_messages(most)
        assert list(zip(ledgers.tolist(), entries.tolist(), strict=True)) == [r[1:] for r in due]
        del self.model[: len(due)]

    @precondition(lambda self: self.model)
    @rule()
    def get_in_the_first_millisecond(self) -> None:
        self.now = self.model[0][0] - 1
        self.get(1)
        self.now += 1
        self.get(1)

    @precondition(lambda self: self.model)
    @rule(places=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=30))
    def remove(self, places: list[float]) -> None:
        for place in places[: len(self.model)]:
            due, ledger, entry = self.model.pop(int(place * len(self.model)))
            assert self.tracker.remove(ledger, entry, due)
            assert not self.tracker.remove(ledger, entry + (1 << 47), due)

    @rule(step=st.sampled_from([1, 900, 6000, 100_000, 40_000_000, -7000]))
    def time_passes(self, step: int) -> None:
        self.now += step

    @rule(often=SMALL)
    def clear(self, often: int) -> None:
        if not often:
            self.tracker.clear()
            self.model = []

    @rule()
    def look_ahead(self) -> None:
        self.tracker._look_ahead(self.now, 10)

    @rule()
    def look(self) -> None:
        first_ms = self.model[0][0] if self.model else None
        assert self.tracker.next_deliver_at_ms() == first_ms
        is_due = first_ms is not None and first_ms <= self.now
        assert self.tracker.has_message_available() == is_due
        lowest = min((row[1:] for row in self.model), default=None)
        assert self.tracker.first_pending() == lowest
        edges = [0, *sorted({self.now, self.now + 5000, T0 + 100_000, T0 + 90_000_000})]
        index = [bisect_right(edges, row[0]) for row in self.model]
        assert self.tracker.counts(edges).tolist() == [index.count(k) for k in range(1, len(edges))]

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "tracker"):
            assert len(self.tracker) == len(self.model)
            check_tracker(self.tracker)


TestTrackerMachine = TrackerMachine.TestCase
TestTrackerMachine.settings = examples(12, stateful_step_count=25)


def tracker_at(now: list[int], precision_ms: int = 1) -> TimeBucketTracker:
    return TimeBucketTracker(precision_ms, clock=lambda: now[0])


def test_sequential_and_random_due_times_are_compact() -> None:
    """Find a wasteful layout with fewer rows than the benchmark."""
    n = 400_000
    index = np.arange(n)
    sequential, spread = tracker_at([T0], 1024), tracker_at([T0], 1024)
    sequential.add_messages(index // 50_000, index % 50_000, T0 + 10_000 + index)
    rng = np.random.default_rng(1)
    spread.add_messages(index // 50_000, index % 50_000, T0 + rng.integers(10_000, 86_400_000, n))

    def packed(tracker: TimeBucketTracker) -> float:
        buckets = tracker._store._buckets
        rows = sum(b.packed for b in buckets)
        assert rows > n // 2
        return sum(len(c) for b in buckets for c in b.chunks) / rows

    assert packed(sequential) < 0.05
    assert packed(spread) < 2.7


def test_messages_are_not_all_copied_at_once() -> None:
    index = np.arange(200_000)
    ledgers, entries, dues = index // 50_000, index % 50_000, T0 + index % 1000
    tracker = tracker_at([T0 + 10])
    tracemalloc.start()
    try:
        tracker.add_messages(ledgers, entries, dues)
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - now < 12 * index.size


def test_what_is_due_now_is_not_tracked() -> None:
    tracker = tracker_at([T0])
    assert [tracker.add_message(1, each, T0 + each) for each in (0, 1)] == [False, True]
    assert tracker.add_messages([1, 1], [2, 3], [T0, T0 + 1]) == 1
    assert len(tracker) == 2


@pytest.mark.parametrize("precision", [0, -1, 1000, 3, 1 << 41])
def test_precision_must_be_a_power_of_two(precision: int) -> None:
    with pytest.raises(InvalidInputError, match="power of two"):
        TimeBucketTracker(precision)


def test_invalid_input_is_refused_and_changes_nothing() -> None:
    tracker = tracker_at([T0])
    due = T0 + 9
    for row in [(-1, 0, due), (0, -1, due), (1 << 62, 0, due), (0, 1 << 62, due), (0, 0, 1 << 62)]:
        with pytest.raises(InvalidInputError, match="2\\*\\*62"):
            tracker.add_message(*row)
        with pytest.raises(InvalidInputError, match=r"integers in \["):
            tracker.add_messages([row[0], 1], [row[1], 1], [row[2], T0 + 9])
    with pytest.raises(InvalidInputError):
        tracker.add_message("1", 2, T0 + 9)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="same length"):
        tracker.add_messages([1], [1, 2], [T0 + 9, T0 + 9])
    with pytest.raises(InvalidInputError, match="array of integers"):
        tracker.add_messages([1.5], [1], [T0 + 9])
    with pytest.raises(InvalidInputError, match="max_messages"):
        tracker.get_scheduled_messages(-1)
    with pytest.raises(InvalidInputError, match="ascending"):
        tracker.counts([T0, T0])
    assert len(tracker) == 0
    assert tracker.add_messages([], [], []) == 0
