"""Tests of the tasks of many owners on a few threads: none waits for another one's broker."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest

from delaylevel.cluster.events import WAKE, EventQueue, PriorityLock
from delaylevel.cluster.scheduler import Scheduler
from delaylevel.dispatcher.owner import OwnerTask
from delaylevel.errors import BrokerError
from delaylevel.model.clock import SystemClock
from support.world import eventually

TIMEOUT_S = 30


def now_ms() -> int:
    return SystemClock().now_ms()


def an_owner(**state: Any) -> Mock:
    """Return an owner that notes its calls; it has at most one message, due at `next_step_ms`."""
    owner = Mock(events=EventQueue(), in_flight=0, patience_s=0.25, look_every_s=0.01)
    owner.configure_mock(is_settled=False, releases_soon=False, is_calm=False)
    owner.configure_mock(next_look_s=None, next_step_ms=None, next_send_ms=None)
    owner.configure_mock(next_checkpoint_s=math.inf, **state)
    owner.take_over.return_value = Mock(waits_for_broker=False)
    owner.take_over.return_value.fetch.return_value = math.inf

    def take_over(opened: ExitStack) -> Any:
        opened.callback(owner.close_queue)
        return DEFAULT

    def take_in() -> None:
        while owner.events:
            owner.events.get_nowait()

    def release() -> float:
        if owner.next_step_ms is not None and now_ms() >= owner.next_step_ms:
            owner.next_step_ms = None
        return 0.0

    def drain() -> None:
        owner.in_flight = max(owner.in_flight - 1, 0)

    for each in (take_over, take_in, release, drain):
        getattr(owner, each.__name__).side_effect = each
    return owner


def calls(owner: Mock) -> list[str]:
    """Return the steps that were taken."""
    return [name for name, *_ in owner.method_calls]


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    scheduler = Scheduler()
    yield scheduler
    scheduler.close()


def started(owner: Mock, scheduler: Scheduler) -> OwnerTask:
    task = OwnerTask(owner, SystemClock(), scheduler)
    task.wake()
    return task


def at_work(owner: Mock, call: str = "take_in") -> None:
    """Wait until an owner has begun a step."""
    eventually(lambda: getattr(owner, call).called, "the owner")


def end(task: OwnerTask) -> None:
    task.stop()
    task.ended.wait()


@pytest.mark.parametrize("call", ["take_over", "take_in", "tidy_up"])
def test_partitions_whose_broker_does_not_answer_stop_no_release(
    call: str, scheduler: Scheduler
) -> None:
    healthy = an_owner()
    tasks = [started(healthy, scheduler)]
    at_work(healthy)
    go_on = threading.Event()
    hanging = [an_owner() for _ in range(40)]  # several times as many as threads
    for owner in hanging:
        getattr(owner, call).side_effect = lambda *_: go_on.wait(TIMEOUT_S) and DEFAULT
        tasks.append(started(owner, scheduler))
    late = an_owner()  # it takes over while all the others hang
    tasks.append(started(late, scheduler))
    for owner in hanging:
        at_work(owner, call)
    at_work(late)
    for owner in (healthy, late) * 2:
        owner.next_step_ms = now_ms()
        owner.events.wake()
        eventually(lambda owner=owner: owner.next_step_ms is None, "the release")
    assert not any(calls(owner)[-1] != call for owner in hanging)
    go_on.set()
    for task in tasks:
        task.stop()
    for task in tasks:
        task.ended.wait()
        assert task.failure is None


def test_a_partition_is_finished_before_it_is_closed(scheduler: Scheduler) -> None:
    owner = an_owner(in_flight=3)
    task = started(owner, scheduler)
    at_work(owner)
    assert not task.ended.is_set()
    end(task)
    assert calls(owner)[-4:] == ["drain", "finish", "close_queue", "close"]
    assert owner.in_flight == 0
    owner.take_over.return_value.close.assert_called_once()


def test_a_partition_that_fails_is_closed_but_not_finished(scheduler: Scheduler) -> None:
    owner = an_owner()
    owner.release.side_effect = BrokerError("fenced")
    task = started(owner, scheduler)
    task.ended.wait()
    assert str(task.failure) == "fenced"
    assert calls(owner) == ["take_over", "take_in", "release", "close_queue", "close"]
    owner.take_over.return_value.close.assert_called_once()


def test_a_partition_at_rest_sees_that_the_clock_was_corrected(scheduler: Scheduler) -> None:
    owner = an_owner(next_step_ms=now_ms() + 3_600_000, is_settled=True)
    task = started(owner, scheduler)
    at_work(owner)
    owner.next_step_ms = now_ms()
    eventually(lambda: owner.next_step_ms is None, "the release")
    end(task)


def test_a_calm_partition_looks_at_everything_when_the_next_message_is_due(
    scheduler: Scheduler,
) -> None:
    looks, due_ms = list[int](), now_ms() + 600
    owner = an_owner(is_settled=True, is_calm=True, next_send_ms=due_ms)
    owner.next_look_s = time.monotonic() + 0.54
    owner.take_in.side_effect = lambda: looks.append(now_ms())
    task = started(owner, scheduler)
    eventually(lambda: len(looks) > 1, "the owner")
    assert looks[1] >= due_ms
    end(task)


@pytest.mark.parametrize(
    ("patience_s", "wakes"),
    [(0.02, True), (90, False), (0.0, True)],  # less than the wait, more, and none at all
)
def test_an_answer_of_a_target_wakes_an_owner_that_would_not_look_soon(
    patience_s: float, wakes: bool
) -> None:
    events, woken = EventQueue(), list[int]()
    events.on_event = lambda: woken.append(1)
    until_s = time.monotonic() + 60
    assert events.rest(until_s, patience_s) == until_s
    events.answered()
    assert (len(woken), events.get_nowait()) == ((1, WAKE) if wakes else (0, None))
    assert events.rest(until_s, 0.02) < until_s, "it was not processed"
    events.stir()
    events.take_answered()
    events.answered()  # while the owner works
    assert len(woken) == wakes
    assert events.rest(until_s, 0.02) < until_s - 30
    events.take_answered()
    assert events.rest(until_s, 0.02) == until_s


def test_waiting_threads_work_in_the_order_of_their_ranks_also_while_one_writes() -> None:
    lock, order, threads = PriorityLock(-1), list[int](), list[threading.Thread]()

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
