"""Tests of durations and instants in whole milliseconds."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.model.clock import StepDetector, duration_ms, instant_ms
from delaylevel.testing import ManualClock
from support.seeds import examples

quick = examples(40)


@quick
@given(st.timedeltas())
def test_durations_are_rounded_up_to_milliseconds(value: timedelta) -> None:
    ms = duration_ms(value)
    micros = value // timedelta(microseconds=1)
    assert (ms - 1) * 1000 < micros <= ms * 1000


def test_instants_depend_on_their_time_zone() -> None:
    utc = datetime(2026, 3, 1, 9, tzinfo=timezone.utc)
    berlin = datetime(2026, 3, 1, 10, tzinfo=timezone(timedelta(hours=1)))
    assert instant_ms(utc) == instant_ms(berlin) == 1_772_355_600_000
    assert instant_ms(datetime(1970, 1, 1, 0, 0, 0, 1, tzinfo=timezone.utc)) == 1


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
