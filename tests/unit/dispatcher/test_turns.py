"""Tests of the turns of threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from delaylevel.dispatcher.host import Turns


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_waiting_thread_with_the_lowest_rank_is_next() -> None:
    turns = Turns()
    order: list[int] = []

    def work(rank: int) -> None:
        with turns.take(rank):
            order.append(rank)

    threads: list[threading.Thread] = []
    with turns.take(9):
        for rank in (3, 1, 2, 1):
            threads.append(threading.Thread(target=work, args=(rank,)))
            threads[-1].start()
            wait_for(lambda: len(turns._waiting) == len(threads))
        assert order == []
    for thread in threads:
        thread.join()
    assert order == [1, 1, 2, 3]
    with turns.take(5):  # it is free again
        order.append(5)
    assert order[-1] == 5


def test_one_thread_works_at_a_time_and_an_error_ends_its_turn() -> None:
    turns = Turns()
    working = [0]
    done = [0]

    def work(rank: int) -> None:
        for _ in range(200):
            try:
                with turns.take(rank):
                    working[0] += 1
                    assert working[0] == 1
                    done[0] += 1
                    working[0] -= 1
                    with turns.pause():
                        pass
                    assert working[0] == 0
                    raise ValueError
            except ValueError:
                pass

    threads = [threading.Thread(target=work, args=(rank % 3,)) for rank in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [1200]


def test_other_threads_work_while_one_writes() -> None:
    turns = Turns()
    order: list[str] = []

    def other() -> None:
        with turns.take(5):
            order.append("other")

    with turns.take(1):
        thread = threading.Thread(target=other)
        thread.start()
        wait_for(lambda: bool(turns._waiting))
        assert order == []
        with turns.pause():
            thread.join(60)
            order.append("written")
        order.append("first")
    assert order == ["other", "written", "first"]
