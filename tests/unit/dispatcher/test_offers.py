"""Tests of the batches that wait for the delay queue while its disk is full."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from pathlib import Path

import pytest

from delaylevel.dispatcher.delay_queue import DelayQueue, OfferQueue
from delaylevel.dispatcher.fetcher import BATCHES_AHEAD
from delaylevel.dispatcher.journal.records import pack, unpack
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.dispatcher.record import FetchedBatch
from delaylevel.structures.segments.pending import (
    PendingSegments,
)
from delaylevel.testing import ManualClock
from support.fakes import SmallDisk

T0 = 1_700_000_000_000


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


@pytest.mark.parametrize("free", [0, 2_000_000])
def test_a_full_disk_loses_nothing(tmp_path: Path, free: int) -> None:
    """Release 12,000 messages of 1 KB with 1 MiB of memory and a small disk.

    The fetcher is the model of one: it reads ahead a few batches and waits for its credit.
    """
    total, size = 12_000, 1_000
    clock = ManualClock(T0)
    segments = PendingSegments(
        tmp_path,
        budget_bytes=1 << 20,
        bucket_ms=4096,
        clock=clock.now_ms,
        opener=SmallDisk(free),
    )
    queue = DelayQueue(JournalState(100_000), segments, clock=clock)
    taken: list[None] = []  # an item for each batch
    offers = OfferQueue(
        queue, "a window", lambda: taken.append(None), lambda: clock.now_ms() / 1000
    )
    batches = deque(
        messages(first, size, 1_000, within_ms=12_000) for first in range(0, total, size)
    )
    read = tracked = most = 0
    released: list[int] = []
    states = set()
    for _ in range(2000):
        tracked += offers.offer().tracked
        while batches and read - len(taken) < BATCHES_AHEAD:
            read += 1
            tracked += offers.offer(batches.popleft()).tracked
        assert len(offers) == read - len(taken)
        states.add(offers.state)
        most = max(most, segments.memory_bytes)
        assert queue.low_watermark() <= position(tracked)
        clock.advance(timedelta(milliseconds=20))
        while (batch := queue.advance(clock.now_ms())) is not None:
            queue.launch(batch)
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
        tmp_path, budget_bytes=1 << 20, clock=clock.now_ms, opener=SmallDisk(0)
    )
    queue = DelayQueue(JournalState(100_000), segments, clock=clock)
    taken: list[None] = []
    offers = OfferQueue(
        queue, "a window", lambda: taken.append(None), lambda: clock.now_ms() / 1000
    )
    assert offers.offer(messages(0, 300, 1_000)).tracked == 300
    first = 300 + offers.offer(messages(300, 2000, 1_000)).tracked
    assert len(taken) == 1
    assert 500 < first < 1000
    offers.offer(messages(2300, 10))
    while (batch := queue.advance(clock.now_ms())) is not None:
        queue.launch(batch)
        queue.commit(batch.number)
    # All that was accepted is released; the rest is not, although the fetcher has read its end.
    assert queue.low_watermark() == position(first - 1) + 1
