"""The turn of the threads of one process that publish.

Each call of the client releases the interpreter's lock. Threads that publish at the same time
therefore switch for every message, which costs several times as much as the message. So they take
turns, in the order in which they ask for one. A thread gives its turn away while it waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from types import TracebackType


class PublishingTurn(ContextDecorator):
    """A lock that threads get in the order in which they ask for it.

    It is a context manager, and a decorator of functions that need it.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._holder: int | None = None  # identifier of a thread
        self._waiting: deque[tuple[int, threading.Lock]] = deque()

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._mutex:
            if self._holder is None:
                self._holder = me
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append((me, mine))
        mine.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._mutex:
            self._holder = None
            if self._waiting:
                self._holder, first = self._waiting.popleft()
                first.release()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Give the turn to others while the block runs, if this thread has it."""
        if self._holder != threading.get_ident():
            yield
            return
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()


#: The turn of this process.
PUBLISHING = PublishingTurn()
