"""Tests of the turns of threads."""

from __future__ import annotations

import threading
import time

import pytest

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
    with pytest.raises(ValueError, match="failed"), turns.take(9):
        raise ValueError("failed")
    work(5)  # it is free again
    assert order == [1, 1, 2, 3, 9, 5]
