"""Tests of the turn of the threads that publish."""

from __future__ import annotations

import threading
import time

import pytest

from delaylevel.dispatcher.turn import PublishingTurn


def start_waiting(turn: PublishingTurn, name: str, order: list[str]) -> threading.Thread:
    def run() -> None:
        with turn:
            order.append(name)

    waiting = len(turn._waiting)
    thread = threading.Thread(target=run)
    thread.start()
    deadline = time.monotonic() + 10
    while len(turn._waiting) == waiting and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(turn._waiting) == waiting + 1
    return thread


def test_threads_get_it_in_the_order_in_which_they_ask() -> None:
    turn, order = PublishingTurn(), list[str]()
    with turn:
        threads = [start_waiting(turn, name, order) for name in "abc"]
        assert not order
    for thread in threads:
        thread.join(10)
    assert order == ["a", "b", "c"]


def test_a_pause_lets_the_others_go_first() -> None:
    turn, order = PublishingTurn(), list[str]()
    with turn:
        threads = [start_waiting(turn, name, order) for name in "ab"]
        with turn.paused():
            for thread in threads:
                thread.join(10)
            order.append("pause")
        order.append("own")
    assert order == ["a", "b", "pause", "own"]


def test_a_pause_without_a_turn_changes_nothing() -> None:
    turn, order = PublishingTurn(), list[str]()
    with turn:
        other = start_waiting(turn, "other", order)
    other.join(10)
    with turn.paused(), turn:
        order.append("own")
    assert order == ["other", "own"]


def test_an_error_ends_the_turn() -> None:
    turn = PublishingTurn()
    with pytest.raises(ValueError, match="x"), turn:
        raise ValueError("x")
    with turn:
        pass
