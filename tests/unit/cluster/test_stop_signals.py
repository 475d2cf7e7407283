"""Tests of the signals that end a long-running command."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from delaylevel.cluster.threads import stop_on_signals


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_may_arrive_while_the_main_thread_holds_the_lock_that_stop_needs(
    number: signal.Signals,
) -> None:
    lock = threading.Lock()
    stopped = threading.Event()

    def stop() -> None:
        if lock.acquire(timeout=20):
            lock.release()
            stopped.set()

    stop_on_signals(stop)
    with lock:
        os.kill(os.getpid(), number)
        assert not stopped.wait(0.05)
    assert stopped.wait(20)
    stopped.clear()
    os.kill(os.getpid(), number)
    assert stopped.wait(20)
