"""Tests of the batches in which a window partition is read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from delaylevel.dispatcher.fetcher import CAUGHT_UP, Fetcher
from delaylevel.dispatcher.record import Batch, WindowMessage
from delaylevel.errors import BrokerError
from delaylevel.model.position import EARLIEST, Position
from delaylevel.structures.positions import ENTRY_MASK
from delaylevel.testing import ManualClock
from support.fakes import FakeMessage, FakeMessageId

T0 = 1_800_000_000_000


class Window:
    """A window partition with its fetcher, and the recorder of its messages.

    Attributes:
        now_s: the monotonic time.
        events: what the fetcher passed on.
        undecided: position of a message whose target is not known before a refresh.
    """

    is_fresh = True

    def __init__(self, patch: pytest.MonkeyPatch, end: Position | None = None) -> None:
        self.now_s = 100.0
        self.descriptions = SimpleNamespace(is_current=lambda: self.is_fresh)
        self.events: list[Any] = []
        self.undecided = (-1, -1, -1)
        self._dues: dict[int, int] = {}
        self._arriving: deque[Any] = deque()
        patch.setattr("delaylevel.dispatcher.fetcher.PartitionReader", lambda *_: self)
        host: Any = SimpleNamespace(
            client=None,
            events=SimpleNamespace(put=self._put),
            clock=ManualClock(T0),
            now_s=lambda: self.now_s,
        )
        unused: Any = None
        records: Any = self
        topic = "persistent://public/default/window"
        self.fetcher = Fetcher(host, topic, EARLIEST, end, records, unused)
        self.fetcher.open()

    def arrive(
        self, entry: int, due_in_ms: int = 0, index: int = -1, size: int = 0, body: bytes = b""
    ) -> None:
        self._dues[entry] = T0 + due_in_ms
        self._arriving.append(FakeMessage(FakeMessageId(Position(1, entry, index), size), body))

    def batches(self) -> list[list[int]]:
        """Return the entry IDs of each batch so far."""
        batches = (each for each in self.events if isinstance(each, Batch))
        return [(each.positions & ENTRY_MASK).tolist() for each in batches]

    def _put(self, event: Any) -> None:
        self.events.append(event)
        if isinstance(event, Batch):
            self.fetcher.batch_taken()

    # -- the reader

    def receive(self, timeout_ms: int) -> Any:
        return self._arriving.popleft() if self._arriving else None

    def burst(self, message: Any) -> Iterator[Any]:
        while message is not None:
            yield message
            message = self.receive(0)

    def ask(self, wake: Callable[[], None]) -> float:
        return float("inf")

    def has_message_available(self) -> bool:
        return bool(self._arriving)

    # -- the recorder

    def packed(self, message: Any, *position: int) -> tuple[Any, ...] | None:
        if position == self.undecided:
            return None
        due_ms = self._dues[position[1]]
        return WindowMessage("", 0, due_ms, "orders", "", 0, "", "", "", 0, {}, b"")

    def refresh(self) -> None:
        assert CAUGHT_UP not in self.events
        self.undecided = (-1, -1, -1)


@pytest.fixture
def window(monkeypatch: pytest.MonkeyPatch) -> Window:
    return Window(monkeypatch)


def test_messages_that_are_due_later_come_together(window: Window) -> None:
    for entry in range(3):
        window.arrive(entry, due_in_ms=5_000)
        window.now_s += 0.02
        window.fetcher.fetch()
    assert window.batches() == []
    window.now_s += 0.1
    window.fetcher.fetch()
    assert window.batches() == [[entry << 10 for entry in range(3)]]


def test_large_messages_come_in_small_batches(window: Window) -> None:
    body = bytes(1 << 20)
    for entry in range(100):
        window.arrive(entry, body=body)
    while window.fetcher.gather():
        pass
    assert [len(each) for each in window.batches()] == [20] * 5


def test_a_message_that_is_due_soon_is_passed_on_at_once(window: Window) -> None:
    window.arrive(0, due_in_ms=5_000)
    window.fetcher.fetch()
    assert window.batches() == []
    window.arrive(1, due_in_ms=100)
    window.fetcher.fetch()
    assert window.batches() == [[0, 1 << 10]]


def test_the_end_of_an_entry_is_reported_when_nothing_follows(window: Window) -> None:
    for index in range(3):
        assert not [each for each in window.events if isinstance(each, Position)], "one is missing"
        window.arrive(5, index=index, size=3)
        while window.fetcher.gather():
            pass
    assert window.events[-1] == Position(1, 5, 2)


def test_a_message_with_a_new_target_and_those_behind_it_belong_to_the_takeover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    window = Window(monkeypatch, end=Position(1, 0))
    window.undecided = (1, 0, 1)
    for index in range(3):
        window.arrive(0, index=index, size=3)
    while window.fetcher.gather():
        pass
    assert window.batches() == [[0], [1, 2]]
    assert window.events[2] is CAUGHT_UP


def test_messages_wait_while_the_description_is_read_again(window: Window) -> None:
    window.is_fresh = False
    for entry in range(2):
        window.arrive(entry)
        assert not window.fetcher.gather()
    window.is_fresh = True
    window.now_s += 0.02
    while window.fetcher.gather():
        pass
    assert [each for ids in window.batches() for each in ids] == [0, 1 << 10]


def test_a_message_that_comes_again_is_dropped_and_a_wrong_order_refused(window: Window) -> None:
    for entries in ([1, 2, 2, 3], [], [3], [3, 4]):
        for entry in entries:
            window.arrive(entry)
        window.fetcher.gather()
    assert [each for ids in window.batches() for each in ids] == [n << 10 for n in (1, 2, 3, 4)]
    window.arrive(3)
    with pytest.raises(BrokerError, match="wrong order"):
        window.fetcher.gather()
