"""Events of a task, and the lock by which the threads of a process take turns."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import count
from typing import Any, TypeVar

#: An event without content: there is something to process.
WAKE = object()
Answer = TypeVar("Answer")


class EventQueue:
    """Queue of events for one task; any thread puts them.

    Most wakes come from targets that have answered. They need not be processed at once, and the
    task wakes up at its next time anyway. So such a wake is an event only if the task would wait
    for longer than its patience.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wake_until_s = 0.0  # an answer before this time is an event
        self.are_answered = False  # True if a target has answered, and this was not taken note of
        self.on_event: Callable[[], object] = lambda: None  # called in any thread after each

    def __bool__(self) -> bool:
        """Return True if there are events."""
        return not self._queue.empty()

    def put(self, event: Any) -> None:
        """Add an event."""
        self._queue.put(event)
        self.on_event()

    def wake(self) -> None:
        """Let the task look at once."""
        self.put(WAKE)

    def ask(self, function: Callable[[Any], Answer]) -> Future[Answer]:
        """Let the task call a short function of what it owns, between two of its steps."""
        answer: Future[Answer] = Future()

        def call(owned: Any) -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(function(owned))
                except Exception as error:  # no error reaches the task
                    answer.set_exception(error)

        self.put(call)
        return answer

    def answered(self) -> None:
        """Let the task look soon: a target has answered."""
        # In this order: either `rest` sees the answer, or this sees its limit.
        self.are_answered = True
        if time.monotonic() < self._wake_until_s:
            self.put(WAKE)

    def take_answered(self) -> None:
        """Take note that all answers until now are going to be processed."""
        self.are_answered = False

    def rest(self, until_s: float, patience_s: float) -> float:
        """Begin to wait until a time; return the time to look again, monotonic and in s.

        Answers of targets may wait for ``patience_s``; they are events if it is 0.
        """
        self._wake_until_s = until_s - patience_s if patience_s else float("inf")
        if self.are_answered:
            until_s = min(until_s, time.monotonic() + patience_s)
        return until_s

    def stir(self) -> None:
        """End the wait for events."""
        self._wake_until_s = 0.0

    def get_nowait(self) -> Any:
        """Return the next event, or None."""
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return None


class PriorityLock:
    """A lock that goes to the waiting thread with the lowest rank; as a context, with ``rank``."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._holder: tuple[int, int] | None = None  # identifier and rank of a thread
        self._waiting: list[tuple[int, int, threading.Lock]] = []
        self._arrivals = count()

    def __enter__(self) -> None:
        # This is done at every look at messages: a generator, as `hold` is, costs more.
        self.acquire(self._rank)

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    @contextmanager
    def hold(self, rank: int) -> Iterator[None]:
        """Hold the lock; threads of equal rank get it in the order of their calls."""
        self.acquire(rank)
        try:
            yield
        finally:
            self.release()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let others work while this thread waits for disk or broker, if it holds the lock."""
        holder = self._holder
        if holder is None or holder[0] != threading.get_ident():
            yield
            return
        self.release()
        try:
            yield
        finally:
            self.acquire(holder[1])

    def acquire(self, rank: int) -> None:
        """Wait for the lock; `hold` is the usual way."""
        with self._lock:
            if self._holder is None and not self._waiting:
                self._holder = threading.get_ident(), rank
                return
            turn = threading.Lock()
            turn.acquire()
            heappush(self._waiting, (rank, next(self._arrivals), turn))
        turn.acquire()  # the thread before this one releases it
        with self._lock:
            self._holder = threading.get_ident(), rank

    def release(self) -> None:
        """Give the lock to the next thread."""
        with self._lock:
            self._holder = None
            if self._waiting:
                self._holder = 0, 0  # the next thread is on its way
                heappop(self._waiting)[2].release()
