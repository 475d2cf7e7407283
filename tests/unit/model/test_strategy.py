"""Tests of strategies, lists of levels, descriptions of level topics, and plans for a load."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.errors import (
    InvalidInputError,
    InvalidStrategyError,
    LevelTopicError,
    TargetNotAllowedError,
)
from delaylevel.model.formatting import exact_duration
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Pauses, Spread
from delaylevel.model.plan import Load, plan, plans, recommended
from delaylevel.model.strategy import (
    Levels,
    PartitionBy,
    PartitionStrategy,
    partition_count,
)
from support.fakes import describe
from support.pages import ROOT
from support.seeds import examples

quick = examples(40)


def test_units_are_given_by_name_or_length_and_have_a_lead() -> None:
    for given_by in ("day", PartitionBy.DAY, timedelta(hours=24)):
        assert PartitionStrategy(partition_by=given_by) == PartitionStrategy()
    leads = {"YEAR": "1h", "MONTH": "1h", "DAY": "10m", "HOUR": "5m", "MINUTE": "15s"}
    long = {"maximum_delay": timedelta(days=800), "partition_limit": 1 << 30}
    for unit, lead in {**leads, timedelta(minutes=90): "22m30s"}.items():
        strategy: Any = PartitionStrategy(partition_by=unit, **long)  # type: ignore[arg-type]
        assert str(strategy) == f"{strategy.unit_name} for 800d (lead {lead})"
        assert exact_duration(Levels(strategy)[0].lead_ms) == lead


@quick
@given(st.integers(100, 10**9), st.integers(1, 10**11))
def test_the_partitions_cover_exactly_the_maximum_delay(unit_ms: int, beyond_ms: int) -> None:
    unit, maximum = timedelta(milliseconds=unit_ms), timedelta(milliseconds=unit_ms + beyond_ms)
    count = partition_count(maximum, unit)
    # Partition k ends at (k + 2) units.
    assert count * unit < maximum <= (count + 1) * unit


# -- refusals


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"partition_by": "WEEK"}, "partition_by.*YEAR.*MINUTE.*'WEEK'"),
        ({"partition_by": timedelta(milliseconds=99)}, "99ms.*too short.*100ms"),
        ({"partition_by": timedelta(days=-1)}, "-1d.*too short"),
        ({"partition_by": None}, "partition_by.*None"),
        ({"partition_by": timedelta(microseconds=100_500)}, "partition_by.*round"),
        ({"maximum_delay": timedelta(days=1)}, r"1d.*exceed one unit \(1d\).*finer partition_by"),
        ({"maximum_delay": timedelta(days=36501)}, "36501d.*36500d.*recirculate"),
        (
            {"partition_by": "HOUR", "maximum_delay": timedelta(days=365)},
            "365d by HOUR needs 8,759 partitions, more than the limit of 1,000.*coarser level",
        ),
        ({"maximum_delay": "for ever"}, "maximum_delay.*for ever"),
        ({"maximum_delay": timedelta(days=3, microseconds=1)}, "maximum_delay.*milliseconds"),
        ({"lead": timedelta(0)}, "lead of 0s.*unit of 1d.*more than 0"),
        ({"lead": timedelta(days=1)}, "lead of 1d.*less than one unit"),
        ({"lead": timedelta(microseconds=86_399_999_900)}, "lead.*milliseconds"),
        ({"overflow": "clamp"}, "overflow.*reject.*recirculate.*'clamp'"),
        ({"partition_limit": 0}, "partition_limit.*0"),
    ],
)
def test_invalid_strategies_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidStrategyError, match=said):
        PartitionStrategy(**arguments)


DAY, HOURS = PartitionStrategy(), {"partition_by": "HOUR", "maximum_delay": timedelta(days=1)}


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        ([], "at least one PartitionStrategy"),
        ([PartitionStrategy(**HOURS), DAY], "coarse to fine.*DAY cannot follow HOUR"),
        ([DAY, DAY], "coarse to fine.*DAY cannot follow DAY"),
        (
            [DAY, PartitionStrategy(partition_by="HOUR", maximum_delay=timedelta(hours=23))],
            "HOUR.*23h.*DAY.*maximum_delay of 1d",
        ),
        (["DAY"], "a level is a PartitionStrategy, not str.*'DAY'"),
        ([DAY, None], "not NoneType"),
    ],
)
def test_invalid_lists_of_levels_are_refused(levels: list[Any], said: str) -> None:
    with pytest.raises(InvalidStrategyError, match=said):
        Levels(levels)


TOPIC = "persistent://public/default/orders-delay-level"


def test_a_target_that_is_not_listed_is_refused() -> None:
    description = describe(targets=("orders", "bills"))
    description.check_target("persistent://public/default/orders")
    with pytest.raises(TargetNotAllowedError) as caught:
        description.check_target("persistent://public/default/other")
    for part in (TOPIC, "default/other", "default/orders", "default/bills", "levels create"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"targets": ()}, "at least one target"),
        ({"targets": ("a/b",)}, "'a/b' is not a topic name"),
        ({"topic": ""}, "not a topic name"),
        ({"hold_pause_ms": 0}, "hold_pause_ms is 0"),
        ({"window_partitions": 0}, "window_partitions is 0"),
        ({"window_partitions": 65}, "1 to 64 partitions"),
    ],
)
def test_invalid_values_are_refused(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(InvalidInputError, match=part):
        describe(**changes)


@pytest.mark.parametrize("fault", ["topic", "partitions", "window", "name"])
def test_other_names_and_partitions_than_those_of_this_version_are_refused(fault: str) -> None:
    value = json.loads(describe().to_json())
    assert LevelTopicDescription.from_json(TOPIC, json.dumps(value)) == describe()
    if fault in ("topic", "partitions"):
        value["levels"][1][fault] = value["levels"][0][fault]
    elif fault == "window":
        value["topics"]["window"] = TOPIC
    with pytest.raises(LevelTopicError, match="it names"):
        LevelTopicDescription.from_json(TOPIC + "s" * (fault == "name"), json.dumps(value))


def test_a_spread_that_is_over_is_forgotten_at_the_next_change() -> None:
    pauses = Pauses().pause("a", 0).resume("a", 10, 60).pause("b", 50)
    assert dict(pauses.resumed) == {"a": Spread(10, 60)}
    assert pauses.resume("b", 71).resumed == ()


ONE_DAY = timedelta(days=1)
MONTH = Load(rate=2000, maximum_delay=30 * ONE_DAY, size=1024)


def test_the_figures_of_a_month_of_two_thousand_messages_a_second() -> None:
    assert MONTH.pending == 2000 * 15 * 86_400
    assert MONTH.stored_bytes == MONTH.pending * 1224 * 2
    days, hours = PartitionStrategy(), PartitionStrategy(partition_by="HOUR", maximum_delay=ONE_DAY)
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
        {"maximum_delay": timedelta(0)},
        {"mean_delay": 31 * ONE_DAY},
    ],
)
def test_impossible_loads_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError):
        replace(MONTH, **changes)


def test_delays_without_levels_are_refused_with_the_reason() -> None:
    for longest, words in (
        (timedelta(seconds=30), "no list of levels fits"),
        (timedelta(days=36501), "beyond 36500d.*recirculate"),
        (timedelta(hours=2, microseconds=1), "not a whole number of milliseconds"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            plans(replace(MONTH, maximum_delay=longest, mean_delay=None))
