"""Parallel reads: a few threads read ranges, and one generator yields their results."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
S = TypeVar("S")

_THREADS = 4
_QUEUED_RESULTS = 8
_POLL_S = 0.2


class ReadProgress:
    """Progress of a read by several threads.

    Args:
        tell: called with the number of messages read since the last call, by one thread at a time.
        expect: called with an estimate of the number of messages before they are read.
    """

    def __init__(
        self,
        tell: Callable[[int], None] | None = None,
        expect: Callable[[int], None] | None = None,
    ) -> None:
        self._tell = tell
        self.expect = expect
        self._lock = threading.Lock()

    def add(self, messages: int) -> None:
        """Report messages that were read."""
        if self._tell is not None:
            with self._lock:
                self._tell(messages)


def read_in_parallel(
    items: Sequence[S], read: Callable[[S], Iterable[T]]
) -> Generator[T, None, None]:
    """Yield the results of ``read`` for each item, in any order.

    Threads call ``read`` in the order of the items. At most eight results wait for the caller, so
    that memory is bounded by their size. When the caller closes the generator, the threads end at
    their next result. An exception of ``read`` is raised after the other threads have ended.
    """
    waiting: queue.SimpleQueue[S] = queue.SimpleQueue()
    for item in items:
        waiting.put(item)
    results: queue.Queue[T | BaseException | None] = queue.Queue(_QUEUED_RESULTS)
    stop = threading.Event()

    def put(result: T | BaseException | None) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                results.put(result, timeout=_POLL_S)
                return

    def work() -> None:
        try:
            while not stop.is_set():
                try:
                    item = waiting.get_nowait()
                except queue.Empty:
                    break
                for result in read(item):
                    put(result)
                    if stop.is_set():
                        return
            put(None)
        except BaseException as error:  # raised again in the caller's thread
            put(error)

    running = min(_THREADS, len(items))
    workers = [
        threading.Thread(target=work, name=f"delaylevel-inspect-{number}", daemon=True)
        for number in range(running)
    ]
    for worker in workers:
        worker.start()
    try:
        while running:
            result = results.get()
            if result is None:
                running -= 1
            elif isinstance(result, BaseException):
                raise result
            else:
                yield result
    finally:
        stop.set()
        for worker in workers:
            worker.join()
