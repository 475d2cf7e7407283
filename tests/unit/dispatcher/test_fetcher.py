"""Tests of the batches in which a window partition is read."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from delaylevel.cluster.scheduler import Lanes
from delaylevel.dispatcher.fetcher import CaughtUp, Fetcher, FetcherTask
from delaylevel.dispatcher.record import FetchedBatch, WindowMessage
from delaylevel.errors import BrokerError
from delaylevel.model.clock import SystemClock
from delaylevel.model.position import EARLIEST, Position
from support.fakes import FakeMessage, FakeMessageId

TOPIC = "persistent://public/default/window"
Send = Callable[..., None]
unused: Any = None


class Message:
    """A message of the client's core, due at a time in ms since the epoch."""

    def __init__(self, entry: int, due_ms: int) -> None:
        self.entry = entry
        self.due_ms = due_ms

    def message_id(self) -> Message:
        return self

    def ledger_id(self) -> int:
        return 1

    def entry_id(self) -> int:
        return self.entry

    def batch_index(self) -> int:
        return -1


class Records:
    """A recorder of such messages."""

    cancellations = 0
    is_current = True

    def packed(self, message: Message, *position: int) -> tuple[Any, ...]:
        return tuple(WindowMessage("", 0, message.due_ms, "orders", "", 0, "", "", "", 0, {}, b""))


class Reader:
    """A reader that receives what is put into a queue."""

    def __init__(self, arriving: queue.Queue[Message]) -> None:
        self._arriving = arriving

    def receive(self, timeout_ms: int) -> Message | None:
        try:
            return self._arriving.get(timeout=max(timeout_ms, 1) / 1000)
        except queue.Empty:
            return None

    def ask(self, wake: Callable[[], None]) -> float:
        return time.monotonic() + 0.001

    def burst(self, message: Message | None) -> Iterator[Message]:
        while message is not None:
            yield message
            message = self.receive(1)

    def close(self) -> None:
        """Close nothing."""


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Send, list[Any]]]:
    """Return a function that sends messages due after some time, in ms, and the events."""
    clock, events = SystemClock(), list[Any]()
    arriving: queue.Queue[Message] = queue.Queue()
    reader = Reader(arriving)
    monkeypatch.setattr("delaylevel.dispatcher.fetcher.PartitionReader", lambda *_: reader)

    def put(event: Any) -> None:
        events.append(event)
        if isinstance(event, FetchedBatch):
            fetcher.batch_taken()

    def send(due_in_ms: Sequence[int], pause_s: float = 0.0) -> None:
        for number, each in enumerate(due_in_ms):
            arriving.put(Message(number, clock.now_ms() + each))
            time.sleep(pause_s)

    fetcher = Fetcher(None, TOPIC, EARLIEST, None, Records(), put, unused, clock)  # type: ignore[arg-type]
    lanes = Lanes()
    task = FetcherTask(fetcher, lanes)
    task.start()
    yield send, events
    task.stop()
    lanes.close()


def batches(events: list[Any], messages: int) -> list[int]:
    """Wait for a number of messages; return the sizes of their batches."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        assert not [each for each in events if isinstance(each, Exception)]
        sizes = [len(each) for each in list(events) if isinstance(each, FetchedBatch)]
        if sum(sizes) >= messages:
            return sizes
        time.sleep(0.002)
    raise AssertionError(f"{events} after 20 s")


def test_messages_that_are_due_later_come_in_few_batches(
    fetched: tuple[Send, list[Any]],
) -> None:
    send, events = fetched
    send([5_000] * 20, 0.01)
    assert len(batches(events, 20)) < 10
    assert isinstance(events[0], CaughtUp)


def test_a_message_that_is_due_soon_is_passed_on_at_once(
    fetched: tuple[Send, list[Any]],
) -> None:
    send, events = fetched
    for number in range(1, 11):
        began = time.monotonic()
        send([100])
        batches(events, number)
        if time.monotonic() - began < 0.08:
            return  # a busy machine takes longer, but not always
    raise AssertionError("every message was kept for a while")


def test_a_message_that_is_due_soon_ends_a_batch_of_others(
    fetched: tuple[Send, list[Any]],
) -> None:
    send, events = fetched
    send([5_000, 5_000, 0], 0.005)
    batches(events, 3)
    last = [each for each in events if isinstance(each, FetchedBatch)][-1]
    assert last.due_ms[-1] == min(last.due_ms)


class NewTarget:
    """A recorder that does not know the target of one message before it is refreshed."""

    cancellations = 0
    is_current = True

    def __init__(self) -> None:
        self.undecided = (1, 0, 1)
        self.events: list[Any] = []

    def packed(self, message: Any, *position: int) -> tuple[Any, ...] | None:
        if position == self.undecided:
            return None
        return tuple(WindowMessage("", 0, 0, "orders", "", 0, "", "", "", 0, {}, b""))

    def refresh(self) -> None:
        assert not any(isinstance(event, CaughtUp) for event in self.events)
        self.undecided = (-1, -1, -1)


class EndedReader(Reader):
    """A reader of a partition to which nothing is appended."""

    def has_message_available(self) -> bool:
        return not self._arriving.empty()


def test_a_message_with_a_new_target_and_those_behind_it_belong_to_the_takeover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arriving: queue.Queue[Any] = queue.Queue()
    for index in range(3):
        arriving.put(FakeMessage(FakeMessageId(Position(1, 0, index), 3)))
    reader = EndedReader(arriving)
    monkeypatch.setattr("delaylevel.dispatcher.fetcher.PartitionReader", lambda *_: reader)
    records = NewTarget()
    end = Position(1, 0)
    put = records.events.append
    fetcher = Fetcher(None, TOPIC, EARLIEST, end, records, put, unused, SystemClock())  # type: ignore[arg-type]
    lanes = Lanes()
    task = FetcherTask(fetcher, lanes)
    task.start()
    assert batches(records.events, 3) == [1, 2]
    task.stop()
    lanes.close()
    found = [each.entry_ids for each in records.events if isinstance(each, FetchedBatch)]
    assert found == [[0], [1, 2]]
    assert isinstance(records.events[2], CaughtUp)


def test_a_message_that_comes_again_is_dropped_and_a_wrong_order_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arriving: queue.Queue[Message] = queue.Queue()
    reader = Reader(arriving)
    monkeypatch.setattr("delaylevel.dispatcher.fetcher.PartitionReader", lambda *_: reader)
    events: list[Any] = []
    clock = SystemClock()
    fetcher = Fetcher(None, TOPIC, EARLIEST, None, Records(), events.append, unused, clock)  # type: ignore[arg-type]
    fetcher.open()
    for entries in ([1, 2, 2, 3], [], [3], [3, 4]):
        for entry in entries:
            arriving.put(Message(entry, 0))
        fetcher.gather()
    found = [each.entry_ids for each in events if isinstance(each, FetchedBatch)]
    assert [each for ids in found for each in ids] == [entry << 10 for entry in (1, 2, 3, 4)]
    arriving.put(Message(3, 0))
    with pytest.raises(BrokerError, match="wrong order"):
        fetcher.gather()
