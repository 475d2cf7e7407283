"""Reading ranges side by side: a few threads read, one generator hands out what they make."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
S = TypeVar("S")

THREADS = 4
_AHEAD = 8
_POLL_S = 0.2


class Progress:
    """Counts what was read, from several threads, and tells whoever wants to know.

    Args:
        tell: called with the number of messages since the last call, by one thread at a time.
        expect: called with an estimate of how many will be read, before they are.
    """

    def __init__(
        self,
        tell: Callable[[int], None] | None = None,
        expect: Callable[[int], None] | None = None,
    ) -> None:
        self._tell = tell
        self.expect = expect
        self._lock = threading.Lock()
        self.messages = 0

    def add(self, messages: int) -> None:
        """Count some more."""
        with self._lock:
            self.messages += messages
            if self._tell is not None:
                self._tell(messages)


def side_by_side(
    items: Sequence[S], read: Callable[[S], Iterable[T]], threads: int = THREADS
) -> Generator[T, None, None]:
    """Yield what ``read`` makes of each item, in whatever order it comes.

    At most eight results wait for the caller, so that memory is bounded by their size. When the
    caller closes the generator, the threads end at their next result.

    Args:
        items: what is read; the first ones are begun first.
        read: called in a thread; yields results.
        threads: how many items are read at once.

    Raises:
        Exception: whatever ``read`` raises, after the other threads have ended.
    """
    if not items:
        return
    waiting = iter(items)
    results: queue.Queue[T | BaseException | None] = queue.Queue(_AHEAD)
    stop = threading.Event()
    lock = threading.Lock()

    def put(result: T | BaseException | None) -> bool:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                results.put(result, timeout=_POLL_S)
                return True
        return False

    def work() -> None:
        try:
            while not stop.is_set():
                with lock:
                    item = next(waiting, _END)
                if item is _END:
                    break
                for result in read(item):  # type: ignore[arg-type]
                    if not put(result):
                        return
            put(None)
        except BaseException as error:  # handed to the caller
            put(error)

    count = min(threads, len(items))
    workers = [
        threading.Thread(target=work, name=f"delaylevel-inspect-{number}", daemon=True)
        for number in range(count)
    ]
    for worker in workers:
        worker.start()
    try:
        while count:
            result = results.get()
            if result is None:
                count -= 1
            elif isinstance(result, BaseException):
                raise result
            else:
                yield result
    finally:
        stop.set()
        for worker in workers:
            worker.join()


class _End:
    """Marks the end of the items, which may be anything themselves."""


_END = _End()
