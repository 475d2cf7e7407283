"""Tests of threads in the background, of what waits for their end, and of signals."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from delaylevel.cluster import threads
from delaylevel.cluster.targets.producer import Opened, TargetProducer
from delaylevel.cluster.threads import (
    BackgroundWork,
    GrowingPause,
    HostLoop,
    in_parallel,
    stop_on_signals,
)
from support.python import python

IN_THREAD = """
import threading, time
from delaylevel.cluster.threads import in_parallel, in_thread

def work():
    {}

in_thread(work)
"""
#: Requests at the end of the process need no threads.
AT_THE_END = "threading.main_thread().join(); print(*in_parallel(lambda item: 2 * item, [1, 2, 3]))"


@pytest.mark.parametrize(
    ("work", "printed"),
    [
        ("time.sleep(0.3); print('done')", "done\n"),
        ("time.sleep(60); print('done')", ""),
        (AT_THE_END, "2 4 6\n"),
    ],
)
def test_a_process_waits_for_its_threads_for_a_limited_time(work: str, printed: str) -> None:
    done = python("-u", "-c", IN_THREAD.format(work), timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


def test_work_is_waited_for() -> None:
    work, go, ended = BackgroundWork(), threading.Event(), []
    assert work.join()  # there is none
    for number in range(3):
        work.start(lambda number=number: (go.wait(60), ended.append(number)))
    assert not work.join(0)
    go.set()
    assert work.join(60)
    assert sorted(ended) == [0, 1, 2]


def test_a_few_targets_are_opened_at_a_time_and_those_that_hang_delay_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, running, opened = [0.0], dict[threading.Thread, float](), list[int]()
    monkeypatch.setattr(threads, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(threads, "_running", running)
    monkeypatch.setattr(threads, "_MANY", 2)
    monkeypatch.setattr(threads, "_MOST", 4)
    go, loop = threading.Event(), HostLoop()

    def target(number: int) -> TargetProducer[int]:
        def open_producer() -> Opened:
            go.wait(60)
            opened.append(number)
            return Opened(None)

        return TargetProducer(open_producer, loop)

    targets = [target(number) for number in range(6)]
    for second, under_way in enumerate((2, 4, 4)):
        now_s[0] = second
        for _ in range(2):
            for each in targets:
                each.open()
            assert len(running) == under_way
    go.set()
    for thread in list(running):
        thread.join(60)
    assert sorted(opened) == [0, 1, 2, 3]
    targets[5].open()
    for thread in list(running):
        thread.join(60)
    assert 5 in opened


def refuse(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_each_request_is_made_once_if_few_threads_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, left, made = threading.Thread.start, [1], list[int]()

    def start_few(thread: threading.Thread) -> None:
        if not left:
            refuse(thread)
        left.pop()
        start(thread)

    def ask(item: int) -> int:
        made.append(item)
        return 2 * item

    monkeypatch.setattr(threading.Thread, "start", start_few)
    assert in_parallel(ask, range(20)) == list(range(0, 40, 2))
    assert sorted(made) == list(range(20))


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_may_arrive_while_the_main_thread_holds_the_lock_that_stop_needs(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = threading.Lock()
    stopped = threading.Event()

    def stop() -> None:
        if lock.acquire(timeout=60):
            lock.release()
            stopped.set()

    stop_on_signals(stop)
    with lock:
        os.kill(os.getpid(), number)
        assert not stopped.wait(0.05)
    assert stopped.wait(20)
    stopped.clear()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    for _ in range(2):  # a further one is heard, too
        os.kill(os.getpid(), number)
        assert stopped.wait(20)
        stopped.clear()


def test_a_process_that_does_not_end_in_time_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    monkeypatch.setattr(os, "_exit", ended.put)
    before = set(threading.enumerate())
    restore = stop_on_signals(lambda: None, within_s=20.0)
    (waiting,) = set(threading.enumerate()) - before
    os.kill(os.getpid(), signal.SIGTERM)
    restore()  # it has ended by itself
    waiting.join(10)
    assert not waiting.is_alive()
    stop_on_signals(lambda: None, within_s=0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    assert ended.get(timeout=20) == 1
    assert ended.empty()


def test_a_pause_grows_up_to_the_limit_of_its_failure_until_a_success() -> None:
    pause = GrowingPause(1.0, 5.0)
    assert [pause.next_s() for _ in range(4)] == [1.0, 2.0, 4.0, 5.0]
    assert [pause.next_s(30.0), pause.next_s(30.0), pause.next_s()] == [10.0, 20.0, 5.0]
    pause.reset()
    assert pause.next_s() == 1.0
