"""The scheduler: steps of many tasks on a few threads."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from delaylevel.cluster import scheduler as scheduler_module
from delaylevel.cluster.scheduler import AT_ONCE, NEVER, Scheduler, Task, TaskQueue, _Worker
from support.seeds import seeds

TIMEOUT_S = 30
PATIENCE_S = {True: 0.05, False: 0.5}  # of quick steps, and of those that may wait
PLACES, TASKS = 2, 6


class Expected:
    """A model of a queue of tasks, by their numbers."""

    def __init__(self) -> None:
        self.quick = [False] * TASKS
        self.ready: list[int] = []
        self.due: dict[int, float] = {}
        self.running: dict[int, tuple[bool, float]] = {}  # kind and begin of each step
        self.woken: set[int] = set()
        self.removed: set[int] = set()

    def wake(self, task: int) -> None:
        if task in self.running:
            self.woken.add(task)
        elif task not in {*self.ready, *self.removed}:
            self.due.pop(task, None)
            self.ready.append(task)

    def finish(self, task: int, until_s: float, now_s: float) -> None:
        del self.running[task]
        if task in self.woken or until_s <= now_s:
            self.woken.discard(task)
            self.wake(task)
        elif until_s < NEVER and task not in self.removed:
            self.due[task] = until_s

    def take(self, now_s: float) -> int | None:
        for task in sorted(self.due, key=self.due.__getitem__):
            if self.due[task] <= now_s:
                self.wake(task)
        for kind in (True, False):
            # A step that has run for too long gives its place to others of its kind.
            begun = [at_s for quick, at_s in self.running.values() if quick is kind]
            places = PLACES - sum(at_s + PATIENCE_S[kind] > now_s for at_s in begun)
            for task in [each for each in self.ready if self.quick[each] is kind]:
                if places <= 0:
                    break
                self.ready.remove(task)
                if task not in self.removed:
                    self.running[task] = kind, now_s
                    return task
        return None


@pytest.mark.parametrize("seed", seeds(40))
def test_a_queue_takes_each_task_when_it_is_due_or_was_woken(seed: int) -> None:
    """In their order, never twice at once, and after a wake during a step once more."""
    chosen, queue, expected, now_s = random.Random(seed), TaskQueue(PLACES), Expected(), 100.0
    nobody: Any = None
    made = [Task(lambda: NEVER, str(number), nobody) for number in range(TASKS)]
    for _ in range(150):
        kind = chosen.choice((*8 * ["take"], *4 * ["wake", "finish", "wait"], "remove"))
        task = chosen.randrange(TASKS)
        if kind == "wake":
            queue.make_ready(made[task])
            expected.wake(task)
        elif kind == "remove" and len(expected.removed) < 2:
            made[task].removed = True
            expected.removed.add(task)
            expected.due.pop(task, None)
        elif kind == "wait":
            now_s += chosen.choice((0.02, 0.05, 0.3))
        elif kind == "finish" and expected.running:
            task, pause_s = chosen.choice([*expected.running]), chosen.choice((0, 0.02, 0.3, NEVER))
            made[task].is_quick = expected.quick[task] = chosen.random() < 0.5
            queue.finish(made[task], pause_s and now_s + pause_s, now_s)
            expected.finish(task, pause_s and now_s + pause_s, now_s)
        elif kind == "take":
            wanted = expected.take(now_s)
            assert queue.take(now_s) is (None if wanted is None else made[wanted])
            if wanted is None and expected.ready:  # it waits for a place
                now_s = queue.next_s()
                assert expected.take(now_s - 0.001) is None
                taken = expected.take(now_s)
                assert queue.take(now_s) is (None if taken is None else made[taken])
        if expected.due and not expected.ready:
            assert queue.next_s() <= min(expected.due.values())


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    scheduler = Scheduler(2)
    yield scheduler
    scheduler.close()
    assert not scheduler._workers


class Steps:
    """A task that counts its steps and can be held."""

    def __init__(self, until_s: float = NEVER) -> None:
        self._until_s = until_s
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.go_on.set()
        self.at_once = 0

    def __call__(self) -> float:
        self.at_once += 1
        self.begun.release()
        assert self.go_on.wait(TIMEOUT_S)
        self.at_once -= 1
        return self._until_s

    def wait(self) -> None:
        assert self.begun.acquire(timeout=TIMEOUT_S)


def test_steps_wait_for_each_other_while_no_more_threads_can_be_started(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, left = _Worker.start, list(range(6))

    def start_few(worker: _Worker) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(worker)

    monkeypatch.setattr(scheduler_module, "_NO_THREAD_S", 0.1)
    monkeypatch.setattr(_Worker, "start", start_few)
    blocked = [Steps() for _ in range(20)]
    for each in blocked:
        each.go_on.clear()
        Task(each, "blocked", scheduler).wake()
    for each in blocked[:6]:
        each.wait()
    assert len(scheduler._workers) == 6
    time.sleep(0.1)
    left.append(0)  # another process has ended
    Task(Steps(), "further", scheduler).wake()
    assert blocked[6].begun.acquire(timeout=TIMEOUT_S / 3)
    for each in blocked:
        each.go_on.set()
    for each in blocked[7:]:
        each.wait()


def test_removing_waits_for_the_running_step(scheduler: Scheduler) -> None:
    steps = Steps(AT_ONCE)
    steps.go_on.clear()
    task = Task(steps, "held", scheduler)
    task.wake()
    steps.wait()
    removed = threading.Event()

    def remove() -> None:
        task.end()
        removed.set()

    remover = threading.Thread(target=remove)
    remover.start()
    assert not removed.is_set()
    steps.go_on.set()
    assert removed.wait(TIMEOUT_S)
    remover.join()
    assert steps.at_once == 0
    task.wake()
    Task(after := Steps(), "after", scheduler).wake()
    after.wait()
    assert not steps.begun.acquire(blocking=False)


def test_an_error_is_reported_and_the_step_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    scheduler = Scheduler(1, now_s=lambda: now_s)
    tries = threading.Semaphore(0)

    def step() -> float:
        tries.release()
        raise ValueError("no disk")

    task = Task(step, "failing", scheduler)
    task.wake()
    assert tries.acquire(timeout=TIMEOUT_S)
    now_s = 2.0
    task.wake()
    assert tries.acquire(timeout=TIMEOUT_S)
    scheduler.close()
    assert {record.getMessage() for record in caplog.records} == {"failing"}
    assert "ValueError: no disk" in caplog.text
