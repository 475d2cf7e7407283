"""Tests of consumers that are opened again."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pulsar
import pytest

from delaylevel.consumer import workers as module
from delaylevel.consumer.listener import ListenerStats
from delaylevel.consumer.retry_publisher import Unfinished
from delaylevel.consumer.workers import RunningListener, Subscribed
from support.fakes import HandClock


class FakeConsumer:
    """A consumer with a connection."""

    connected, closed = True, False

    def is_connected(self) -> bool:
        return self.connected

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.001)


def subscribed(*errors: Exception) -> Subscribed:
    """Return a subscription whose first attempts fail."""
    left = list(errors)

    def subscribe() -> FakeConsumer:
        if left:
            raise left.pop(0)
        return FakeConsumer()

    return Subscribed(subscribe, "messages of billing", threading.Event())


def test_a_failure_that_stays_is_raised_at_the_start() -> None:
    with pytest.raises(pulsar.AuthorizationError):
        subscribed(pulsar.AuthorizationError("no")).start()


def test_a_failure_that_may_pass_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    source = subscribed(pulsar.ConsumerBusy("busy"), pulsar.ConsumerBusy("busy"))
    source.start()
    assert not source.ready
    assert isinstance(source.get(), FakeConsumer)
    assert source.ready
    failed, over = (record.message for record in caplog.records)
    assert failed == "messages of billing: ConsumerBusy: busy; trying again until it works"
    assert over.startswith("messages of billing: works again")


def test_a_consumer_without_connection_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    source = subscribed()
    consumer = source.get()
    now_s = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    consumer.connected = False
    source.check(consumer)
    now_s = 59.0
    source.check(consumer)
    assert source.get() is consumer
    assert not source.ready
    now_s = 61.0
    source.check(consumer)
    assert source.get() is not consumer


def test_a_late_failure_of_a_lost_consumer_does_not_wait_for_the_next_one() -> None:
    """Each call of a coroutine that fails with its consumer has a thread for this."""
    opening, opened = threading.Event(), threading.Event()
    first = FakeConsumer()

    def subscribe() -> FakeConsumer:
        if first.closed:
            opening.set()
            assert opened.wait(30)
        return first

    source = Subscribed(subscribe, "messages of billing", threading.Event())
    assert source.get() is first
    source.fail(first, "lost")
    again = threading.Thread(target=source.get)
    again.start()
    late = threading.Thread(target=source.fail, args=(first, "lost"))
    try:
        assert opening.wait(10)
        late.start()
        late.join(5)
        assert not late.is_alive()
    finally:
        opened.set()
        again.join(30)


def test_consumers_are_closed_together_as_each_may_wait_for_a_broker_that_hangs() -> None:
    meeting, closed = threading.Barrier(4), list[int]()

    class Hanging(FakeConsumer):
        def close(self) -> None:
            closed.append(meeting.wait(4))

    billing: Any = SimpleNamespace(is_coroutine=False, concurrency=0, consumers=2)
    billing.condition, billing.stats = None, ListenerStats()
    publisher: Any = SimpleNamespace(close=lambda: None)
    unfinished = Unfinished(billing, publisher, HandClock(), threaded=True)
    listener = RunningListener(unfinished, None, [lambda _: Hanging(), lambda _: Hanging()])
    listener.start()
    listener.close(time.monotonic())
    assert sorted(closed) == [0, 1, 2, 3]
