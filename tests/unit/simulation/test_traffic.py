"""Tests of the division of traffic into cohorts."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delaylevel.errors import InvalidInputError
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.simulation.series import Series, pending
from delaylevel.simulation.traffic import DAY_MS, NINE_MS, Resolution, Traffic

MONTH_MS = 30 * DAY_MS
DAYS = PartitionStrategy()
HOURS = PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(days=1))
LEVELS = Levels([DAYS, HOURS])
NEVER = (400 * DAY_MS, 401 * DAY_MS)
COARSE = Resolution(strata=30, coarse=60, fine=48, later=6)


def total(traffic: Traffic, days: int, examined: int = 3) -> float:
    examined_ms = (examined * DAY_MS, (examined + 1) * DAY_MS)
    return sum(
        cohort.messages for cohort in traffic.cohorts(LEVELS, days * DAY_MS, examined_ms, COARSE)
    )


@given(st.floats(0.1, 1e6), st.floats(0.02, 0.98), st.floats(0, 1), st.integers(0, DAY_MS // 4))
@settings(max_examples=10, deadline=None)
def test_all_messages_are_in_cohorts(
    rate: float, mean: float, share: float, spread_ms: int
) -> None:
    traffic = Traffic(rate, MONTH_MS, mean * MONTH_MS, share, peak_spread_ms=spread_ms)
    assert total(traffic, 6) == pytest.approx(rate * 6 * 86_400)


@given(st.floats(0.02, 0.98))
@settings(max_examples=15, deadline=None)
def test_delays_have_the_given_mean(mean: float) -> None:
    traffic = Traffic(100, MONTH_MS, mean * MONTH_MS)
    cohorts = list(traffic.cohorts(LEVELS, DAY_MS // 2, NEVER, Resolution(coarse=60)))
    found = sum(cohort.messages * (cohort.due_ms - cohort.published_ms) for cohort in cohorts)
    assert found / sum(cohort.messages for cohort in cohorts) == pytest.approx(
        mean * MONTH_MS, rel=0.02
    )
    for part in (0.1, 0.5, 0.9):
        assert traffic.shorter(traffic.quantile(part)) == pytest.approx(part)


def test_delays_are_spread_evenly_by_default() -> None:
    traffic = Traffic(100, MONTH_MS, MONTH_MS / 2)
    assert traffic.shorter(MONTH_MS / 3) == pytest.approx(1 / 3)
    assert traffic.quantile(0.25) == pytest.approx(MONTH_MS / 4)


def test_no_delay_is_longer_than_the_longest_or_not_positive() -> None:
    traffic = Traffic(100, MONTH_MS, MONTH_MS / 3, 0.3, peak_spread_ms=3_600_000)
    delays = [
        cohort.due_ms - cohort.published_ms
        for cohort in traffic.cohorts(LEVELS, 8 * DAY_MS, (4 * DAY_MS, 5 * DAY_MS), COARSE)
    ]
    assert min(delays) > 0
    assert max(delays) <= MONTH_MS


def test_a_share_is_due_at_nine() -> None:
    traffic = Traffic(100, MONTH_MS, MONTH_MS / 2, 0.25, peak_spread_ms=600_000)
    cohorts = list(traffic.cohorts(LEVELS, 3 * DAY_MS, (DAY_MS, 2 * DAY_MS), COARSE))
    at_nine = [cohort for cohort in cohorts if not cohort.rigid]
    assert all(0 <= cohort.due_ms % DAY_MS - NINE_MS < 600_000 for cohort in at_nine)
    assert sum(cohort.messages for cohort in at_nine) == pytest.approx(0.25 * 100 * 3 * 86_400)
    # Each day gets its part.
    by_day: dict[int, float] = {}
    for cohort in at_nine:
        day = cohort.due_ms // DAY_MS
        by_day[day] = by_day.get(day, 0.0) + cohort.messages
    middle = [by_day[day] for day in range(5, 28)]
    assert max(middle) < 1.1 * min(middle)


def test_delays_that_no_peak_fits_into_are_due_at_any_time() -> None:
    hour_ms = 3_600_000
    traffic = Traffic(100, hour_ms, hour_ms / 2, 1.0)
    levels = Levels(PartitionStrategy(partition_by="MINUTE", maximum_delay=timedelta(hours=1)))
    cohorts = list(traffic.cohorts(levels, DAY_MS, NEVER, COARSE))
    assert sum(cohort.messages for cohort in cohorts) == pytest.approx(100 * 86_400)
    peaks = [cohort for cohort in cohorts if not cohort.rigid]
    assert all(8 * hour_ms - 600_000 < cohort.published_ms < NINE_MS for cohort in peaks)


def test_the_examined_day_is_divided_finely() -> None:
    traffic = Traffic(100, MONTH_MS, MONTH_MS / 2)
    since_ms, until_ms = 40 * DAY_MS, 41 * DAY_MS
    for cohort in traffic.cohorts(LEVELS, until_ms, (since_ms, until_ms), COARSE):
        if cohort.width_ms > 1_800_000:
            for hop_ms in (cohort.published_ms, cohort.due_ms):
                assert not since_ms < hop_ms < until_ms


@pytest.mark.parametrize(
    "changes",
    [
        {"mean_ms": 0},
        {"mean_ms": MONTH_MS},
        {"peak_share": 1.5},
        {"peak_share": -0.1},
        {"peak_spread_ms": -1},
        {"peak_spread_ms": DAY_MS + 1},
    ],
)
def test_impossible_traffic_is_refused(changes: dict[str, float]) -> None:
    values = {"rate": 1, "maximum_ms": MONTH_MS, "mean_ms": MONTH_MS / 2, **changes}
    with pytest.raises(InvalidInputError):
        Traffic(**values)  # type: ignore[arg-type]


@given(
    st.lists(st.tuples(st.floats(-500, 1500), st.floats(0, 100), st.floats(0, 700)), max_size=20),
    st.integers(1, 300),
)
@settings(deadline=None)
def test_a_series_has_the_part_of_each_flow_that_is_inside(
    flows: list[tuple[float, float, float]], bin_ms: int
) -> None:
    series = Series(100, 1100, bin_ms)
    expected = [0.0] * len(series)
    for middle, count, width in flows:
        series.add(middle, count, width)
        for index in range(len(series)):
            begin, end = series.time_ms(index), series.time_ms(index + 1)
            if width > 0:
                overlap = min(end, middle + width / 2) - max(begin, middle - width / 2)
                expected[index] += count * max(0.0, overlap) / width if width > 1e-9 else 0.0
            elif begin <= middle < end:
                expected[index] += count
    if all(width == 0 or width > 1e-3 for _, _, width in flows):
        assert series.values() == pytest.approx(expected, abs=1e-3)


def test_pending_messages_are_counted_at_the_end_of_each_interval() -> None:
    assert pending(10, [5, 0, 1], [3, 4, 9]) == [12, 8, 0]
