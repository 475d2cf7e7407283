"""Tests of the turns during a takeover."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from delaylevel.dispatcher import turns as module
from delaylevel.dispatcher.turns import PausingFile, Turns


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
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
                    raise ValueError
            except ValueError:
                pass

    threads = [threading.Thread(target=work, args=(rank % 3,)) for rank in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [1200]


def test_other_threads_work_while_one_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns()
    monkeypatch.setattr(module, "TURNS", turns)
    order: list[str] = []

    def other() -> None:
        with turns.take(5):
            order.append("other")

    with turns.take(1), PausingFile(tmp_path / "file") as file:
        thread = threading.Thread(target=other)
        thread.start()
        wait_for(lambda: bool(turns._waiting))
        assert order == []
        assert file.write(b"12345") == 5
        thread.join(10)
        order.append("first")
    assert order == ["other", "first"]
    with PausingFile(tmp_path / "file") as file:  # without a turn
        file.truncate(2)
        file.write(b"x")
    assert (tmp_path / "file").read_bytes() == b"12x"
    with turns.take(5):
        assert not turns._waiting
