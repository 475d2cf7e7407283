"""Tests of what must have happened before a message is acknowledged, with answers that come late.

The in-memory Pulsar answers at once, so these tests use what all hosts share.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pulsar
import pytest

from delaylevel.consumer import Backoff, Deduplication, ReceivedMessage
from delaylevel.consumer import retry_publisher as module
from delaylevel.consumer.handled_ids import HandledIds
from delaylevel.consumer.listener import listener_of
from delaylevel.consumer.retry import Decision, Verdict
from delaylevel.consumer.retry_publisher import Unfinished
from delaylevel.consumer.workers import RunningListener
from delaylevel.errors import UnsupportedOptionError
from support.fakes import HandClock
from support.world import eventually

TOPIC = "persistent://public/default/orders"
ERROR = ValueError("no")
PARK, BURY = (Decision(delay, "ValueError: no", ERROR) for delay in (timedelta(minutes=1), None))
AWAY = ConnectionError("away")


class Consumer:
    """A consumer that was closed before some of its messages are acknowledged."""

    def __init__(self) -> None:
        self.lost: tuple[str, ...] = ()
        self.acknowledged: list[str] = []
        self.returned: list[str] = []
        self.closed = False

    def acknowledge(self, raw: Any) -> None:
        assert not self.closed
        if raw.name in self.lost:
            raise pulsar.AlreadyClosed
        self.acknowledged.append(raw.name)

    def negative_acknowledge(self, raw: Any) -> None:
        self.returned.append(raw.name)

    def close(self) -> None:
        self.closed = True


class Publisher:
    """A publisher whose confirmations a test gives.

    Attributes:
        calls: time of each call's next attempt, ms; None for a dead letter.
        answers: outcomes of the next calls; the last one stands for all that follow.
        confirmed: what a call waits for.
        seen: function that is called before each answer.
    """

    def __init__(self) -> None:
        self.calls: list[int | None] = []
        self.answers: list[Exception | None] = [None]
        self.confirmed: threading.Event | None = None
        self.seen: Callable[[], object] = lambda: None

    def park(self, failed: Any) -> list[Exception | None]:
        return [self._outcome(each.due_ms) for each in failed]

    def bury(self, message: Any, decision: Decision) -> None:
        error = self._outcome(None)
        if error is not None:
            raise error

    def close(self) -> None:
        pass

    def _outcome(self, due_ms: int | None) -> Exception | None:
        self.calls.append(due_ms)
        self.seen()
        assert self.confirmed is None or self.confirmed.wait(60)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


class Scene:
    """The shared state of a listener that deduplicates."""

    def __init__(self, threaded: bool = False) -> None:
        options = {"subscription": "billing", "retry": Backoff("1m")}
        self.listener = listener_of(print, "orders", None, options)
        self.publisher: Any = Publisher()
        self.consumer: Any = Consumer()
        self.clock = HandClock()
        self.unfinished = Unfinished(self.listener, self.publisher, self.clock, threaded)
        self.handled: HandledIds = HandledIds(Deduplication(capacity=100))
        self.running = RunningListener(self.unfinished, self.handled, ())
        self.tally = self.listener.stats.tally()

    def message(self, name: str) -> ReceivedMessage:
        """Return a newly received message."""
        properties = {"delaylevel.id": name, "delaylevel.target": TOPIC}
        raw = SimpleNamespace(name=name, properties=lambda: properties, partition_key=lambda: "")
        return ReceivedMessage(raw, TOPIC, "billing", 0)

    def fail(self, decision: Decision = PARK, name: str = "a") -> None:
        self.unfinished.add(self.message(name), self.consumer, decision)

    def work(self) -> None:
        while self.unfinished.work():
            pass

    def handle(self, name: str) -> Verdict:
        """Receive a message, and handle it as a host does."""
        message = self.message(name)
        verdict = self.running.begin(message)
        self.running.settle(verdict, None, message, self.consumer, self.tally)
        return verdict


@pytest.fixture
def scene() -> Scene:
    return Scene()


# -- failed messages


def test_a_message_is_acknowledged_when_it_is_stored_elsewhere(scene: Scene) -> None:
    """Each dead letter is stored alone, and copies before all of them."""
    before: list[list[str]] = []
    scene.publisher.seen = lambda: before.append(scene.consumer.acknowledged[:])
    scene.publisher.answers = [None, AWAY, None]
    for name in "abc":
        scene.fail(BURY, name)
    scene.fail(PARK, "d")
    scene.work()
    assert scene.publisher.calls == [scene.clock.now_ms() + 60_000, None, None, None]
    assert before == [[], ["d"], ["d"], ["d", "b"]]
    assert scene.consumer.acknowledged == ["d", "b", "c"], "a refused one stops no other"
    assert scene.unfinished.count == 1
    counts = scene.listener.stats.counts()
    assert (counts.retried, counts.dead) == (1, 2)


def test_a_refused_copy_is_published_again_for_the_same_time(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    scene.publisher.answers = [AWAY]
    due_ms = scene.clock.now_ms() + 60_000
    scene.fail()
    pauses = []
    for _ in range(7):
        scene.work()
        calls, began_s = len(scene.publisher.calls), now_s
        while len(scene.publisher.calls) == calls:
            now_s += 0.5
            scene.unfinished.work()
        scene.clock.advance(round(1000 * (now_s - began_s)))
        pauses.append(now_s - began_s)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert set(scene.publisher.calls) == {due_ms}
    assert (scene.consumer.acknowledged, scene.unfinished.count) == ([], 1)


@pytest.mark.parametrize("decision", [PARK, BURY])
def test_the_broker_keeps_a_message_that_cannot_be_stored_elsewhere(
    scene: Scene, decision: Decision, caplog: pytest.LogCaptureFixture
) -> None:
    scene.publisher.answers = [UnsupportedOptionError("it was encrypted")]
    scene.fail(decision)
    scene.work()
    assert (scene.consumer.returned, scene.consumer.acknowledged) == (["a"], [])
    assert scene.unfinished.count == 0
    assert "it was encrypted" in caplog.text


def test_there_is_a_limit_to_unfinished_messages(scene: Scene) -> None:
    for _ in range(1000):
        assert scene.unfinished.count < scene.unfinished.most
        scene.fail()
    assert scene.unfinished.count == scene.unfinished.most
    scene.work()
    assert scene.unfinished.count == 0
    assert len(scene.consumer.acknowledged) == 1000


def test_many_dead_letters_are_stored_in_proportional_time(scene: Scene) -> None:
    for number in range(4000):
        scene.fail(BURY, str(number))
    began_s = time.process_time()
    scene.work()
    assert time.process_time() - began_s < 3, "each is not moved for each other one"
    assert scene.consumer.acknowledged == [str(number) for number in range(4000)]


def test_a_stop_waits_for_no_refused_message() -> None:
    scene = Scene(threaded=True)
    scene.publisher.answers = [AWAY]
    scene.fail()
    eventually(lambda: scene.publisher.calls, "the copy")
    scene.unfinished.close(time.monotonic() + 60)
    assert (scene.consumer.acknowledged, scene.unfinished.count) == ([], 0)


def test_a_stop_does_not_wait_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(threaded=True)
    scene.publisher.confirmed = threading.Event()
    scene.fail()
    scene.unfinished.close(time.monotonic())
    assert "1 failed messages are not stored" in caplog.text
    scene.publisher.confirmed.set()  # ends the thread
    eventually(lambda: not scene.unfinished.count, "the end")


# -- handled messages


def test_an_id_is_saved_although_the_acknowledgement_fails(scene: Scene) -> None:
    scene.consumer.lost = ("a",)
    with pytest.raises(pulsar.AlreadyClosed):
        scene.handle("a")
    scene.consumer = Consumer()
    assert scene.handle("a") is Verdict.DUPLICATE, "it is delivered again, and recognised"
    assert scene.consumer.acknowledged == ["a"]
    assert (scene.tally.handled, scene.tally.duplicates) == (1, 1)
