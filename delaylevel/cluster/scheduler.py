"""Steps of many tasks on a few threads.

A process serves hundreds of partitions, nearly all of them idle. A thread for each would cost
memory and wake-ups. Here each of them is a task: a function that does what there is to do now, and
returns the time of its next call. Other threads wake it earlier.

A step should not wait for long. One that does (for a broker that fails over, say) holds a thread,
so more threads are started while tasks wait, up to a limit. They end when they have nothing to do.

Theory of operation. `TaskQueue` knows the tasks and decides which step is next; it has no threads.
An idle thread waits for its own lock (`_Worker.signal`). One of them, the leader, also wakes up at
the time of the next step. The others wait until they are called. A thread that begins a step first
makes sure that another one watches over what is left (`_provide`): it becomes the leader, or takes
the next step. So while steps are running on all regular threads, one more stands by, which takes
only tasks that have waited for too long. A thread that ends a step takes the next one itself,
without a switch of threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

log = logging.getLogger(__name__)

#: Time of a step's next call if only `Task.wake` is to call it.
NEVER = float("inf")
#: Time of a step's next call if it has more to do: other tasks that are ready come first.
AT_ONCE = 0.0

# Pause after a step that has failed.
_AFTER_ERROR_S = 1.0
# A task that has waited for so long gets another thread.
_PATIENCE_S = 0.05
# An additional thread ends after this time without a step.
_SPARE_S = 5.0

#: Called with the name of a task and the error of its step, which is tried again a second later.
ErrorHandler = Callable[[str, Exception], None]


def log_error(name: str, error: Exception) -> None:
    """Log the error of a step."""
    log.error("%s", name, exc_info=error)


class Task:
    """A step that is called again and again, never twice at once; `Scheduler.add` makes it.

    Attributes:
        name: name for the log.
    """

    def __init__(self, step: Callable[[], float], name: str, wake: Callable[[Task], None]) -> None:
        self.step = step
        self.name = name
        self._wake = wake
        # The rest belongs to the queue.
        self.removed = False
        self.is_ready = False
        self.running_in: int | None = None  # the thread, while the step is called
        self.woken = False  # during its step
        self.due_s = NEVER
        self.ready_s = 0.0  # time since which it is ready

    def wake(self) -> None:
        """Call the step soon; thread-safe. A step that is running is called once more."""
        # A task that is ready looks at everything anyway, and wakes come with every answer of a
        # broker, so this is worth a look without the lock.
        if not self.is_ready:
            self._wake(self)


class TaskQueue:
    """Tasks in the order of their steps; its methods need the lock of its host.

    Args:
        most_running: number of steps that run at once, unless a task has waited for too long.
        patience_s: the time after which it has.
    """

    def __init__(self, most_running: int, patience_s: float = _PATIENCE_S) -> None:
        self._most_running = most_running
        self._patience_s = patience_s
        self._ready: deque[Task] = deque()
        # Times of tasks that wait. A task may have several; only its `due_s` counts.
        self._times: list[tuple[float, int, Task]] = []
        self._order = count()
        self.running = 0

    def make_ready(self, task: Task, now_s: float) -> bool:
        """Let a step be called soon; return False if that changes nothing now."""
        if task.removed or task.is_ready:
            return False
        if task.running_in is not None:
            task.woken = True
            return False
        task.is_ready, task.due_s, task.ready_s = True, NEVER, now_s
        self._ready.append(task)
        return True

    def take(self, now_s: float) -> Task | None:
        """Return the task whose step is next, which counts as running; None if there is none."""
        self._take_times(now_s)
        while self._ready and self._may_run(now_s):
            task = self._ready.popleft()
            task.is_ready = False
            if not task.removed:
                task.running_in = threading.get_ident()
                self.running += 1
                return task
        return None

    def finish(self, task: Task, until_s: float, now_s: float) -> None:
        """Take note of the end of a step that has nothing to do until a time."""
        task.running_in = None
        self.running -= 1
        if task.woken or until_s <= now_s:
            task.woken = False
            self.make_ready(task, now_s)
        elif until_s < NEVER and not task.removed:
            task.due_s = until_s
            heappush(self._times, (until_s, next(self._order), task))

    def next_s(self) -> float:
        """Return the time of the next call of `take` that may return a task."""
        while self._times and self._times[0][0] != self._times[0][2].due_s:
            heappop(self._times)
        next_s = self._times[0][0] if self._times else NEVER
        if self._ready:
            may_run = self.running < self._most_running
            return 0.0 if may_run else min(next_s, self._ready[0].ready_s + self._patience_s)
        return next_s

    def _may_run(self, now_s: float) -> bool:
        waited = self._ready[0].ready_s + self._patience_s <= now_s
        return waited or self.running < self._most_running

    def _take_times(self, now_s: float) -> None:
        times = self._times
        while times and times[0][0] <= now_s:
            due_s, _, task = heappop(times)
            if task.due_s == due_s:
                self.make_ready(task, now_s)


class _Worker(threading.Thread):
    """A thread of a scheduler."""

    def __init__(self, work: Callable[[_Worker], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self.signal = threading.Lock()  # held while nobody calls the thread
        self.signal.acquire()
        self.until_s = NEVER  # the time at which it wakes up by itself

    def run(self) -> None:
        self._work(self)


class Scheduler:
    """Calls the steps of tasks on a few threads, which begin with the first task.

    Args:
        workers: number of regular threads. One more watches over them.
        most: limit of threads while steps wait for long; by default eight times as many.
        name: beginning of the names of the threads.
        on_error: called in a worker after a step has failed; the step is tried again a second
            later.
        now_s: the monotonic clock, in seconds.
    """

    def __init__(
        self,
        workers: int,
        *,
        most: int | None = None,
        name: str = "delaylevel",
        on_error: ErrorHandler = log_error,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._regular = workers
        self._most = max(most or 8 * workers, workers + 1)
        self._name = name
        self._on_error = on_error
        self._now_s = now_s
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)  # a step of a task that is being removed
        self._queue = TaskQueue(workers)
        self._numbers = count(1)
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []  # without the leader
        self._leader: _Worker | None = None
        self._coming = 0  # threads that were called and have not looked yet
        self._closed = False

    @property
    def threads(self) -> int:
        """Number of threads now."""
        return len(self._workers)

    def add(self, step: Callable[[], float], name: str) -> Task:
        """Call a step now and again.

        Args:
            step: function that returns the monotonic time, in s, until which it has nothing to do:
                `NEVER` if it waits for `Task.wake`, `AT_ONCE` if there is more to do now.
            name: name for the log.
        """
        task = Task(step, name, self._wake)
        self._wake(task)
        return task

    def remove(self, task: Task) -> None:
        """Call a step no more, and wait for its end unless it is the caller itself."""
        with self._lock:
            task.removed = True
            if task.running_in != threading.get_ident():
                self._ended.wait_for(lambda: task.running_in is None)

    def close(self) -> None:
        """Call no more steps, and wait for the end of those that are running."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)
            idle, self._idle, leader = self._idle, [], self._leader
            self._leader = None
            for worker in (*idle, leader) if leader else idle:
                self._call(worker)
        for worker in workers:
            if worker is not threading.current_thread():
                worker.join()

    def _wake(self, task: Task) -> None:
        with self._lock:
            now_s = self._now_s()
            if self._queue.make_ready(task, now_s):
                self._provide(now_s)

    def _provide(self, now_s: float) -> None:
        """Make sure that a thread looks in time at what is there to do."""
        next_s = self._queue.next_s()
        # A thread that comes takes one step, and provides for the others.
        if next_s == NEVER or self._coming or self._closed:
            return
        leader = self._leader
        if leader is not None and now_s < next_s and leader.until_s <= next_s:
            return
        if self._idle:
            self._call(self._idle.pop())
        elif leader is not None:
            self._leader = None
            self._call(leader)
        elif len(self._workers) < self._most:
            worker = _Worker(self._work, f"{self._name}-{next(self._numbers)}")
            try:
                worker.start()
            except RuntimeError:
                if not self._workers:
                    raise
                log.warning("no more threads can be started: %s work", len(self._workers))
                self._most = len(self._workers)
                return
            self._workers.add(worker)
            self._coming += 1

    def _call(self, worker: _Worker) -> None:
        self._coming += 1
        worker.signal.release()

    def _work(self, worker: _Worker) -> None:
        with self._lock:
            self._coming -= 1
            while not self._closed:
                now_s = self._now_s()
                task = self._queue.take(now_s)
                if task is None:
                    if not self._wait(worker, now_s):
                        break
                    continue
                self._provide(now_s)
                self._lock.release()
                try:
                    until_s = self._step(task)
                finally:
                    self._lock.acquire()
                self._queue.finish(task, until_s, self._now_s())
                if task.removed:
                    self._ended.notify_all()
            self._workers.discard(worker)

    def _step(self, task: Task) -> float:
        try:
            return task.step()
        except Exception as error:
            self._on_error(task.name, error)
            return self._now_s() + _AFTER_ERROR_S

    def _wait(self, worker: _Worker, now_s: float) -> bool:
        """Wait for something to do, without the lock; return False to end the thread."""
        next_s = self._queue.next_s()
        leads = self._leader is None or next_s < self._leader.until_s
        if leads:
            # A leader with a later time stays: it finds nothing then, and waits again.
            if self._leader is not None:
                self._idle.append(self._leader)
            self._leader, worker.until_s = worker, next_s
        else:
            is_spare = len(self._workers) > self._regular + 1
            worker.until_s = now_s + _SPARE_S if is_spare else NEVER
            self._idle.append(worker)
        timeout_s = min(max(worker.until_s - now_s, 0.0), threading.TIMEOUT_MAX)
        self._lock.release()
        try:
            called = worker.signal.acquire(timeout=timeout_s)
        finally:
            self._lock.acquire()
        if worker is self._leader:
            self._leader = None
        elif worker in self._idle:
            self._idle.remove(worker)
            return leads or len(self._workers) <= self._regular + 1
        else:  # it was called, perhaps just after the timeout
            if not called:
                worker.signal.acquire()
            self._coming -= 1
        return True
