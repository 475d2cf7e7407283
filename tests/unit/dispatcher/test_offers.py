"""Tests of the batches that wait for the delay queue while its disk is full."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.dispatcher.delay_queue import Accepted, DelayQueue, OfferQueue
from delaylevel.dispatcher.fetcher import BATCHES_AHEAD
from delaylevel.dispatcher.journal.records import pack, unpack
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.dispatcher.record import FetchedBatch, OfferResult
from delaylevel.structures.segments.pending import (
    PendingSegments,
    SpillFullError,
    SpillWriteError,
)
from delaylevel.testing import ManualClock
from support.fakes import SmallDisk

T0 = 1_700_000_000_000
NOTHING = Accepted(0, 0, 0)


def messages(first: int, count: int, size: int = 0, within_ms: int = 1) -> FetchedBatch:
    """Return messages in entries from ``first`` on, due in some order within a time."""
    entries = range(first, first + count)
    return FetchedBatch(
        [7] * count,
        [entry << 10 for entry in entries],
        [T0 + entry * 7919 % within_ms for entry in entries],
        [("a", entry, bytes(size)) for entry in entries],
    )


def position(entry: int) -> int:
    return pack(7, entry << 10)


class Limited:
    """A fake delay queue with room for a number of messages.

    Attributes:
        room: number of messages that it can take now.
        entries: entries that it has accepted, in order.
        attempts: sizes of all batches that were offered.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.entries: list[int] = []
        self.attempts: list[int] = []
        self.error: SpillWriteError = SpillFullError("full", reason="full")

    @property
    def pending(self) -> Any:
        return SimpleNamespace(segments=SimpleNamespace(memory_bytes=-self.room))

    def offer(self, batch: FetchedBatch) -> OfferResult:
        self.attempts.append(len(batch))
        if len(batch) > self.room:
            raise self.error
        self.room -= len(batch)
        self.entries += [entry >> 10 for entry in batch.entry_ids]
        return OfferResult(len(batch), 0, 0)


class Fixture:
    """An offer queue in front of a fake delay queue, with a clock."""

    def __init__(self, room: int) -> None:
        self.now_s = 100.0
        self.queue = Limited(room)
        queue: Any = self.queue
        self.offers = OfferQueue(queue, "a window", monotonic=lambda: self.now_s)

    def retry(self, after_s: float) -> Accepted:
        self.now_s += after_s
        return self.offers.retry()


def test_batches_that_fit_do_not_wait() -> None:
    fix = Fixture(room=100)
    assert fix.offers.offer(messages(0, 50)) == Accepted(1, 50, 0)
    assert fix.offers.offer(messages(50, 50)) == Accepted(1, 50, 0)
    assert fix.queue.attempts == [50, 50]
    assert len(fix.offers) == 0
    assert (fix.offers.refusal, fix.offers.retry_s, fix.offers.state) == (None, None, "releasing")


def test_later_batches_wait_behind_a_refused_one() -> None:
    fix = Fixture(room=0)
    assert fix.offers.offer(messages(0, 10)) == NOTHING
    assert fix.offers.state == "disk full"
    tried = len(fix.queue.attempts)
    fix.queue.room = 5
    assert fix.offers.offer(messages(10, 2)) == NOTHING
    assert len(fix.queue.attempts) == tried
    assert fix.queue.entries == []
    assert len(fix.offers) == 2
    assert fix.retry(2) == Accepted(0, 5, 0)
    assert fix.offers.state == "disk full"
    fix.queue.room = 50
    assert fix.retry(2) == Accepted(2, 7, 0)
    assert fix.queue.entries == list(range(12))
    assert fix.offers.state == "releasing"
    assert len(fix.offers) == 0


def test_attempts_have_a_bounded_rate() -> None:
    fix = Fixture(room=0)
    fix.offers.offer(messages(0, 1000))
    tried = len(fix.queue.attempts)
    for _ in range(1000):
        fix.retry(0.01)
    assert len(fix.queue.attempts) - tried == pytest.approx(10, abs=1)  # the disk may have space
    tried = len(fix.queue.attempts)
    fix.queue.room = 1
    assert fix.offers.retry_s is not None
    assert fix.offers.retry_s - fix.now_s <= 0.05
    assert fix.retry(0.05) == Accepted(0, 1, 0)  # memory became free
    accepted = 1
    for _ in range(100):
        fix.queue.room += 1
        accepted += fix.retry(0.01).tracked
    assert accepted == pytest.approx(100, abs=10)
    assert len(fix.queue.attempts) - tried < 200


def test_a_large_batch_is_accepted_in_few_pieces() -> None:
    fix = Fixture(room=0)
    fix.offers.offer(messages(0, 1000))
    fix.queue.room = 700
    fix.queue.attempts.clear()
    assert fix.retry(1) == Accepted(0, 700, 0)
    assert len(fix.queue.attempts) < 25
    assert fix.queue.entries == list(range(700))


