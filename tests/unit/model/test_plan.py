"""Tests of capacity planning: its arithmetic, and the figures that the documentation shows."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.errors import InvalidInputError
from delaylevel.model.level_topic import FinalWindow
from delaylevel.model.plan import Load, plan, plans, recommended
from delaylevel.model.strategy import Levels, PartitionStrategy
from support.pages import ROOT
from support.seeds import examples

DAY = timedelta(days=1)
MONTH = Load(rate=2000, maximum_delay=30 * DAY, size=1024)


def test_the_figures_of_a_month_of_two_thousand_messages_a_second() -> None:
    assert MONTH.pending == 2000 * 15 * 86_400
    assert MONTH.stored_bytes == MONTH.pending * 1224 * 2
    assert MONTH.native_index_bytes == MONTH.pending * 34
    days, hours = PartitionStrategy(), PartitionStrategy(partition_by="HOUR", maximum_delay=DAY)
    one, two = plan(MONTH, Levels(days)), plan(MONTH, Levels([days, hours]))
    assert one.window == 2000 * (12 * 3600 + 600)
    assert two.window == 2000 * (1800 + 300)
    assert two.window_bytes == two.window * 1224
    assert (two.memory_bytes, two.restart_s) == (two.window * 4, two.window / 80_000)
    broker = plan(replace(MONTH, final_window=FinalWindow.BROKER), Levels([days, hours]))
    assert (broker.memory_bytes, broker.restart_s) == (two.window * 34, two.window / 15_000)


@pytest.mark.parametrize(
    ("rate", "levels", "partitions"),
    [
        (10, "DAY", 29),
        (200, "DAY, HOUR", 52),
        (2000, "DAY, HOUR", 52),
        (20_000, "DAY, HOUR, MINUTE", 111),
    ],
)
def test_the_table_of_sizes_in_production(rate: int, levels: str, partitions: int) -> None:
    load = replace(MONTH, rate=rate)
    best = recommended(plans(load))
    names = ", ".join(level.name for level in best.levels)
    assert (names, best.levels.partitions) == (levels, partitions)
    assert not best.needs_finer_level
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {rate:,} | ")]
    assert f"| {levels} | {partitions} | {best.window:,} |" in row
    assert f"| {load.pending:,} |" in row


loads = st.builds(
    Load,
    rate=st.floats(0.001, 1e6),
    maximum_delay=st.integers(61, 10 * 365 * 86_400).map(lambda s: timedelta(seconds=s)),
    size=st.integers(0, 5_000_000),
    final_window=st.sampled_from(FinalWindow),
)


@given(loads)
@examples(20)
def test_any_load_has_plans_that_fit(load: Load) -> None:
    found = plans(load)
    for item in found:
        assert item.levels.maximum_ms >= load.maximum_delay / timedelta(milliseconds=1) - 1
        assert all(level.partitions <= 1000 for level in item.levels)
    windows = [item.window for item in found]
    assert windows == sorted(windows, reverse=True)
    best = recommended(found)
    coarser = found[: found.index(best)]
    assert all(item.needs_finer_level for item in coarser)


@pytest.mark.parametrize(
    "changes",
    [
        {"rate": 0},
        {"rate": float("inf")},
        {"size": -1},
        {"copies": 0},
        {"maximum_delay": timedelta(0)},
        {"mean_delay": 31 * DAY},
    ],
)
def test_impossible_loads_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError):
        replace(MONTH, **changes)


def test_delays_without_levels_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="no list of levels fits"):
        plans(replace(MONTH, maximum_delay=timedelta(seconds=30)))
