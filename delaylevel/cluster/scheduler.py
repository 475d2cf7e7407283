"""Steps of many tasks on a few threads.

A process serves hundreds of partitions, nearly all of them idle. A thread for each would cost
memory and wake-ups. Here each of them is a task: a function that does what there is to do now, and
returns the time of its next call. Other threads wake it earlier.

A step should not wait for long. One that does (for a broker that fails over, say) holds a thread
and, for a moment, one of the places for steps that run at once. Then its place is free for another
task, for which a further thread is started if necessary. So steps that wait delay the others by
that moment, once, however many they are. Threads that are too many end when they have nothing to
do. Steps that are expected to wait have places of their own, so that they delay no quick one.

Theory of operation. `TaskQueue` knows the tasks and decides which step is next; it has no threads.
An idle thread waits for its own lock (`_Worker.signal`). One of them, the leader, also wakes up at
the time of the next step. The others wait until they are called. A thread that begins a step first
makes sure that another one watches over what is left (`_provide`): it takes the next step, or
becomes the leader. So while steps are running on all regular threads, one more stands by, which
takes a task once one of those steps has run for too long. A thread that ends a step takes the next
one itself, without a switch of threads.

Nearly all steps end before the next one is due. To change the leader for each of them would double
the switches of threads. So after a step has begun, the others look a few ms later (`_GRACE_S`) at
what has become due, and the thread of the step becomes the leader again when it ends before. A task
that is ready waits for nobody.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count, islice

log = logging.getLogger(__name__)

#: Time of a step's next call if only `Task.wake` is to call it.
NEVER = float("inf")
#: Time of a step's next call if it has more to do: other tasks that are ready come first.
AT_ONCE = 0.0

# Pause after a step that has failed.
_AFTER_ERROR_S = 1.0
# A step that has run for so long keeps no other from running: a quick one, and one that may wait.
_PATIENCE_S, _SLOW_PATIENCE_S = 0.05, 0.5
# Number of steps of each kind that run at once, unless some of them wait.
_PLACES = 8
# Time after the begin of a step in which its thread is expected to come back.
_GRACE_S = 0.005
# An additional thread ends after this time without a step.
_SPARE_S = 5.0
# Time between two attempts to start a thread, once the system has refused one.
_NO_THREAD_S = 1.0


class Task:
    """A step that is called again and again once it is woken, never twice at once."""

    def __init__(self, step: Callable[[], float], name: str, scheduler: Scheduler) -> None:
        self.step = step  # it returns the monotonic time, in s, until which it has nothing to do
        self.name = name
        # Set by the step: True if the next one comes at its time and does not wait, unless
        # something is wrong; False if it opens, reads or closes, and waits for the broker.
        self.is_quick = False
        self._scheduler = scheduler
        # The rest belongs to the queue.
        self.removed = False
        self.is_ready = False
        self.running_in: int | None = None  # the thread, while the step is called
        self.woken = False  # during its step
        self.due_s = NEVER

    def wake(self) -> None:
        """Call the step soon; thread-safe. A step that is running is called once more."""
        # A task that is ready looks at everything anyway, and wakes come with every answer of a
        # broker, so this is worth a look without the lock.
        if not self.is_ready:
            self._scheduler.wake(self)

    def end(self) -> None:
        """Call the step no more, and wait for its end unless it is the caller itself."""
        scheduler = self._scheduler
        with scheduler.lock:
            self.removed = True
            if self.running_in != threading.get_ident():
                scheduler.ended.wait_for(lambda: self.running_in is None)


class _Places:
    """The steps of one kind: those that are ready, and those that are running."""

    def __init__(self, count: int, patience_s: float) -> None:
        self._count = count
        self._patience_s = patience_s
        self.ready: deque[Task] = deque()
        # With the times at which they began, in their order.
        self.running: dict[Task, float] = {}

    @property
    def free_s(self) -> float:
        """The time from which one more step may run; `NEVER` if none is ready."""
        if not self.ready:
            return NEVER
        if len(self.running) < self._count:
            return 0.0
        # Steps that have run for longer than the patience wait for something, and do not count.
        last = islice(reversed(self.running.values()), self._count - 1, None)
        return next(last) + self._patience_s


class TaskQueue:
    """Tasks in the order of their steps; its methods need the lock of its host."""

    def __init__(self, places: int) -> None:
        self._quick, self._slow = _Places(places, _PATIENCE_S), _Places(places, _SLOW_PATIENCE_S)
        # Times of tasks that wait. A task may have several; only its `due_s` counts.
        self._times: list[tuple[float, int, Task]] = []
        self._order = count()

    def make_ready(self, task: Task) -> bool:
        """Let a step be called soon; return False if that changes nothing now."""
        if task.removed or task.is_ready:
            return False
        if task.running_in is not None:
            task.woken = True
            return False
        task.is_ready, task.due_s = True, NEVER
        # Its earlier time stays in the heap: it is passed over there, as it is not `due_s`.
        (self._quick if task.is_quick else self._slow).ready.append(task)
        return True

    def take(self, now_s: float) -> Task | None:
        """Return the task whose step is next, which counts as running; None if there is none."""
        times = self._times
        while times and times[0][0] <= now_s:
            due_s, _, task = heappop(times)
            if task.due_s == due_s:
                self.make_ready(task)
        for places in (self._quick, self._slow):
            while places.free_s <= now_s:
                task = places.ready.popleft()
                task.is_ready = False
                if not task.removed:
                    task.running_in = threading.get_ident()
                    places.running[task] = now_s
                    return task
        return None

    def finish(self, task: Task, until_s: float, now_s: float) -> None:
        """Take note of the end of a step that has nothing to do until a time."""
        task.running_in = None
        for places in (self._quick, self._slow):  # the step may have changed its kind
            places.running.pop(task, None)
        # A wake may concern what the step had looked at before it came.
        if task.woken or until_s <= now_s:
            task.woken = False
            self.make_ready(task)
        elif until_s < NEVER and not task.removed:
            task.due_s = until_s
            heappush(self._times, (until_s, next(self._order), task))

    def next_s(self) -> float:
        """Return the time of the next call of `take` that may return a task."""
        while self._times and self._times[0][0] != self._times[0][2].due_s:
            heappop(self._times)
        next_s = self._times[0][0] if self._times else NEVER
        return min(next_s, self._quick.free_s, self._slow.free_s)


class _Worker(threading.Thread):
    """A thread of a scheduler."""

    def __init__(self, work: Callable[[_Worker], None], name: str) -> None:
        super().__init__(target=work, args=(self,), name=name, daemon=True)
        self.signal = threading.Lock()  # held while nobody calls the thread
        self.signal.acquire()
        self.until_s = NEVER  # the time at which it wakes up by itself
        self.is_spare = False  # it ends then


class Scheduler:
    """Calls the steps of tasks on a few threads; one that has failed is tried again 1 s later."""

    def __init__(
        self, places: int = _PLACES, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._regular = 2 * places
        self._start_s = -NEVER  # no thread is started before this time
        self._now_s = now_s
        self.lock = threading.Lock()
        self.ended = threading.Condition(self.lock)  # a step of a task that is being removed
        self._queue = TaskQueue(places)
        self._numbers = count(1)
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []  # without the leader
        self._leader: _Worker | None = None
        self._coming = 0  # threads that were called and have not looked yet
        # The quick task that has begun last, until it ends. One is enough to know: the grace of all
        # earlier ones is over before its own.
        self._latest: Task | None = None
        self._begun_s = -NEVER
        self._closed = False

    def close(self) -> None:
        """Call no more steps, and wait for the end of those that are running."""
        with self.lock:
            self._closed = True
            workers = list(self._workers)
            idle, self._idle, leader = self._idle, [], self._leader
            self._leader = None
            for worker in (*idle, leader) if leader else idle:
                self._call(worker)
        for worker in workers:
            if worker is not threading.current_thread():
                worker.join()

    def wake(self, task: Task) -> None:
        """Carry out `Task.wake`."""
        with self.lock:
            if self._queue.make_ready(task):
                self._provide(self._now_s())

    def _provide(self, now_s: float) -> None:
        """Make sure that a thread looks in time at what is there to do."""
        next_s = self._queue.next_s()
        # A thread that comes takes one step, and provides for the others.
        if next_s == NEVER or self._coming or self._closed:
            return
        if next_s > now_s and self._is_watched(self._watch_s(next_s)):
            return
        leader = self._leader
        if self._idle:
            self._call(self._idle.pop())
        elif leader is not None:
            self._leader = None
            self._call(leader)
        elif now_s >= self._start_s:
            worker = _Worker(self._work, f"delaylevel-step-{next(self._numbers)}")
            try:
                worker.start()
            except RuntimeError:
                # Present threads come to the step later. Without any, nobody ever would.
                if not self._workers:
                    raise
                log.warning("no more threads can be started: %s work", len(self._workers))
                self._start_s = now_s + _NO_THREAD_S
                return
            self._workers.add(worker)
            self._coming += 1

    def _watch_s(self, next_s: float) -> float:
        """Return the time at which a thread without a step has to look."""
        return next_s if self._latest is None else max(next_s, self._begun_s + _GRACE_S)

    def _is_watched(self, at_s: float) -> bool:
        """Return True if a thread wakes up by itself until a time, and looks."""
        if self._leader is not None and self._leader.until_s <= at_s:
            return True
        # A spare thread ends at its time, without a look.
        return any(worker.until_s <= at_s and not worker.is_spare for worker in self._idle)

    def _call(self, worker: _Worker) -> None:
        self._coming += 1
        worker.signal.release()

    def _work(self, worker: _Worker) -> None:
        with self.lock:
            self._coming -= 1
            while not self._closed:
                now_s = self._now_s()
                task = self._queue.take(now_s)
                if task is None:
                    if not self._wait(worker, now_s):
                        break
                    continue
                if task.is_quick:
                    self._latest, self._begun_s = task, now_s
                # The step may take long: another thread has to come for what else is there to do.
                self._provide(now_s)
                self.lock.release()
                try:
                    until_s = task.step()
                except Exception as error:
                    log.error("%s", task.name, exc_info=error)
                    until_s = self._now_s() + _AFTER_ERROR_S
                finally:
                    self.lock.acquire()
                self._queue.finish(task, until_s, self._now_s())
                if task is self._latest:
                    self._latest = None
                if task.removed:
                    self.ended.notify_all()
            self._workers.discard(worker)

    def _wait(self, worker: _Worker, now_s: float) -> bool:
        """Wait for something to do, without the lock; return False to end the thread."""
        watch_s = self._watch_s(self._queue.next_s())
        leads = self._leader is None or watch_s < self._leader.until_s
        worker.is_spare = False
        if leads:
            # A leader with a later time stays: it finds nothing then, and waits again.
            if self._leader is not None:
                self._idle.append(self._leader)
            self._leader, worker.until_s = worker, watch_s
        else:
            worker.is_spare = len(self._workers) > self._regular + 1
            # One thread without a step looks while steps begin.
            guard_s = self._begun_s + _GRACE_S
            if guard_s <= now_s or self._is_watched(guard_s):
                guard_s = NEVER
            worker.until_s = now_s + _SPARE_S if worker.is_spare else guard_s
            self._idle.append(worker)
        timeout_s = min(max(worker.until_s - now_s, 0.0), threading.TIMEOUT_MAX)
        self.lock.release()
        try:
            called = worker.signal.acquire(timeout=timeout_s)
        finally:
            self.lock.acquire()
        if worker is self._leader:
            self._leader = None
        elif worker in self._idle:
            self._idle.remove(worker)
            return not worker.is_spare or len(self._workers) <= self._regular + 1
        else:  # it was called, perhaps just after the timeout
            # Its caller has released the signal, which would end its next wait at once.
            if not called:
                worker.signal.acquire()
            self._coming -= 1
        return True
