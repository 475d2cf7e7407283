"""Tests of durations and instants in whole milliseconds."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from delaylevel.model.clock import StepDetector, instant_ms
from delaylevel.testing import ManualClock


def test_naive_instants_are_refused() -> None:
    with pytest.raises(ValueError, match="2026-03-01T00:00:00 has no time zone"):
        instant_ms(datetime(2026, 3, 1))


@pytest.mark.parametrize("step_s", [60, -60, 2, -2])
def test_a_step_of_the_wall_clock_is_detected_once(step_s: int) -> None:
    clock = ManualClock()
    steps = StepDetector(clock)
    clock.advance(timedelta(days=40))
    assert steps.read() == (clock.now_ms(), False)
    clock.step(timedelta(seconds=step_s))
    assert steps.read() == (clock.now_ms(), True)
    clock.advance(timedelta(hours=1))
    assert steps.read() == (clock.now_ms(), False)
    clock.step(timedelta(seconds=-step_s))
    assert steps.read() == (clock.now_ms(), True)


def test_many_small_corrections_are_a_step() -> None:
    clock = ManualClock()
    steps = StepDetector(clock)
    found = []
    for _ in range(10):
        clock.step(timedelta(milliseconds=250))
        found.append(steps.read()[1])
    assert found == [False] * 4 + [True] + [False] * 4 + [True]
