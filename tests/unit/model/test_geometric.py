"""Tests of lists of levels whose units grow geometrically."""

from __future__ import annotations

import shlex
from datetime import timedelta
from itertools import combinations

import pulsar
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delaylevel.cli.levels import parse_level
from delaylevel.model.geometric import (
    READABLE,
    create_options,
    default_lead,
    geometric_levels,
    geometric_lists,
)
from delaylevel.model.path import hop_times
from delaylevel.model.plan import Load, geometric_plans, plan, plans
from delaylevel.model.router import Router
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy, partition_count
from delaylevel.testing import MemoryPulsar

DAY, HOUR, MINUTE = timedelta(days=1), timedelta(hours=1), timedelta(minutes=1)
YEAR = 365 * DAY
DAYS_AND_HOURS = Levels(
    [
        PartitionStrategy(partition_by="DAY", maximum_delay=YEAR),
        PartitionStrategy(partition_by="HOUR", maximum_delay=DAY),
    ]
)


def test_a_year_needs_a_tenth_of_the_partitions() -> None:
    assert DAYS_AND_HOURS.partitions == 387
    found = geometric_levels(YEAR, HOUR, 4)
    assert found is not None
    assert [level.name for level in found] == ["MONTH", "3d", "8h", "HOUR"]
    assert found.partitions == 36
    three = geometric_levels(YEAR, HOUR, 3)
    assert three is not None
    assert three.partitions == 60


@given(st.integers(2, 4), st.sampled_from([HOUR, MINUTE]), st.integers(3, 400))
@settings(max_examples=40, deadline=None)
def test_a_proposal_fits_and_no_message_is_late(count: int, finest: timedelta, days: int) -> None:
    levels = geometric_levels(days * DAY, finest, count)
    assert levels is not None
    assert len(levels) == count
    assert levels.maximum_ms == days * DAY // timedelta(milliseconds=1)
    assert levels.strategies[-1].unit == finest
    router = Router(levels)
    for part in (0.001, 0.1, 0.37, 0.5, 0.99, 1):
        delay_ms = round(levels.maximum_ms * part)
        *hops, due_ms = hop_times(router, delay_ms)
        assert hops == sorted(hops)
        assert all(hop_ms < due_ms for hop_ms in hops)
        # A message can need one more round in the last partition of each finer level.
        assert len(hops) <= 2 * count - 1


def test_no_other_readable_units_need_fewer_partitions() -> None:
    for count in (2, 3):
        found = geometric_levels(YEAR, HOUR, count)
        assert found is not None
        units = [unit for unit in READABLE if HOUR < unit < YEAR]
        totals = []
        for chosen in combinations(sorted(units, reverse=True), count - 1):
            tops = (YEAR, *chosen)
            totals.append(sum(map(partition_count, tops, (*chosen, HOUR))))
        assert found.partitions == min(totals)


def test_leads_are_those_of_the_next_shorter_named_unit() -> None:
    for by in PartitionBy:
        assert default_lead(by.unit) == by.default_lead
    assert default_lead(8 * HOUR) == PartitionBy.HOUR.default_lead
    assert default_lead(timedelta(seconds=20)) == timedelta(seconds=5)


def test_lists_get_longer_and_need_fewer_partitions() -> None:
    found = list(geometric_lists(YEAR, MINUTE, 1000))
    assert [len(levels) for levels in found] == sorted(len(levels) for levels in found)
    totals = [levels.partitions for levels in found]
    assert totals == sorted(totals, reverse=True)
    assert list(geometric_lists(HOUR, HOUR, 1000)) == []
    limited = list(geometric_lists(YEAR, MINUTE, 50))
    assert all(level.partitions <= 50 for levels in limited for level in levels)


def test_a_plan_counts_the_writes_and_the_peak() -> None:
    load = Load(100_000, YEAR, 1024, nine_share=0.1)
    named = plan(load, DAYS_AND_HOURS)
    (three, four, *_) = geometric_plans(load, [named])[1:]
    assert (three.partitions, four.partitions) == (60, 36)
    assert 3.9 < named.writes < 4 < three.writes < four.writes < 6
    # 864 million messages within the hour before nine.
    assert named.peak_moves_per_s == pytest.approx(200_000 + 240_000)
    spread = Load(100_000, YEAR, 1024, nine_share=0.1, nine_spread=2 * HOUR)
    assert plan(spread, DAYS_AND_HOURS).peak_moves_per_s == pytest.approx(200_000 + 120_000)
    assert named.window == three.window == four.window


def test_geometric_lists_need_fewer_partitions_than_named_ones() -> None:
    load = Load(2000, 30 * DAY, 1024)
    named = plans(load)
    by_unit = {"MINUTE": 111, "HOUR": 52, "DAY": 29}
    for item in geometric_plans(load, named):
        assert item.partitions < by_unit[item.levels[-1].name]


@pytest.mark.parametrize("count", [2, 4, 6])
def test_the_options_create_these_levels(count: int) -> None:
    levels = geometric_levels(YEAR, MINUTE, count)
    assert levels is not None
    assert parsed(create_options(levels)) == levels


def parsed(options: str) -> Levels:
    """Return the levels that ``delaylevel levels create`` makes of its options."""
    words = shlex.split(options)
    values = list(zip(words[::2], words[1::2], strict=True))
    given = dict(values)
    first = parse_level(f"{given['--unit']}:{given['--max-delay']}:{given['--lead']}")
    return Levels([first, *(parse_level(text) for name, text in values if name == "--then")])


def test_a_message_delayed_by_a_year_is_on_time_after_few_hops() -> None:
    levels = geometric_levels(YEAR, HOUR, 4)
    assert levels is not None
    delay = YEAR - timedelta(days=3, hours=5, minutes=7)
    with MemoryPulsar() as memory:
        producer = memory.client().create_producer(
            "orders",
            enable_delay_level_topic=True,
            partition_strategy=list(levels.strategies),
            final_window="tracker",
        )
        consumer = memory.client().subscribe("orders", "billing")
        producer.send(b"a year later", deliver_after=delay)
        report = memory.advance(delay - timedelta(milliseconds=2))
        hops = hop_times(Router(levels), delay // timedelta(milliseconds=1))
        assert report.total == len(hops) - 1 == 3
        with pytest.raises(pulsar.Timeout):
            consumer.receive(0)
        memory.advance(timedelta(milliseconds=4))
        assert consumer.receive(0).data() == b"a year later"
