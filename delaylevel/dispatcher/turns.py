"""Turns of the threads of one process that read or publish many messages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import count


class Turns:
    """A lock that goes to the waiting thread with the lowest rank.

    Each call of the client releases the interpreter's lock, so threads that worked at once would
    switch for every message, which costs several times as much as the message. Publishing comes
    first. At a takeover, the partitions are read one after the other: the first ones publish while
    the others are read, instead of all of them at the end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: tuple[int, int] | None = None  # identifier and rank of a thread
        self._waiting: list[tuple[int, int, threading.Lock]] = []
        self._arrivals = count()

    @contextmanager
    def take(self, rank: int) -> Iterator[None]:
        """Hold the lock; threads of equal rank get it in the order of their calls.

        The result is a context manager, and a decorator of functions that need the lock.
        """
        self._acquire(rank)
        try:
            yield
        finally:
            self._release()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let others work while this thread waits for disk or broker; nothing if it has no turn."""
        holder = self._holder
        if holder is None or holder[0] != threading.get_ident():
            yield
            return
        self._release()
        try:
            yield
        finally:
            self._acquire(holder[1])

    def _acquire(self, rank: int) -> None:
        turn = threading.Lock()
        with self._lock:
            if self._holder is not None or self._waiting:
                turn.acquire()
                heappush(self._waiting, (rank, next(self._arrivals), turn))
            else:
                self._holder = threading.get_ident(), rank
                return
        turn.acquire()  # the thread before this one releases it
        with self._lock:
            self._holder = threading.get_ident(), rank

    def _release(self) -> None:
        with self._lock:
            self._holder = None
            if self._waiting:
                self._holder = 0, 0  # the next thread is on its way
                heappop(self._waiting)[2].release()


#: Rank of publishing; that of reading at a takeover is the number of the partition.
PUBLISHING = -1

#: Turns of all owners of this process that publish, and of owners and fetchers that take over.
TURNS = Turns()