def test_the_state_names_the_kind_of_error() -> None:
    fix = Fixture(room=0)
    fix.queue.error = SpillWriteError("broken", reason="Input/output error")
    fix.offers.offer(messages(0, 10))
    assert fix.offers.state == "disk error"
    fix.queue.error = SpillFullError("full", reason="No space left on device")
    fix.retry(1)
    assert fix.offers.state == "disk full"


def test_the_same_trouble_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    fix = Fixture(room=0)
    for first in range(600):
        fix.offers.offer(messages(first, 1))
        fix.queue.room = 1
        fix.retry(0.1)
        fix.queue.room = 0
    assert 1 <= len(caplog.records) <= 2
    assert "a window: reading pauses: full" in caplog.text
    fix.queue.error = SpillWriteError("broken", reason="Input/output error")
    fix.offers.offer(messages(1000, 1))
    assert "broken" in caplog.records[-1].message


@given(
    sizes=st.lists(st.integers(1, 40), max_size=12),
    rooms=st.lists(st.integers(0, 60), max_size=40),
)
def test_messages_are_accepted_once_and_in_order(sizes: list[int], rooms: list[int]) -> None:
    fix = Fixture(room=20)
    total = completed = tracked = 0
    steps = deque(rooms)
    for size in [*sizes, None]:
        if size is not None:
            accepted = fix.offers.offer(messages(total, size))
            completed, tracked = completed + accepted.batches, tracked + accepted.tracked
            total += size
        for _ in range(3):
            fix.queue.room += steps.popleft() if steps else 0
            accepted = fix.retry(1)
            completed, tracked = completed + accepted.batches, tracked + accepted.tracked
        assert fix.queue.entries == list(range(tracked))
        assert completed + len(fix.offers) <= len(sizes)
        assert bool(fix.offers) == (fix.offers.refusal is not None) == (tracked < total)
    fix.queue.room = 1000
    fix.retry(1)
    assert fix.queue.entries == list(range(total))
    assert len(fix.offers) == 0


@pytest.mark.parametrize("free", [0, 2_000_000])
def test_a_full_disk_loses_nothing(tmp_path: Path, free: int) -> None:
    """Release 12,000 messages of 1 KB with 1 MiB of memory and a small disk.

    The fetcher is the model of one: it reads ahead a few batches and waits for its credit.
    """
    total, size = 12_000, 1_000
    clock = ManualClock(T0)
    segments = PendingSegments(
        tmp_path,
        precision_ms=1,
        budget_bytes=1 << 20,
        bucket_ms=4096,
        clock=clock.now_ms,
        opener=SmallDisk(free),
    )
    queue = DelayQueue(JournalState(100_000), segments, clock=clock)
    offers = OfferQueue(queue, "a window", monotonic=lambda: clock.now_ms() / 1000)
    batches = deque(
        messages(first, size, 1_000, within_ms=12_000) for first in range(0, total, size)
    )
    ahead = tracked = most = 0
    released: list[int] = []
    states = set()
    for _ in range(2000):
        accepted = offers.retry()
        while batches and ahead < BATCHES_AHEAD:
            ahead += 1
            tracked += accepted.tracked
            ahead -= accepted.batches
            accepted = offers.offer(batches.popleft())
        tracked += accepted.tracked
        ahead -= accepted.batches
        assert len(offers) == ahead
        states.add(offers.state)
        most = max(most, segments.memory_bytes)
        assert queue.low_watermark() <= position(tracked)
        clock.advance(timedelta(milliseconds=20))
        while (batch := queue.advance(clock.now_ms())) is not None:
            queue.intent(batch)
            queue.commit(batch.number)
            released += (unpack(batch.positions)[1] >> 10).tolist()
    assert sorted(released) == list(range(total))
    assert queue.low_watermark() == position(total - 1) + 1
    assert states == {"disk full", "releasing"}
    # Nothing is known about the disk before the first write: one batch may exceed the budget.
    assert most <= segments.budget_bytes + size * 1_200


def test_messages_that_wait_are_not_below_the_low_watermark(tmp_path: Path) -> None:
    clock = ManualClock(T0)
    segments = PendingSegments(
        tmp_path, precision_ms=1, budget_bytes=1 << 20, clock=clock.now_ms, opener=SmallDisk(0)
    )
    queue = DelayQueue(JournalState(100_000), segments, clock=clock)
    offers = OfferQueue(queue, "a window", monotonic=lambda: clock.now_ms() / 1000)
    assert offers.offer(messages(0, 300, 1_000)) == Accepted(1, 300, 0)
    accepted = offers.offer(messages(300, 2000, 1_000))
    assert accepted.batches == 0
    first = 300 + accepted.tracked
    assert 500 < first < 1000
    offers.offer(messages(2300, 10))
    while (batch := queue.advance(clock.now_ms())) is not None:
        queue.intent(batch)
        queue.commit(batch.number)
    # All that was accepted is released; the rest is not, although the fetcher has read its end.
    assert queue.low_watermark() == position(first - 1) + 1
