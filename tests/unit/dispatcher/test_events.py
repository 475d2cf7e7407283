"""Tests of the queue of events of a partition owner."""

from __future__ import annotations

import threading
import time

from delaylevel.dispatcher.owner import WAKE, EventQueue


def later(work: object, seconds: float = 0.05) -> threading.Timer:
    timer = threading.Timer(seconds, work)  # type: ignore[arg-type]
    timer.start()
    return timer


def test_an_answer_wakes_an_owner_that_would_wait_for_long() -> None:
    events = EventQueue()
    later(events.answered)
    assert events.get(time.monotonic() + 60, 0.02) is WAKE
    events.take_answered()
    later(lambda: events.put(1))
    assert events.get(time.monotonic() + 60, 0.02) == 1


def test_an_answer_while_the_owner_works_lets_it_look_soon() -> None:
    events = EventQueue()
    events.answered()
    began = time.monotonic()
    assert events.get(began + 60, 0.02) is None
    assert time.monotonic() - began < 30
    assert not events


def test_an_owner_that_needs_room_looks_at_answers_at_once() -> None:
    events = EventQueue()
    events.answered()
    assert events.get(time.monotonic() + 60, 0.0) is None
    later(events.answered)
    assert events.get(time.monotonic() + 0.06, 0.0) in (WAKE, None)


def test_other_events_are_delivered_in_their_order() -> None:
    events = EventQueue()
    later(events.wake)
    assert events.get(time.monotonic() + 60, 0.02) is WAKE
    events.put(1)
    events.put(2)
    assert events
    assert [events.get_nowait(), events.get_nowait(), events.get_nowait()] == [1, 2, None]
    assert events.get(time.monotonic() - 1, 0.02) is None
