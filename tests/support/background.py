"""Long-running code in threads of a test, stopped at its end."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from delaylevel import topics
from delaylevel.cluster.scheduler import Scheduler
from delaylevel.mover.local import LocalMover
from delaylevel.mover.service import MoverService

Self = TypeVar("Self", bound="Background")
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """End this process when the one that started it ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Background:
    """A function that runs in its own thread until it is stopped; a context manager.

    ``failure`` is the exception that ended it early. With ``patience_s`` None, its end may take for
    ever.
    """

    patience_s: float | None = 60

    def __init__(self, run: Callable[[], Any], stop: Callable[[], Any]) -> None:
        self.failure: BaseException | None = None
        self._run = run
        self._stop = stop
        self._thread = threading.Thread(target=self._guarded, name="background")
        self._thread.start()

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:  # stop() raises it
            self.failure = error

    def stop(self) -> None:
        """Stop the function, wait for its end and raise its failure."""
        self._stop()
        self._thread.join(self.patience_s)
        assert not self._thread.is_alive()
        if self.failure is not None:
            raise self.failure

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Moving(Background):
    def __init__(self, mover: LocalMover) -> None:
        self._mover = mover
        self._end = threading.Event()
        super().__init__(self._move, self._end.set)

    def _move(self) -> None:
        while not self._end.wait(0.05):
            self._mover.run_once()


class Serving(Background):
    def __init__(self, dispatcher: Any) -> None:
        self.dispatcher = dispatcher
        super().__init__(dispatcher.run, dispatcher.stop)

    @property
    def owned(self) -> list[int]:
        """The window partitions that it owns and has recovered."""
        return sorted(
            index
            for (_, index), stats in self.dispatcher.stats().items()
            if stats.state == "releasing"
        )

    def total(self, name: str) -> int:
        return sum(getattr(each, name) for each in self.dispatcher.stats().values())


@contextmanager
def serving_movers(client: Any, admin: Any, level_topic: str) -> Iterator[MoverService]:
    """Run the movers of a service, without its dispatcher."""
    scheduler = Scheduler()
    movers = MoverService(client, admin, scheduler, trigger_ms=100)
    movers.add(topics.describe(admin, level_topic, search=True))
    movers.start()
    try:
        yield movers
    finally:
        movers.close()
        scheduler.close()
