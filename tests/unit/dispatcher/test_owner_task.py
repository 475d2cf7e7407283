"""Tests of the tasks of many owners on a few threads: none waits for another one's broker."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from delaylevel.cluster.scheduler import Scheduler
from delaylevel.dispatcher.host import WAKE, EventQueue, PriorityLock
from delaylevel.dispatcher.owner import OwnerTask
from delaylevel.errors import BrokerError
from delaylevel.model.clock import SystemClock
from support.world import eventually

TIMEOUT_S = 30


class Reading:
    """A fetcher without messages."""

    topic = "window"
    waits_for_broker = False

    def __init__(self) -> None:
        self.is_closed = False

    def open(self) -> None:
        """Open nothing."""

    def fetch(self) -> float:
        return float("inf")

    def close(self) -> None:
        self.is_closed = True


class Owner:
    """An owner with at most one message, which stops at a given call until it is let go.

    Attributes:
        released_ms: time of the release, ms since the epoch.
        calls: names of the steps that were taken, without repetitions.
        looked_ms: times of the looks at everything, ms since the epoch.
    """

    partition = 0
    next_checkpoint_s = float("inf")
    is_settled = releases_soon = is_calm = False
    caught_up = True
    next_look_s: float | None = None
    next_send_ms: int | None = None
    patience_s, look_every_s = 0.25, 0.01

    def __init__(self, hangs_at: str = "", go_on: threading.Event | None = None) -> None:
        self.topic = "window"
        self.events = EventQueue()
        self.stats: Any = None
        self.in_flight = 0
        self.next_step_ms: int | None = None
        self.released_ms: int | None = None
        self.calls: list[str] = []
        self.looked_ms: list[int] = []
        self.reading = Reading()
        self.arrived = threading.Event()
        self.hanging = threading.Event()
        self._hangs_at = hangs_at
        self._go_on = go_on or threading.Event()

    def _call(self, name: str) -> None:
        if name not in self.calls[-1:]:
            self.calls.append(name)
        if name == self._hangs_at:
            self.hanging.set()
            assert self._go_on.wait(TIMEOUT_S)

    def take_over(self, opened: Any) -> Reading:
        self._call("take_over")
        opened.callback(self._call, "close queue")
        return self.reading

    def send_later(self, due_ms: int) -> None:
        self.next_step_ms = due_ms
        self.events.wake()

    def take_in(self) -> None:
        while self.events:
            self.events.get_nowait()
        self.looked_ms.append(SystemClock().now_ms())
        self._call("take_in")
        self.arrived.set()

    def release(self) -> float:
        due_ms = self.next_step_ms
        if due_ms is not None and SystemClock().now_ms() >= due_ms:
            self.next_step_ms = None
            self.released_ms = SystemClock().now_ms()
        return 0.0

    def tidy_up(self) -> None:
        self._call("tidy_up")

    def drain(self) -> None:
        self._call("drain")
        self.in_flight = max(self.in_flight - 1, 0)

    def finish(self) -> None:
        self._call("finish")

    def close(self) -> None:
        self._call("close")


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    scheduler = Scheduler()
    yield scheduler
    scheduler.close()


def started(owner: Owner, scheduler: Scheduler) -> OwnerTask:
    task = OwnerTask(owner, SystemClock(), scheduler)  # type: ignore[arg-type]
    task.start()
    return task


def released(owner: Owner) -> None:
    """Let a message be due now, and wait until it is released."""
    owner.released_ms = None
    owner.send_later(SystemClock().now_ms())
    eventually(lambda: owner.released_ms is not None, "the owner")


@pytest.mark.parametrize("call", ["take_over", "take_in", "tidy_up"])
def test_partitions_whose_broker_does_not_answer_stop_no_release(
    call: str, scheduler: Scheduler
) -> None:
    healthy = Owner()
    tasks = [started(healthy, scheduler)]
    assert healthy.arrived.wait(TIMEOUT_S)
    go_on = threading.Event()
    hanging = [Owner(call, go_on) for _ in range(40)]  # several times as many as threads
    tasks += [started(owner, scheduler) for owner in hanging]
    late = Owner()  # it takes over while all the others hang
    tasks.append(started(late, scheduler))
    for owner in hanging:
        assert owner.hanging.wait(TIMEOUT_S)
    assert late.arrived.wait(TIMEOUT_S)
    for owner in (healthy, late) * 2:
        released(owner)
    assert not any(owner.calls[-1] != call for owner in hanging)
    go_on.set()
    for task in tasks:
        task.stop()
    for task in tasks:
        task.ended.wait()
        assert task.failure is None


def test_a_partition_is_finished_before_it_is_closed(scheduler: Scheduler) -> None:
    owner = Owner()
    owner.in_flight = 3
    task = started(owner, scheduler)
    assert owner.arrived.wait(TIMEOUT_S)
    assert not task.ended.is_set()
    task.stop()
    task.ended.wait()
    assert task.ended.is_set()
    assert owner.calls[-4:] == ["drain", "finish", "close queue", "close"]
    assert owner.in_flight == 0
    assert owner.reading.is_closed


def test_a_partition_that_fails_is_closed_but_not_finished(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Owner()

    def fail() -> float:
        raise BrokerError("fenced")

    monkeypatch.setattr(owner, "release", fail)
    task = started(owner, scheduler)
    task.ended.wait()
    assert str(task.failure) == "fenced"
    assert owner.calls == ["take_over", "take_in", "close queue", "close"]
    assert owner.reading.is_closed


def test_a_partition_at_rest_sees_that_the_clock_was_corrected(scheduler: Scheduler) -> None:
    owner = Owner()
    owner.next_step_ms = SystemClock().now_ms() + 3_600_000
    owner.is_settled = True
    task = started(owner, scheduler)
    assert owner.arrived.wait(TIMEOUT_S)
    owner.next_step_ms = SystemClock().now_ms()
    eventually(lambda: owner.released_ms is not None, "the owner")
    task.stop()
    task.ended.wait()


def test_a_calm_partition_looks_at_everything_when_the_next_message_is_due(
    scheduler: Scheduler,
) -> None:
    owner = Owner()
    owner.is_settled = owner.is_calm = True
    owner.next_send_ms = SystemClock().now_ms() + 600
    owner.next_look_s = time.monotonic() + 0.54
    task = started(owner, scheduler)
    eventually(lambda: len(owner.looked_ms) > 1, "the owner")
    assert owner.looked_ms[1] >= owner.next_send_ms
    task.stop()
    task.ended.wait()


@pytest.mark.parametrize(
    ("patience_s", "wakes"),
    [(0.02, True), (90, False), (0.0, True)],  # less than the wait, more, and none at all
)
def test_an_answer_of_a_target_wakes_an_owner_that_would_not_look_soon(
    patience_s: float, wakes: bool
) -> None:
    events, calls = EventQueue(), list[int]()
    events.on_event = lambda: calls.append(1)
    until_s = time.monotonic() + 60
    assert events.rest(until_s, patience_s) == until_s
    events.answered()
    assert (len(calls), events.get_nowait()) == ((1, WAKE) if wakes else (0, None))
    assert events.rest(until_s, 0.02) < until_s, "it was not processed"
    events.stir()
    events.take_answered()
    events.answered()  # while the owner works
    assert len(calls) == wakes
    assert events.rest(until_s, 0.02) < until_s - 30
    events.take_answered()
    assert events.rest(until_s, 0.02) == until_s


def test_waiting_threads_work_in_the_order_of_their_ranks_also_while_one_writes() -> None:
    lock, order, threads = PriorityLock(), list[int](), list[threading.Thread]()

    def work(rank: int) -> None:
        with lock.hold(rank):
            order.append(rank)

    with lock.hold(9):
        for rank in (3, 1, 2, 1):
            threads.append(threading.Thread(target=work, args=(rank,)))
            threads[-1].start()
            eventually(lambda: len(lock._waiting) == len(threads), "the thread")
        assert order == []
        with lock.pause():
            for thread in threads:
                thread.join(60)
        order.append(9)
    with pytest.raises(ValueError, match="failed"), lock.hold(9):
        raise ValueError("failed")
    work(5)  # it is free again
    assert order == [1, 1, 2, 3, 9, 5]
