"""Tests of the queue of events of a partition owner."""

from __future__ import annotations

import time

from delaylevel.dispatcher.owner import WAKE, EventQueue


class Events(EventQueue):
    """A queue that counts the calls of its owner."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.on_event = self._called

    def _called(self) -> None:
        self.calls += 1


def test_an_answer_wakes_an_owner_that_would_wait_for_long() -> None:
    events = Events()
    until_s = time.monotonic() + 60
    assert events.rest(until_s, 0.02) == until_s
    events.answered()
    assert events.calls == 1
    assert events.get_nowait() is WAKE
    assert not events


def test_an_answer_waits_for_an_owner_that_looks_soon_anyway() -> None:
    events = Events()
    events.rest(time.monotonic() + 60, 90)
    events.answered()
    assert events.calls == 0
    assert not events


def test_an_answer_while_the_owner_works_lets_it_look_soon() -> None:
    events = Events()
    events.rest(time.monotonic() + 60, 0.02)
    events.stir()
    events.answered()
    assert events.calls == 0
    began = time.monotonic()
    assert began < events.rest(began + 60, 0.02) < began + 30
    events.take_answered()
    assert events.rest(began + 60, 0.02) == began + 60


def test_an_owner_that_needs_room_looks_at_answers_at_once() -> None:
    events = Events()
    events.answered()
    assert events.rest(time.monotonic() + 60, 0.0) <= time.monotonic()
    events.answered()
    assert events.calls == 1


def test_other_events_are_delivered_in_their_order() -> None:
    events = Events()
    events.rest(time.monotonic() + 60, 0.02)
    events.wake()
    events.put(1)
    events.put(2)
    assert events
    assert [events.get_nowait() for _ in range(4)] == [WAKE, 1, 2, None]
    assert events.calls == 3
