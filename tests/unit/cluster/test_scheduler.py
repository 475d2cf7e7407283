"""The scheduler: steps of many tasks on a few threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from delaylevel.cluster.scheduler import (
    AT_ONCE,
    NEVER,
    LaneTask,
    Scheduler,
    Task,
    TaskQueue,
    _Worker,
)

TIMEOUT_S = 30


class Queue:
    """A queue of tasks on a manual clock, without threads."""

    def __init__(self, most_running: int = 1, patience_s: float = 1.0) -> None:
        self.queue = TaskQueue(most_running, patience_s)
        self.now_s = 100.0

    def task(self, name: str) -> Task:
        task = Task(lambda: NEVER, name, self.wake)
        task.wake()
        return task

    def wake(self, task: Task) -> None:
        self.queue.make_ready(task)

    def take(self) -> Task | None:
        return self.queue.take(self.now_s)

    def finish(self, task: Task, until_s: float) -> None:
        self.queue.finish(task, until_s, self.now_s)

    @property
    def next_s(self) -> float:
        return self.queue.next_s()


def test_tasks_come_in_the_order_in_which_they_were_woken() -> None:
    queue = Queue(most_running=2)
    first, second = queue.task("first"), queue.task("second")
    first.wake()  # it is ready anyway
    assert (queue.take(), queue.take(), queue.take()) == (first, second, None)
    assert queue.next_s == NEVER


def test_a_task_comes_back_at_the_time_that_its_step_returned() -> None:
    queue = Queue()
    task = queue.task("task")
    assert queue.take() is task
    queue.finish(task, 107.0)
    assert queue.next_s == 107.0
    queue.now_s = 106.9
    assert queue.take() is None
    queue.now_s = 107.0
    assert queue.take() is task
    assert queue.next_s == NEVER


def test_a_wake_comes_before_the_time_which_then_no_longer_counts() -> None:
    queue = Queue()
    task = queue.task("task")
    assert queue.take() is task
    queue.finish(task, 107.0)
    task.wake()
    assert queue.take() is task
    queue.finish(task, 120.0)
    queue.now_s = 108.0
    assert queue.take() is None
    assert queue.next_s == 120.0


def test_a_wake_during_a_step_leads_to_one_more_step() -> None:
    queue = Queue(most_running=2)
    task = queue.task("task")
    assert queue.take() is task
    task.wake()
    task.wake()
    assert queue.take() is None  # never twice at once
    queue.finish(task, NEVER)
    assert queue.take() is task
    queue.finish(task, NEVER)
    assert queue.take() is None


def test_a_step_that_runs_for_too_long_gives_its_place_to_others() -> None:
    queue = Queue(most_running=1, patience_s=1.0)
    blocked, waiting = queue.task("blocked"), queue.task("waiting")
    assert queue.take() is blocked
    assert queue.take() is None
    assert queue.next_s == 101.0  # this is when it may run
    queue.now_s = 101.0
    assert queue.take() is waiting
    assert queue.queue.running == 2
    queue.finish(waiting, AT_ONCE)
    assert queue.take() is waiting  # the blocked one delays it no more


def test_a_removed_task_has_no_further_step() -> None:
    queue = Queue()
    ready, timed = queue.task("ready"), queue.task("timed")
    ready.removed = True
    assert queue.take() is timed
    queue.finish(timed, 101.0)
    timed.removed = True
    queue.now_s = 102.0
    assert queue.take() is None
    timed.wake()
    assert queue.take() is None
    assert queue.next_s == NEVER


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    scheduler = Scheduler(2, name="test")
    yield scheduler
    scheduler.close()
    assert scheduler.threads == 0


class Steps:
    """A task that counts its steps and can be held."""

    def __init__(self, until: Callable[[], float] = lambda: NEVER) -> None:
        self._until = until
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.go_on.set()
        self.at_once = 0
        self.most_at_once = 0
        self.threads: set[str] = set()

    def __call__(self) -> float:
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        self.threads.add(threading.current_thread().name)
        self.begun.release()
        assert self.go_on.wait(TIMEOUT_S)
        self.at_once -= 1
        return self._until()

    def wait(self, times: int = 1) -> None:
        for _ in range(times):
            assert self.begun.acquire(timeout=TIMEOUT_S)


def test_steps_wait_for_each_other_if_no_more_threads_can_be_started(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, left = _Worker.start, iter(range(6))

    def start_few(worker: _Worker) -> None:
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(worker)

    monkeypatch.setattr(_Worker, "start", start_few)
    blocked = [Steps() for _ in range(20)]
    for each in blocked:
        each.go_on.clear()
        scheduler.add(each, "blocked")
    for each in blocked[:6]:
        each.wait()
    assert scheduler.threads == 6
    for each in blocked:
        each.go_on.set()
    for each in blocked[6:]:
        each.wait()


def test_removing_waits_for_the_running_step(scheduler: Scheduler) -> None:
    steps = Steps(lambda: AT_ONCE)
    steps.go_on.clear()
    task = scheduler.add(steps, "held")
    steps.wait()
    removed = threading.Event()

    def remove() -> None:
        scheduler.remove(task)
        removed.set()

    remover = threading.Thread(target=remove)
    remover.start()
    assert not removed.is_set()
    steps.go_on.set()
    assert removed.wait(TIMEOUT_S)
    remover.join()
    assert steps.at_once == 0
    task.wake()
    scheduler.add(after := Steps(), "after")
    after.wait()
    assert not steps.begun.acquire(blocking=False)


def test_an_error_is_reported_and_the_step_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    scheduler = Scheduler(1, now_s=lambda: now_s)
    tries = threading.Semaphore(0)

    def step() -> float:
        tries.release()
        raise ValueError("no disk")

    task = scheduler.add(step, "failing")
    assert tries.acquire(timeout=TIMEOUT_S)
    now_s = 2.0
    task.wake()
    assert tries.acquire(timeout=TIMEOUT_S)
    scheduler.close()
    assert {record.getMessage() for record in caplog.records} == {"failing"}
    assert "ValueError: no disk" in caplog.text


class Mover:
    """A task that changes its lane at each of its first steps, and is woken all the time."""

    def __init__(self, lanes: tuple[Scheduler, Scheduler], moves: int) -> None:
        self._lanes = lanes
        self._moves = moves
        self._at_once = 0
        self.most_at_once = 0
        self.wanted = self.done = 0
        self.task = LaneTask(self._step, lanes[0], "mover")

    def _step(self) -> float:
        self._at_once += 1
        self.most_at_once = max(self._at_once, self.most_at_once)
        self.done = self.wanted
        self._moves -= 1
        self._at_once -= 1
        if self._moves < 0:
            return NEVER
        return self.task.move(self._lanes[self._moves % 2])


def test_a_task_that_changes_lanes_misses_no_wake() -> None:
    lanes = Scheduler(2), Scheduler(2)
    mover = Mover(lanes, 300)
    for _ in range(2_000):
        mover.wanted += 1
        mover.task.wake()
    deadline = time.monotonic() + TIMEOUT_S
    while mover.done < mover.wanted:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert mover.most_at_once == 1
    mover.task.end()
    mover.wanted += 1
    mover.task.wake()
    for lane in lanes:
        lane.close()
    assert mover.done < mover.wanted
