"""Tests of what the model of the tracker does not say; the clock is a list of one number."""

from __future__ import annotations

import numpy as np
import pytest

from delaylevel.errors import InvalidInputError
from delaylevel.structures.tracker import TimeBucketTracker

T0 = 1_700_000_000_000


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
