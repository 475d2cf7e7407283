"""Tests of the event loop of an application without one, and of the listeners in it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pulsar
import pytest

from delaylevel.consumer import listeners, workers
from delaylevel.consumer.listener import listener_of
from delaylevel.consumer.retry_publisher import Unfinished
from delaylevel.consumer.workers import LoopListener, LoopThread
from support.background import Background
from support.fakes import HandClock
from support.world import eventually


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    made = LoopThread()
    yield made
    made.close(time.monotonic() + 60)
    assert made.loop.is_closed()


def test_a_task_cannot_end_the_loop(thread: LoopThread, caplog: pytest.LogCaptureFixture) -> None:
    async def leave() -> None:
        raise SystemExit(1)

    async def stay() -> int:
        return 1

    thread.loop.call_soon_threadsafe(lambda: thread.loop.create_task(leave()))
    assert asyncio.run_coroutine_threadsafe(stay(), thread.loop).result(10) == 1
    assert asyncio.run_coroutine_threadsafe(stay(), thread.loop).result(10) == 1
    assert "a task ended" in caplog.text


class Consumer:
    """A consumer to which the broker delivers the only message, as it is not acknowledged."""

    def __init__(self) -> None:
        self._left = [SimpleNamespace(properties=dict)]
        self.closed = False

    def receive(self, timeout_ms: int) -> Any:
        if self._left:
            return self._left.pop()
        time.sleep(0.001)
        raise pulsar.Timeout("there is no message")

    def acknowledge(self, raw: Any) -> None:
        raise AssertionError("it was not handled")

    def is_connected(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


def test_a_failed_message_that_nobody_takes_over_is_delivered_again(
    thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_FIRST_PAUSE_S", 0.001)
    opened: list[Consumer] = []
    taken_over = threading.Event()

    def subscribe(number: int) -> Consumer:
        opened.append(Consumer())
        return opened[-1]

    def take_over(*_: Any) -> None:
        if len(opened) == 1:
            raise RuntimeError("can't start new thread")
        taken_over.set()

    async def bill(message: Any) -> None:
        raise ValueError("no account")

    listener = listener_of(bill, "orders", None, {"subscription": "billing", "retry": False})
    unfinished: Any = SimpleNamespace(
        listener=listener, clock=HandClock(), count=0, most=1, add=take_over
    )
    running = LoopListener(unfinished, None, [subscribe], thread.loop)
    running.start()
    try:
        assert taken_over.wait(10)
    finally:
        running.stopping.set()
        assert running.join(time.monotonic() + 60)
        running.close_consumers()
    eventually(lambda: all(consumer.closed for consumer in opened), "the end of the lost one")


class Calling(workers.RunningListener):
    """A listener whose handler runs."""

    running = 1


@pytest.mark.parametrize("in_loop", [False, True])
def test_a_handler_may_close_what_calls_it(in_loop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def close() -> None:
        eventually(app.health, "the start")
        app.close()

    def start(app: Any, listener: Any, loop: Any) -> Any:
        publisher: Any = SimpleNamespace(close=lambda: None)
        unfinished = Unfinished(listener, publisher, HandClock(), threaded=True)
        found: Any = Calling(unfinished, None, [])
        if in_loop:
            loop.call_soon_threadsafe(close)
        else:
            found.threads = [threading.Thread(target=close)]
        found.start()
        return found

    async def coroutine(message: Any) -> None: ...

    monkeypatch.setattr(listeners, "start_listener", start)
    app = listeners.Listeners(SimpleNamespace(subscribe=print), stop_timeout="10ms")
    app.on("orders", subscription="billing")(coroutine if in_loop else print)
    with Background(app.run, lambda: None):
        pass
