"""Tests of failed messages until they are stored elsewhere and acknowledged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from delaylevel.consumer import Backoff, ReceivedMessage
from delaylevel.consumer import host as module
from delaylevel.consumer.host import Unfinished
from delaylevel.consumer.listener import listeners_of
from delaylevel.consumer.retry import Bury, Failure, Park
from delaylevel.errors import DelayTooLongError, UnsupportedOptionError
from support.fakes import HandClock
from support.world import eventually

Done = Callable[[Exception | None], None]
FAILURE = Failure(ValueError("no"), "ValueError: no")


class Raw:
    """A message of the client."""

    def properties(self) -> dict[str, str]:
        return {"delaylevel.id": "a", "delaylevel.target": "t"}


class Consumer:
    """A consumer that records acknowledgements."""

    def __init__(self) -> None:
        self.acknowledged: list[Any] = []
        self.returned: list[Any] = []
        self.error: Exception | None = None

    def acknowledge(self, raw: Any) -> None:
        if self.error is not None:
            raise self.error
        self.acknowledged.append(raw)

    def negative_acknowledge(self, raw: Any) -> None:
        self.returned.append(raw)


class FakePublisher:
    """A publisher whose confirmations a test gives.

    Attributes:
        calls: delay (None for a dead letter) and function for the outcome of each call.
        failures: the failed attempt of each call.
        answer: outcome given at once; ``...`` for none.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[timedelta | None, Done]] = []
        self.failures: list[Failure] = []
        self.answer: Any = ...

    def park(self, message: Any, delay: timedelta, failure: Failure, done: Done) -> None:
        self._take(delay, failure, done)

    def bury(self, message: Any, failure: Failure, done: Done) -> None:
        self._take(None, failure, done)

    def close(self) -> None:
        pass

    def _take(self, delay: timedelta | None, failure: Failure, done: Done) -> None:
        self.failures.append(failure)
        self.calls.append((delay, done))
        if self.answer is not ...:
            done(self.answer)


class Scene:
    """Failed messages of a listener."""

    def __init__(self, threaded: bool) -> None:
        (self.listener,) = listeners_of(
            print, "orders", None, {"subscription": "billing", "retry": Backoff("1m")}
        )
        self.publisher = FakePublisher()
        self.consumer = Consumer()
        self.clock = HandClock()
        self.unfinished = Unfinished(self.listener, self.publisher, self.clock, threaded)
        self.raw = Raw()
        self.message = ReceivedMessage(self.raw, "t", "billing", 0)

    def add(self, decision: Park | Bury) -> None:
        self.unfinished.add(self.message, self.consumer, decision)


PARK = Park(timedelta(minutes=1), FAILURE)


@pytest.fixture
def scene() -> Scene:
    return Scene(threaded=False)


def test_a_message_is_acknowledged_when_its_copy_is_stored(scene: Scene) -> None:
    scene.add(PARK)
    assert scene.unfinished.work()
    ((delay, done),) = scene.publisher.calls
    assert delay == timedelta(minutes=1)
    assert not scene.unfinished.work()
    assert scene.consumer.acknowledged == []
    done(None)
    assert scene.unfinished.work()
    assert scene.consumer.acknowledged == [scene.raw]
    assert scene.unfinished.count == 0
    assert scene.listener.stats.counts().retried == 1


def test_a_dead_letter_is_acknowledged_when_it_is_stored(scene: Scene) -> None:
    scene.publisher.answer = None
    scene.add(Bury(FAILURE))
    while scene.unfinished.work():
        pass
    assert scene.consumer.acknowledged == [scene.raw]
    assert scene.listener.stats.counts().dead == 1


