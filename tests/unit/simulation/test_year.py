"""Tests of the figures of a simulated day."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delaylevel.errors import InvalidInputError
from delaylevel.model.plan import Load, plan
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.simulation.traffic import DAY_MS, NINE_MS, Resolution, Traffic
from delaylevel.simulation.year import BIN_MS, Recovery, SimulatedDay, release, simulate

WEEK_MS = 7 * DAY_MS
DAYS = PartitionStrategy(maximum_delay=timedelta(days=7))
HOURS = PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(days=1))
LEVELS = Levels([DAYS, HOURS])
COARSE = Resolution(strata=60, coarse=84, fine=288, later=12)


def simulated(share: float = 0.0, **changes: float) -> SimulatedDay:
    traffic = Traffic(1000, WEEK_MS, WEEK_MS / 2, share)
    rates = {"mover_rate": 5000.0, "dispatcher_rate": 3000.0}
    return simulate(LEVELS, traffic, resolution=COARSE, **{**rates, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def even() -> SimulatedDay:
    return simulated()


@pytest.fixture(scope="module")
def nine() -> SimulatedDay:
    return simulated(0.2)


def test_storage_is_steady_after_the_longest_delay(even: SimulatedDay) -> None:
    assert len(even.growth) == even.days == 8
    assert even.growth[0] < even.growth[3] < even.growth[6]
    assert even.growth[7] == pytest.approx(even.growth[6], rel=0.005)
    # Little's law.
    assert even.stored == pytest.approx(1000 * 3.5 * 86_400, rel=0.01)


def test_loads_are_those_of_the_plan_if_due_times_are_even(even: SimulatedDay) -> None:
    planned = plan(Load(1000, timedelta(days=7), 0), LEVELS)
    assert even.window.mean == pytest.approx(planned.window, rel=0.03)
    assert even.due.mean == pytest.approx(1000, rel=0.01)
    # A message with a delay below a day does not pass the first level.
    assert even.loads[0].handed_off.mean == pytest.approx(1000 * 6 / 7, rel=0.01)
    assert even.moved.peak < 1.05 * even.moved.mean
    assert even.moved.mean < planned.moves_per_s
    assert even.written == pytest.approx(2 + even.moved.mean / 1000, rel=0.01)
    assert even.partitions == LEVELS.partitions + 1 + 1 + 4 + 4


def test_messages_due_at_nine_pass_the_finest_level_in_its_last_hour(nine: SimulatedDay) -> None:
    at_nine = 0.2 * 1000 * 86_400
    hours, days = nine.loads[1].handed_off, nine.loads[0].handed_off
    assert nine.due.peak == pytest.approx(at_nine / (BIN_MS / 1000), rel=0.05)
    assert nine.due.peak_at_ms == NINE_MS
    # From 7:55 to 8:55 more, and evenly. Before and after, a fifth less.
    expected = at_nine / 3600 * (1 - 1 / 24)
    assert hours.peak == pytest.approx(expected + 0.8 * hours_rate(nine), rel=0.1)
    assert NINE_MS - 3_900_000 <= hours.peak_at_ms < NINE_MS - 300_000
    assert days.peak < 1.3 * days.mean
    assert nine.window.peak > at_nine * 0.95
    assert NINE_MS - 300_000 <= nine.window.peak_at_ms <= NINE_MS


def hours_rate(found: SimulatedDay) -> float:
    """Return the messages per second that the level by HOUR hands off, without a peak."""
    return found.loads[1].handed_off.mean


def test_without_a_backlog_nothing_is_late(even: SimulatedDay) -> None:
    assert even.mover == even.dispatcher == Recovery()


def test_the_mover_recovers_from_an_outage(even: SimulatedDay) -> None:
    found = even.mover_outage
    assert found.late > 1000 * 1800
    # An hour less the lead of five minutes: what is due first does not wait for anything else.
    assert 3_200_000 < found.worst_ms < 3_400_000
    assert found.on_time_ms is not None
    assert even.outage_ms[1] < found.on_time_ms < even.outage_ms[1] + 3_600_000


def test_the_dispatchers_recover_from_an_outage(even: SimulatedDay) -> None:
    found = even.dispatcher_outage
    assert found.worst_ms == pytest.approx(3_600_000, abs=BIN_MS)
    # 3.6 million messages, while 1,000 of 3,000 per second are for those that become due.
    assert found.on_time_ms == pytest.approx(even.outage_ms[1] + 1_800_000, abs=3 * BIN_MS)
    assert found.late == pytest.approx(1000 * (3600 + 1800), rel=0.02)


def test_a_burst_at_nine_takes_its_time(nine: SimulatedDay) -> None:
    at_nine = 0.2 * 1000 * 86_400
    # 800 of 3,000 per second are for the others.
    assert nine.dispatcher.on_time_ms == pytest.approx(
        NINE_MS + at_nine / (3000 - 800) * 1000, rel=0.02
    )


def test_a_mover_that_is_too_slow_does_not_recover() -> None:
    found = simulated(mover_rate=1500)
    assert found.mover.on_time_ms is None
    assert found.mover.late > 0


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=30),
    st.integers(1, 20),
    st.integers(0, 10),
    st.integers(0, 8),
)
@settings(deadline=None)
def test_dispatchers_release_as_a_queue_of_single_messages(
    due: list[int], rate: int, down: int, length: int
) -> None:
    found = release(due, rate, (down * 1000, (down + length) * 1000), 1000)
    queue: list[int] = []
    late = last = worst = 0
    for second, count in enumerate(due):
        queue += [second] * count
        room = 0 if down <= second < down + length else rate
        released, queue = queue[:room], queue[room:]
        late += sum(at < second for at in released)
        if queue and queue[0] < second:
            worst = max(worst, second + 1 - queue[0])
        if any(at < second for at in queue):
            last = second + 1
    assert found.late == pytest.approx(late)
    assert abs(found.worst_ms / 1000 - worst) <= 1
    still_late = last == len(due)
    assert found.on_time_ms == (None if still_late and last else last * 1000)


@pytest.mark.parametrize(
    "changes",
    [
        {"days": 0},
        {"mover_rate": 0},
        {"dispatcher_rate": -1},
        {"outage_ms": (5, 4)},
        {"outage_ms": (0, DAY_MS + 1)},
    ],
)
def test_impossible_simulations_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError):
        simulated(**changes)  # type: ignore[arg-type]
