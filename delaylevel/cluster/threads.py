"""Slow work in threads of its own, and the signals that end a process."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from types import FrameType
from typing import NamedTuple, TypeVar

log = logging.getLogger(__name__)

#: Runs slow work: opening and closing producers waits for the broker.
Starter = Callable[[Callable[[], None]], object]

# Opening and closing take milliseconds, unless the broker is away.
_EXIT_S = 2.0
_CLOSING_S = 5.0
# With the monotonic time of the begin of each, in that order: `is_crowded` reads it from the end.
_running: dict[threading.Thread, float] = {}
# Limits of the work that runs: what began in the last second, and all. What takes longer waits for
# a broker that hangs, and is not to delay the others.
_MANY, _MOST = 100, 1_000


def in_thread(work: Callable[[], None]) -> threading.Thread:
    """Run work in a new thread, and return it; it delays the end of the process by 2 s at most."""

    def run() -> None:
        try:
            work()
        finally:
            _running.pop(thread, None)

    # A daemon: Python would wait for any other one, for as long as a broker hangs.
    thread = threading.Thread(target=run, name="delaylevel-background", daemon=True)
    _running[thread] = time.monotonic()
    try:
        thread.start()
    except RuntimeError:
        _running.pop(thread, None)
        raise
    return thread


def is_crowded() -> bool:
    """Return True if so much work is under way that the next piece had better wait."""
    begun_s = list(_running.values())
    if len(begun_s) < _MANY:
        return False
    return len(begun_s) >= _MOST or begun_s[-_MANY] > time.monotonic() - 1


def in_background(work: Callable[[], None]) -> None:
    """Run work that ends by itself in a new thread, or here if none can be started."""
    try:
        in_thread(work)
    except RuntimeError:
        work()  # its caller has noted that it goes on, and would wait for it for ever


class HostLoop(NamedTuple):
    """The loop of a host, as the parts see it that never let it wait."""

    start: Starter = in_background  # runs slow work
    now_s: Callable[[], float] = time.monotonic
    wake: Callable[[], None] = lambda: None  # lets the loop look soon, from any thread
    # True while brokers serve the host's own topics. By default, an opening of a target always
    # waits for the admin interface.
    connected: Callable[[], bool] = lambda: False


class GrowingPause:
    """Pauses between attempts: each failure in a row doubles them, up to a limit."""

    def __init__(self, first_s: float = 1.0, longest_s: float = 30.0) -> None:
        self._first_s = self._next_s = first_s
        self._longest_s = longest_s

    def next_s(self, longest_s: float | None = None) -> float:
        """Return the pause after a failure, in s, with a limit of its own if it has one."""
        pause_s = min(self._next_s, self._longest_s if longest_s is None else longest_s)
        self._next_s = 2 * pause_s
        return pause_s

    def reset(self) -> None:
        """Begin with the first pause again, after a success."""
        self._next_s = self._first_s


Item = TypeVar("Item")
Result = TypeVar("Result")
# The broker would only queue more requests, and each may hold a connection.
_AT_ONCE = 8


def in_parallel(request: Callable[[Item], Result], items: Collection[Item]) -> list[Result]:
    """Return the results of requests in the order of the items, or raise the first error."""
    # No request is made after an error, and the threads end with the call. Not by an executor of
    # the standard library: it takes no work while the process ends.
    todo = deque(enumerate(items))
    found: dict[int, Result] = {}
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            try:
                index, item = todo.popleft()
            except IndexError:
                return
            try:
                found[index] = request(item)
            except BaseException as error:  # raised again in the calling thread
                errors.append(error)

    started: list[threading.Thread] = []
    # The calling thread takes part. If no other one can be started, it does everything.
    with suppress(RuntimeError):
        for _ in range(min(_AT_ONCE, len(items)) - 1):
            thread = threading.Thread(target=work, name="delaylevel-parallel")
            thread.start()
            started.append(thread)
    work()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]
    return [found[index] for index in range(len(items))]


def at_once(work: Callable[[], None]) -> None:
    """Run work in the calling thread, which waits for it."""
    work()


class BackgroundWork:
    """Slow work that can be waited for, each piece in a thread of its own; thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pieces = 0

    def start(self, work: Callable[[], None]) -> None:
        """Run a piece of work, as `in_background` does."""
        with self._changed:
            self._pieces += 1

        def run() -> None:
            try:
                work()
            finally:
                with self._changed:
                    self._pieces -= 1
                    self._changed.notify_all()

        in_background(run)

    def join(self, timeout_s: float = _CLOSING_S) -> bool:
        """Wait for the end of all work; return False if it takes longer than a time in s."""
        # While a producer is being closed, closing its client fails.
        with self._changed:
            return self._changed.wait_for(lambda: not self._pieces, timeout_s)


def _wait() -> None:
    """Wait for the threads; if Python exits while one is inside the client, the process aborts."""
    until_s = time.monotonic() + _EXIT_S
    for thread in list(_running):
        thread.join(max(0.0, until_s - time.monotonic()))


def after_fork(function: Callable[[], object]) -> None:
    """Call a function in each process that is forked from this one, where processes can fork."""
    register = getattr(os, "register_at_fork", None)  # Windows has none
    if register is not None:
        register(after_in_child=function)


atexit.register(_wait)
after_fork(_running.clear)  # a fork copies no threads


_SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: Time that a service has to end, in s. Each wait for a broker has its own limit, but process
#: managers limit their sum: to 60 s in our examples.
END_S = 45.0


def stop_on_signals(stop: Callable[[], None], within_s: float | None = None) -> Callable[[], None]:
    """Call a function, in a thread of its own, at each SIGTERM or Ctrl-C; return how to undo it."""
    # A handler runs between two instructions of the main thread, which may just then hold the lock
    # of the event that `stop` sets. `SimpleQueue.put` is the one call that is safe in that place.
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()

    def wait() -> None:
        until_s = None
        while True:
            left_s = None if until_s is None else max(until_s - time.monotonic(), 0.0)
            try:
                signum = signals.get(timeout=left_s)
            except queue.Empty:
                break
            if not signum:
                return
            in_background(stop)
            if within_s is not None and until_s is None:
                until_s = time.monotonic() + within_s
        log.error("ended at once: brokers do not answer, and it was asked to end")
        os._exit(1)

    threading.Thread(target=wait, name="delaylevel-signals", daemon=True).start()

    def signalled(signum: int, frame: FrameType | None) -> None:
        signals.put(signum)

    earlier = {each: signal.signal(each, signalled) for each in _SIGNALS}

    def restore() -> None:
        for each, handler in earlier.items():
            # None is a handler that was not installed by Python code.
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
        signals.put(0)

    return restore
