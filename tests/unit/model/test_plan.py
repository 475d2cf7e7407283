"""Tests of capacity planning: its arithmetic, and the figures that the documentation shows."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.errors import InvalidInputError
from delaylevel.model.level_topic import FinalWindow, Mover
from delaylevel.model.plan import Load, Plan, plan, plans
from delaylevel.model.strategy import Levels, PartitionStrategy
from support.pages import ROOT
from support.seeds import examples

DAY = timedelta(days=1)
MONTH = Load(rate=2000, maximum_delay=30 * DAY, size=1024, final_window=FinalWindow.BROKER)


def test_the_figures_of_a_month_of_two_thousand_messages_a_second() -> None:
    assert MONTH.pending == 2000 * 15 * 86_400
    assert MONTH.stored_bytes == MONTH.pending * 1224 * 2
    assert MONTH.native_index_bytes == MONTH.pending * 34
    days, hours = PartitionStrategy(), PartitionStrategy(partition_by="HOUR", maximum_delay=DAY)
    one, two = plan(MONTH, Levels(days)), plan(MONTH, Levels([days, hours]))
    assert (one.partitions, two.partitions) == (29, 52)
    assert one.window == 2000 * (12 * 3600 + 600)
    assert two.window == 2000 * (1800 + 300)
    assert (one.moves_per_s, two.moves_per_s) == (2000, 4000)
    assert (one.movers, two.movers) == (1, 1)
    assert two.tracker_bytes == 0
    tracked = plan(replace(MONTH, final_window=FinalWindow.TRACKER), Levels([days, hours]))
    assert tracked.index_bytes == 0
    assert tracked.rebuild_s == tracked.window / 80_000
    assert tracked.tracker_bytes == tracked.window * 4


def named(item: Plan) -> str:
    return " ".join(level.name for level in item.levels)


@pytest.mark.parametrize(
    ("rate", "share", "recommended"),
    [
        # DAY alone is enough for a small load.
        (10, 0.1, "DAY"),
        (200, 0.1, "DAY HOUR"),
        # Without a peak, minutes keep the window small. With one, the mover would need to hand off
        # all of its messages within a minute, and the window would contain them all the same.
        (2000, 0.0, "DAY HOUR MINUTE"),
        (2000, 0.1, "DAY HOUR"),
        (20_000, 0.0, "DAY HOUR MINUTE"),
        (20_000, 0.1, "DAY HOUR"),
    ],
)
def test_the_recommended_list_costs_least_with_its_peak(
    rate: float, share: float, recommended: str
) -> None:
    found = plans(Load(rate, 30 * DAY, 1024, nine_share=share))
    assert named(found[0]) == recommended
    assert [item.cost for item in found] == sorted(item.cost for item in found)


@pytest.mark.parametrize(
    ("rate", "row"),
    [
        (10, (12_960_000, 29, 480_600, 0.06, 2, 1)),
        (20_000, (25_920_000_000, 52, 210_600_000, 1.62, 7_513, 4)),
    ],
)
def test_the_table_of_sizes_in_production(rate: int, row: tuple[float, ...]) -> None:
    load = Load(rate=rate, maximum_delay=30 * DAY, size=1024, nine_share=0.1)
    best = plans(load)[0]
    cores, release_s = round(best.dispatcher_cores, 2), round(load.nine_release_s)
    found = (load.pending, best.partitions, best.peak_window, cores, release_s, best.movers)
    assert found == row
    page = (ROOT / "docs/production.md").read_text(encoding="utf-8")
    assert all(f"{value:,}" in page for value in row)


def test_a_plan_includes_nine_oclock() -> None:
    even = Load(2000, 30 * DAY, 1024)
    load = replace(even, nine_share=0.1)
    by_name = {named(item): item for item in plans(load)}
    without = {named(item): item for item in plans(even)}
    hours, minutes = by_name["DAY HOUR"], by_name["DAY HOUR MINUTE"]
    at_nine = 2000 * 8640
    assert load.nine_messages == at_nine
    assert minutes.peak_moves_per_s == 6000 + at_nine / 60
    # The mean needs half of one core's capacity; 294,000 per second need all of eleven.
    assert [without[name].movers for name in ("DAY HOUR", "DAY HOUR MINUTE")] == [1, 1]
    assert (hours.movers, minutes.movers) == (1, 11)
    # A finer level makes the window smaller at other times only.
    assert hours.window == without["DAY HOUR"].window == without["DAY HOUR"].peak_window
    assert hours.peak_window == 2000 * 2100 * 0.9 + at_nine
    assert minutes.peak_window == pytest.approx(at_nine, rel=0.01)
    assert hours.tracker_bytes == hours.peak_window * 4


def test_dispatchers_release_nine_oclock_in_the_time_that_they_have() -> None:
    load = Load(2000, 30 * DAY, 1024, nine_share=0.3)
    at_nine = 2000 * 86_400 * 0.3
    assert (load.dispatchers, load.nine_messages) == (1, at_nine)
    assert load.nine_release_s == pytest.approx(at_nine / (41_000 - 1400))
    within = replace(load, nine_within=timedelta(minutes=2))
    assert within.dispatchers == 11  # 433,400 of 451,000 per second
    assert within.nine_release_s <= 120
    assert replace(within, nine_within=timedelta(minutes=30)).dispatchers == 1
    broker = replace(load, final_window=FinalWindow.BROKER)
    assert (broker.dispatchers, broker.nine_release_s) == (0, 0)


loads = st.builds(
    Load,
    rate=st.floats(0.001, 1e6),
    maximum_delay=st.integers(61, 10 * 365 * 86_400).map(lambda s: timedelta(seconds=s)),
    size=st.integers(0, 5_000_000),
    mover=st.sampled_from(Mover),
    final_window=st.sampled_from(FinalWindow),
)


@given(loads)
@examples(20)
def test_any_load_has_plans_that_fit(load: Load) -> None:
    found = plans(load)
    assert found
    for item in found:
        assert item.levels.maximum_ms >= load.maximum_delay / timedelta(milliseconds=1) - 1
        assert all(level.partitions <= load.partition_limit for level in item.levels)
        assert item.movers >= 1
        assert item.window >= 0


@pytest.mark.parametrize(
    "changes",
    [
        {"rate": 0},
        {"rate": float("inf")},
        {"size": -1},
        {"copies": 0},
        {"maximum_delay": timedelta(0)},
        {"mean_delay": 31 * DAY},
        {"nine_share": 1.1},
        {"nine_within": -DAY},
    ],
)
def test_impossible_loads_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError):
        replace(MONTH, **changes)


def test_delays_without_levels_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="no list of levels fits"):
        plans(replace(MONTH, maximum_delay=timedelta(seconds=30)))
