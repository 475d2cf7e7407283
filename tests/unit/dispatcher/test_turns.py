"""Tests of the turns of threads."""

from __future__ import annotations

import threading
import time

from delaylevel.dispatcher.host import Turns


def test_waiting_threads_work_in_the_order_of_their_ranks_also_while_one_writes() -> None:
    turns, order, threads = Turns(), list[int](), list[threading.Thread]()

    def work(rank: int) -> None:
        with turns.take(rank):
            order.append(rank)

    with turns.take(9):
        for rank in (3, 1, 2, 1):
            threads.append(threading.Thread(target=work, args=(rank,)))
            threads[-1].start()
            deadline = time.monotonic() + 60
            while len(turns._waiting) < len(threads):
                assert time.monotonic() < deadline
                time.sleep(0.001)
        assert order == []
        with turns.pause():
            for thread in threads:
                thread.join(60)
        order.append(9)
    work(5)  # it is free again
    assert order == [1, 1, 2, 3, 9, 5]


def test_one_thread_works_at_a_time_and_an_error_ends_its_turn() -> None:
    turns, working, done = Turns(), [0], [0]

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
