"""Tests of slow work in one thread at a time."""

from __future__ import annotations

import threading

from delaylevel.consumer.retry_publisher import SlowWork


def test_work_is_done_in_order_and_an_exception_ends_nothing() -> None:
    work, done = SlowWork(), []
    gate = threading.Event()

    def fail() -> None:
        raise ValueError

    work.add(lambda: done.append(gate.wait(10)))
    work.add(fail)
    for number in range(100):
        work.add(lambda number=number: done.append(number))  # type: ignore[misc]
    assert not work.wait(0)
    gate.set()
    assert work.wait(10)
    assert done == [True, *range(100)]


def test_work_that_gives_work_is_done_without_a_thread() -> None:
    done: list[int] = []
    work = SlowWork(lambda run: run())

    def first() -> None:
        work.add(lambda: done.append(2))
        done.append(1)

    work.add(first)
    assert done == [1, 2]
