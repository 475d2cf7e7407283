"""The surroundings of partition owners: broker and clocks, and the turns of their threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.threads import HostLoop, Starter, in_thread
from delaylevel.model.clock import Clock
from delaylevel.model.level_topic import LevelTopicDescription

from .stats import SharedOwnerStats


@dataclass(frozen=True)
class Host:
    """Broker, level topic, clocks and statistics, which all parts of a partition owner share.

    Attributes:
        client: a ``pulsar.Client`` for our own topics; it is not closed by what uses it.
        description: function that returns the latest description of the level topic.
        start: function that runs slow work.
        wake: function that lets the owner look soon, from any thread.
        now_s: monotonic clock.
    """

    client: Any
    admin: TopicAdmin
    description: Callable[[], LevelTopicDescription]
    clock: Clock
    stats: SharedOwnerStats = field(default_factory=SharedOwnerStats)
    start: Starter = in_thread
    wake: Callable[[], None] = lambda: None
    now_s: Callable[[], float] = time.monotonic

    @property
    def loop(self) -> HostLoop:
        """The owner's loop, as its producers see it."""
        return HostLoop(self.start, self.now_s, self.wake)


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

    def take(self, rank: int) -> RankedTurn:
        """Hold the lock; threads of equal rank get it in the order of their calls.

        The result is a context manager, and a decorator of functions that need the lock.
        """
        return RankedTurn(self, rank)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let others work while this thread waits for disk or broker; nothing if it has no turn."""
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
        """Wait for the lock; `take` is the usual way."""
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


class RankedTurn(ContextDecorator):
    """Context manager and decorator that holds a lock; it may be used again.

    Owners take turns at every look at their messages, so this is no generator.
    """

    def __init__(self, turns: Turns, rank: int) -> None:
        self._turns = turns
        self._rank = rank

    def __enter__(self) -> None:
        self._turns.acquire(self._rank)

    def __exit__(self, *exc_info: object) -> None:
        self._turns.release()


#: Rank of publishing; that of reading at a takeover is the number of the partition.
PUBLISHING = -1

#: Turns of all owners of this process that publish, and of owners and fetchers that take over.
TURNS = Turns()