def test_a_refused_copy_is_published_again_for_the_same_time(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    scene.publisher.answer = ConnectionError("away")
    scene.add(PARK)
    pauses = []
    for _ in range(7):
        while scene.unfinished.work():
            pass
        assert scene.consumer.acknowledged == []
        calls = len(scene.publisher.calls)
        began_s = now_s
        while len(scene.publisher.calls) == calls:
            now_s += 0.5
            scene.unfinished.work()
        scene.clock.advance(round(1000 * (now_s - began_s)))
        pauses.append(now_s - began_s)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert scene.publisher.calls[-2][0] < timedelta(seconds=30)
    assert scene.publisher.calls[-1][0] == timedelta(0)
    scene.publisher.calls[-1][1](None)
    assert scene.unfinished.count == 1


def test_failures_are_logged(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.add(PARK)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.messages == [
        "print (persistent://public/default/orders, billing): attempt 1 of 2 of a: "
        "ValueError: no; again in 1m"
    ]
    scene.add(Bury(FAILURE._replace(trace="Traceback ...")))
    assert caplog.records[-1].levelname == "ERROR"
    assert "to the dead-letter topic\nTraceback ..." in caplog.messages[-1]


def test_a_lost_consumer_does_not_end_the_thread() -> None:
    scene = Scene(threaded=True)
    scene.publisher.answer = None
    scene.consumer.error = ConnectionError("closed")
    scene.add(PARK)
    eventually(lambda: not scene.unfinished.count, "the end")
    scene.consumer.error = None
    scene.add(PARK)
    eventually(lambda: scene.consumer.acknowledged, "the acknowledgement")
    scene.unfinished.close(time.monotonic() + 5)


def test_a_publisher_that_raises_does_not_end_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(threaded=True)
    monkeypatch.setattr(module, "_SHORTEST_PAUSE_S", 0.01)

    def raise_once(*arguments: Any) -> None:
        monkeypatch.undo()
        raise RuntimeError("a bug")

    monkeypatch.setattr(scene.publisher, "park", raise_once)
    scene.publisher.answer = None
    scene.add(PARK)
    eventually(lambda: scene.consumer.acknowledged, "the acknowledgement")
    scene.unfinished.close(time.monotonic() + 5)


def test_a_stop_waits_for_confirmations() -> None:
    scene = Scene(threaded=True)
    scene.add(PARK)
    eventually(lambda: scene.publisher.calls, "the copy")
    threading.Timer(0.2, lambda: scene.publisher.calls[0][1](None)).start()
    scene.unfinished.close(time.monotonic() + 10)
    assert scene.consumer.acknowledged == [scene.raw]


def test_a_stop_leaves_refused_messages_unacknowledged() -> None:
    scene = Scene(threaded=True)
    scene.publisher.answer = ConnectionError("away")
    scene.add(PARK)
    eventually(lambda: scene.publisher.calls, "the copy")
    started_s = time.monotonic()
    scene.unfinished.close(started_s + 10)
    assert time.monotonic() - started_s < 5
    assert scene.consumer.acknowledged == []


def test_a_stop_does_not_wait_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(threaded=True)
    scene.add(PARK)
    scene.unfinished.close(time.monotonic() + 0.2)
    assert "1 failed messages are not stored" in caplog.text
    eventually(lambda: scene.publisher.calls, "the copy")
    scene.publisher.calls[0][1](None)  # ends the thread
    eventually(lambda: not scene.unfinished.count, "the end")


def test_there_is_a_limit_to_unfinished_messages(scene: Scene) -> None:
    for _ in range(1000):
        assert not scene.unfinished.full
        scene.add(PARK)
    assert scene.unfinished.full
    scene.unfinished.wait_for_room(0.01)
    scene.publisher.answer = None
    while scene.unfinished.work():
        pass
    assert not scene.unfinished.full
    assert len(scene.consumer.acknowledged) == 1000


def test_a_delay_that_the_levels_do_not_take_makes_a_dead_letter(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        raise ValueError("no")
    except ValueError as error:
        scene.add(Park(timedelta(days=400), Failure(error, "ValueError: no")))
    scene.unfinished.work()
    ((_, done),) = scene.publisher.calls
    done(DelayTooLongError("a delay of 400d is too long", delay_ms=4, maximum_delay_ms=3))
    scene.unfinished.work()
    (_, (delay, done)) = scene.publisher.calls
    assert delay is None
    failure = scene.publisher.failures[-1]
    assert failure.reason == "ValueError: no (no retry: a delay of 400d is too long)"
    assert "Traceback" in failure.trace
    assert "to the dead-letter topic" in caplog.text
    done(None)
    scene.unfinished.work()
    assert scene.consumer.acknowledged == [scene.raw]
    counts = scene.listener.stats.counts()
    assert (counts.retried, counts.dead, scene.unfinished.count) == (0, 1, 0)


@pytest.mark.parametrize("decision", [PARK, Bury(FAILURE)])
def test_the_broker_keeps_a_message_that_cannot_be_stored_elsewhere(
    scene: Scene, decision: Park | Bury, caplog: pytest.LogCaptureFixture
) -> None:
    scene.publisher.answer = UnsupportedOptionError("it was encrypted")
    scene.add(decision)
    while scene.unfinished.work():
        pass
    assert scene.consumer.returned == [scene.raw]
    assert scene.consumer.acknowledged == []
    assert scene.unfinished.count == 0
    assert "it was encrypted" in caplog.text


def test_a_thread_that_cannot_be_started_is_started_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(threaded=True)
    scene.publisher.answer = None

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            scene.add(PARK)
    assert scene.unfinished.count == 0
    scene.add(PARK)
    eventually(lambda: scene.consumer.acknowledged, "the acknowledgement", 5)
    scene.unfinished.close(time.monotonic() + 5)
