"""Tests of cancellations of what an earlier owner may have sent, and of messages that are late."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest

from delaylevel.dispatcher.cancellations import UNCLEAR_MS, RecentReleases
from delaylevel.dispatcher.delay_queue import DelayQueue
from delaylevel.dispatcher.journal.records import Record, encode
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.dispatcher.record import Cancellation, FetchedBatch, WindowMessage, identity
from delaylevel.structures.id_columns import IdColumns
from delaylevel.structures.segments.pending import PendingSegments
from delaylevel.testing import ManualClock

TARGET = "persistent://public/default/orders"
GRACE_MS = 2_000


class Owner:
    """A delay queue from the records of a journal, to which it appends."""

    _entries = count(1)

    def __init__(self, directory: Path, clock: ManualClock, journal: Sequence[bytes] = ()) -> None:
        self.clock, self.journal = clock, [*journal]
        self.queue = DelayQueue(
            JournalState.read(journal, 10_000),
            PendingSegments(directory, budget_bytes=1 << 20, clock=clock.now_ms),
            clock=clock,
            grace_ms=GRACE_MS,
            unclear_until_ms=clock.now_ms() + UNCLEAR_MS,
        )

    def append(self, *records: Record | None) -> None:
        self.journal += [encode(record) for record in records if record is not None]

    def read(self, name: str, due_ms: int, *, cancels: bool = False) -> None:
        key, number = identity(name, TARGET, "")
        message = WindowMessage(key, number, due_ms, TARGET, "", 0, name, "", "", 0, {}, b"x")
        cancellation = Cancellation(key, number, due_ms, TARGET, name, "")
        record = cancellation if cancels else tuple(message)
        entry = next(self._entries) << 10
        self.queue.offer(FetchedBatch([3], [entry], [due_ms], [record], cancellations=int(cancels)))

    def decide(self) -> dict[str, str]:
        """Return the outcomes so far, by ID."""
        records, decisions = self.queue.cancelling.decide()
        self.append(*records)
        return {each.outcome.id: each.outcome.status for each in decisions if each.outcome}

    def launch(self) -> int:
        batch = self.queue.advance(self.clock.now_ms())
        assert batch is not None
        self.queue.launch(batch)
        return batch.number


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_700_000_000_000)


@pytest.mark.parametrize("due_in_ms", [-3_600_000, 0, 5_000, 5_001, 3_600_000])
def test_what_was_due_at_a_takeover_is_not_cancelled_before_its_release(
    due_in_ms: int, tmp_path: Path, clock: ManualClock
) -> None:
    # Without sequence IDs, the journal tells nothing of what an earlier owner has sent just now.
    owner, due_ms = Owner(tmp_path, clock), clock.now_ms() + due_in_ms
    owner.read("m", due_ms)
    owner.read("m", due_ms, cancels=True)
    if due_in_ms > 5_000:
        assert owner.decide() == {"m": "cancelled"}
        return
    assert owner.decide() == {}
    clock.move_to(max(due_ms, clock.now_ms()))
    number = owner.launch()
    assert owner.decide() == {}
    owner.append(owner.queue.commit(number))
    assert owner.decide() == {"m": "too late"}


def test_what_waits_for_the_end_of_a_pause_is_cancelled_after_a_takeover(
    tmp_path: Path, clock: ManualClock
) -> None:
    before_ms = clock.now_ms()
    owner = Owner(tmp_path / "first", clock)
    owner.read("sent before", before_ms)
    owner.append(owner.queue.commit(owner.launch()))
    clock.advance(timedelta(seconds=10))
    paused_ms = clock.now_ms()
    owner.append(owner.queue.pause(TARGET))
    clock.advance(timedelta(hours=1))

    def cancel(owner: Owner) -> dict[str, str]:
        dues = {"waits": paused_ms, "waits, too": paused_ms + 60_000, "as the first": before_ms}
        for cancels in (False, True):
            for name, due_ms in dues.items():
                owner.read(name, due_ms, cancels=cancels)
        return owner.decide()

    paused = list(owner.journal)
    assert set(cancel(Owner(tmp_path / "second", clock, paused))) == {"waits", "waits, too"}
    # After the pause, one message is sent to the target. Now all may have been.
    third = Owner(tmp_path / "third", clock, paused)
    third.append(third.queue.resume([TARGET]))
    assert third.queue.resume([TARGET]) is None
    assert cancel(Owner(tmp_path / "fourth", clock, third.journal)) == {}


def test_a_cancellation_of_another_due_time_does_not_end_the_wait_of_a_later_one(
    tmp_path: Path, clock: ManualClock
) -> None:
    owner, now_ms = Owner(tmp_path, clock), clock.now_ms()
    for due_ms in (now_ms, now_ms + 60_000):  # the first one is wrong
        owner.read("late", due_ms, cancels=True)
    assert owner.decide() == {}
    clock.advance(timedelta(milliseconds=GRACE_MS))
    assert owner.queue.advance(clock.now_ms()) is None
    assert owner.decide() == {}
    owner.queue.cancelling.everything_is_read(clock.now_ms())
    assert owner.decide() == {"late": "unknown"}
    owner.read("late", now_ms + 60_000)
    assert owner.decide() == {"late": "cancelled"}


def test_the_last_release_of_each_of_the_last_messages_is_known() -> None:
    times = RecentReleases(most=2_500)
    for at_ms in range(6_000):
        times.add(IdColumns.of([(f"k{at_ms % 3}", at_ms), ("again", 1)]), at_ms)
    last = [(f"k{number % 3}", number) for number in range(6_000)]
    known = {number: at_ms for (_, number), at_ms in times.times_of(last).items()}
    assert known == {number: number for number in range(min(known), 6_000)}
    assert 1_250 <= len(known) <= 1_250 + 1_000
    assert times.times_of([("again", 1), ("k0", 1)]) == {("again", 1): 5_999}
