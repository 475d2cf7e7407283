"""Tests of cancellations of what an earlier owner may have sent, or may still send."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from delaylevel.dispatcher.cancellations import UNCLEAR_MS
from delaylevel.dispatcher.delay_queue import DelayQueue
from delaylevel.dispatcher.journal.records import Record, encode
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.dispatcher.record import Cancellation, FetchedBatch, WindowMessage, identity
from delaylevel.model.outcome import Outcome
from delaylevel.structures.segments.pending import PendingSegments
from delaylevel.testing import ManualClock

T0 = 1_700_000_000_000
TARGET = "persistent://public/default/orders"
GRACE_MS = 2_000


class Owner:
    """A delay queue from the records of a journal, and what it appends to them."""

    def __init__(
        self, directory: Path, journal: list[bytes], clock: ManualClock, *, takes_over: bool = False
    ) -> None:
        self.journal = journal
        segments = PendingSegments(directory, budget_bytes=1 << 20, clock=clock.now_ms)
        state = JournalState.read(journal, 10_000)
        self.queue = DelayQueue(
            state,
            segments,
            clock=clock,
            grace_ms=GRACE_MS,
            unclear_until_ms=clock.now_ms() + UNCLEAR_MS if takes_over else 0,
        )

    def append(self, *records: Record | None) -> None:
        self.journal += [encode(record) for record in records if record is not None]

    def read(self, entry: int, name: str, due_ms: int, *, cancels: bool = False) -> None:
        key, number = identity(name, TARGET, "")
        record: tuple[object, ...] = Cancellation(key, number, due_ms, TARGET, name, "")
        if not cancels:
            message = WindowMessage(key, number, due_ms, TARGET, "", 0, name, "", "", 0, {}, b"x")
            record = tuple(message)
        self.queue.offer(
            FetchedBatch([3], [entry << 10], [due_ms], [record], cancellations=int(cancels))
        )

    def decide(self) -> list[Outcome]:
        records, decisions = self.queue.cancelling.decide()
        self.append(*records)
        return [each.outcome for each in decisions if each.outcome is not None]

    def launch(self, until_ms: int, first: int = 0) -> int:
        """Launch what is due; with sequence IDs from ``first`` on, if it is not 0."""
        batch = self.queue.advance(until_ms)
        assert batch is not None
        if first:
            self.append(self.queue.intent(batch, "orders", first))
        else:
            self.queue.launch(batch)
        return batch.number

    def resolve(self, number: int, stored: list[bool]) -> None:
        self.append(*self.queue.resolve(number, stored))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(T0)


def test_what_a_suspended_owner_may_still_send_is_not_cancelled(
    tmp_path: Path, clock: ManualClock
) -> None:
    # The client of a suspended process keeps its messages. It sends them as soon as nobody else
    # uses the name of its producer, and the broker takes them if no higher sequence ID came.
    first = Owner(tmp_path / "first", [], clock)
    clock.advance(timedelta(minutes=1))
    due_ms = clock.now_ms()
    first.read(1, "stored", due_ms)
    first.read(2, "kept by the client", due_ms)
    number = first.launch(due_ms, first=1)
    second = Owner(tmp_path / "second", first.journal, clock, takes_over=True)
    second.resolve(number, [True, False])
    second.read(2, "kept by the client", due_ms)
    second.read(3, "kept by the client", due_ms, cancels=True)
    second.read(4, "stored", due_ms, cancels=True)
    (late,) = second.decide()
    assert late.status == "too late"
    assert late.released_ms is None, "it may have been released long before the takeover"
    third = Owner(tmp_path / "third", second.journal, clock, takes_over=True)
    for intent in third.queue.unresolved.intents:
        third.queue.reopen(intent.number)
    third.read(2, "kept by the client", due_ms)
    third.read(3, "kept by the client", due_ms, cancels=True)
    assert third.decide() == []
    again = third.launch(due_ms, first=3)
    assert again > number + 1
    third.append(third.queue.commit(again))
    assert [each.status for each in third.decide()] == ["too late"]
    third.append(*third.queue.unresolved.close_reopened())
    assert not third.queue.state.open_intents


@pytest.mark.parametrize("due_in_s", [-3_600, 0, 4.999, 5.001, 3_600])
def test_what_was_due_at_a_takeover_is_not_cancelled_before_its_release(
    due_in_s: float, tmp_path: Path, clock: ManualClock
) -> None:
    # Without sequence IDs, the journal tells nothing of what an earlier owner has sent just now.
    owner = Owner(tmp_path / "next", [], clock, takes_over=True)
    due_ms = clock.now_ms() + int(due_in_s * 1000)
    owner.read(1, "m", due_ms)
    owner.read(2, "m", due_ms, cancels=True)
    if due_in_s > 5:
        assert [each.status for each in owner.decide()] == ["cancelled"]
        return
    assert owner.decide() == []
    clock.move_to(max(due_ms, clock.now_ms()))
    number = owner.launch(clock.now_ms())
    assert owner.decide() == []
    owner.append(owner.queue.commit(number))
    assert [each.status for each in owner.decide()] == ["too late"]


def test_what_waits_for_the_end_of_a_pause_is_cancelled_after_a_takeover(
    tmp_path: Path, clock: ManualClock
) -> None:
    owner = Owner(tmp_path / "first", [], clock)
    before_ms = clock.now_ms()
    owner.read(1, "sent before", before_ms)
    owner.append(owner.queue.commit(owner.launch(before_ms)))
    clock.advance(timedelta(seconds=10))
    paused_ms = clock.now_ms()
    owner.read(2, "waits", paused_ms)
    owner.append(owner.queue.pause(TARGET))
    clock.advance(timedelta(hours=1))

    def cancel(owner: Owner) -> dict[str, str]:
        for entry, (name, due_ms) in enumerate(dues.items(), 2):
            owner.read(entry, name, due_ms)
        for entry, (name, due_ms) in enumerate(dues.items(), 10):
            owner.read(entry, name, due_ms, cancels=True)
        return {each.id: each.status for each in owner.decide()}

    dues = {"waits": paused_ms, "waits, too": paused_ms + 60_000, "of the same time": before_ms}
    second = Owner(tmp_path / "second", list(owner.journal), clock, takes_over=True)
    assert cancel(second) == {"waits": "cancelled", "waits, too": "cancelled"}
    # After the pause, one message is sent to the target. Now all may have been.
    third = Owner(tmp_path / "third", owner.journal, clock, takes_over=True)
    third.append(third.queue.resume([TARGET]))
    assert third.queue.resume([TARGET]) is None
    assert cancel(Owner(tmp_path / "fourth", third.journal, clock, takes_over=True)) == {}


def test_a_cancellation_of_another_due_time_does_not_end_the_wait_of_a_later_one(
    tmp_path: Path, clock: ManualClock
) -> None:
    owner = Owner(tmp_path / "first", [], clock)
    now_ms = clock.now_ms()
    owner.read(1, "late", now_ms, cancels=True)  # a wrong due time
    owner.read(2, "late", now_ms + 60_000, cancels=True)
    assert owner.decide() == []
    clock.advance(timedelta(milliseconds=GRACE_MS))
    assert owner.queue.advance(clock.now_ms()) is None
    assert owner.decide() == []
    owner.queue.cancelling.everything_is_read(clock.now_ms())
    assert [each.status for each in owner.decide()] == ["unknown"]
    owner.read(3, "late", now_ms + 60_000)
    assert [each.status for each in owner.decide()] == ["cancelled"]
