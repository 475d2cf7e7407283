"""Tests of the end of a listener."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from delaylevel.consumer import ReceivedMessage
from delaylevel.consumer.handled_ids import HandledIds
from delaylevel.consumer.host import Parts, Unfinished
from delaylevel.consumer.listener import listeners_of
from delaylevel.consumer.listeners import Started
from support.fakes import HandClock
from support.world import eventually


class Raw:
    """A message of the client."""

    def __init__(self, name: str) -> None:
        self.name = name

    def properties(self) -> dict[str, str]:
        return {"delaylevel.id": self.name, "delaylevel.target": "t"}

    def partition_key(self) -> str:
        return ""


class LateLog:
    """A store whose confirmations come in another thread, when it is flushed."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], object]] = []

    def start(self, memory: Any) -> None:
        pass

    def append(self, key: int, saved: Callable[[], object]) -> None:
        self.waiting.append(saved)

    def flush(self, timeout_s: float) -> bool:
        waiting, self.waiting = self.waiting, []
        thread = threading.Thread(target=lambda: [saved() for saved in waiting])
        thread.start()
        thread.join()
        return True

    def close(self) -> None:
        pass

    @property
    def unsaved(self) -> int:
        return len(self.waiting)


class Running:
    """The consumer of a listener, and its end."""

    def __init__(self) -> None:
        self.acknowledged: list[str] = []
        self.closed = False

    def acknowledge(self, raw: Raw) -> None:
        assert not self.closed
        self.acknowledged.append(raw.name)

    def close(self) -> None:
        self.closed = True


def test_what_was_handled_is_acknowledged_before_the_end() -> None:
    (listener,) = listeners_of(print, "orders", None, {"subscription": "billing"})
    id_log, running, clock = LateLog(), Running(), HandClock()
    nobody: Any = Running()
    handled = HandledIds(None, 100, id_log)
    unfinished = Unfinished(listener, nobody, clock)
    parts = Parts(listener, listener.handling(handled), unfinished, clock)
    tally = listener.stats.tally()

    def handle(name: str) -> None:
        received = [ReceivedMessage(Raw(name), "t", "billing", 0)]
        batch, _ = parts.sort(received, running, tally)
        parts.succeeded(batch, running, tally)

    handle("a")
    id_log.flush(1)
    eventually(lambda: running.acknowledged == ["a"], "the first acknowledgement", 5)
    handle("b")
    publisher: Any = type("Publisher", (), {"close": lambda self, timeout_s: None})()
    host: Any = running
    Started(host, unfinished, publisher, handled).close(time.monotonic() + 5)
    assert running.acknowledged == ["a", "b"]
    assert unfinished.count == 0
