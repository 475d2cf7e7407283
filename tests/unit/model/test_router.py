"""Tests of the routing rule over random levels, due times and clocks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from delaylevel.model.router import DUE, WINDOW, Decision, Hop, Router
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from support.seeds import examples

T0 = 1_800_000_000_000
DAY = 86_400_000
HOUR = 3_600_000
NAMED = [by.unit for by in PartitionBy]

quick = examples(24)


def ms(value: int) -> timedelta:
    return timedelta(milliseconds=value)


@st.composite
def level_lists(draw: st.DrawFn) -> Levels:
    """Draw one to four levels, coarse to fine, with named and other units."""
    count = draw(st.integers(1, 4))
    odd = st.integers(100, 400 * DAY).map(ms)
    units = draw(
        st.lists(
            st.one_of(st.sampled_from(NAMED), odd), min_size=count, max_size=count, unique=True
        )
    )
    units.sort(reverse=True)
    overflow = draw(st.sampled_from(["reject", "recirculate"]))
    chosen, coarser = [], None
    for unit in units:
        least = max(unit + ms(1), coarser or unit)
        most = max(least, min(least * 3, timedelta(days=36500)))
        length = unit // ms(1)
        chosen.append(
            PartitionStrategy(
                partition_by=unit,
                maximum_delay=draw(
                    st.one_of(
                        st.integers(least // ms(1), most // ms(1)).map(ms),
                        st.integers(2, 40).map(lambda times, u=unit, at=least: max(at, u * times)),
                    )
                ),
                # With a lead above half a unit, a level of one partition needs many rounds.
                lead=draw(st.one_of(st.none(), st.integers(1, length // 2).map(ms))),
                overflow=overflow,
                partition_limit=1 << 40,
            )
        )
        coarser = unit
    return Levels(chosen)


def delays(levels: Levels) -> st.SearchStrategy[int]:
    """Return delays of every size, including the bounds of units and of the list."""
    longest = levels.maximum_ms
    most = longest * 5 if levels.overflow == "recirculate" else longest
    edges = [longest]
    for level in levels:
        edges += [level.unit_ms, level.unit_ms * 2, level.maximum_ms, level.near_due_ms]
    near = st.tuples(st.sampled_from(edges), st.sampled_from([-1, 0, 1])).map(sum)
    everything = st.one_of(st.integers(0, longest), near, st.integers(0, most))
    return everything.map(lambda delay: min(delay, most))


def rounds(remaining_ms: int, unit_ms: int, lead_ms: int, partitions: int) -> int:
    """Return the largest number of hops in a level for a message that arrives with this delay.

    A delay below (partitions + 1) units takes one hop: less than a unit and the lead remain, which
    the level does not accept again. A longer delay shrinks by partitions * unit - lead with each
    round through the last partition.
    """
    beyond = remaining_ms - (partitions + 1) * unit_ms
    if beyond < 0:
        return 1
    return 1 + beyond // (partitions * unit_ms - lead_ms) + 1


def most_hops(levels: Levels, delay_ms: int) -> int:
    """Return the sum over the levels; a message leaves a level with at most the near-due delay."""
    bound, remaining = 0, delay_ms
    for level in levels:
        if remaining >= level.unit_ms:
            bound += rounds(remaining, level.unit_ms, level.lead_ms, level.partitions)
            remaining = min(remaining, level.near_due_ms)
    return bound


def follow(
    levels: Levels,
    due_ms: int,
    sent_ms: int,
    *,
    skew_ms: int = 0,
    late: Callable[[int], int] = lambda lead_ms: 0,
    early: Callable[[int], int | None] = lambda wait_ms: None,
) -> tuple[int, list[Decision], Decision]:
    """Follow one message through its hand-offs; return its final time, its hops and last decision.

    The producer's clock is ahead by ``skew_ms``. The mover is late by a function of the level's
    lead, and reads early by one of the whole wait, both in ms.
    """
    router = Router(levels)
    now, stamp, came_from = sent_ms, sent_ms + skew_ms, None
    hops: list[Decision] = []
    while True:
        decision = router.decide(due_ms, stamp if came_from is None else now, came_from)
        if decision.hop is not Hop.PARK:
            return now, hops, decision
        level = levels[decision.level]
        assert 0 <= decision.partition < level.partitions
        hops.append(decision)
        assert len(hops) < 10_000
        ready_ms = router.hand_off_ms(decision.level, decision.partition, stamp)
        assert ready_ms == stamp + (decision.partition + 1) * level.unit_ms - level.lead_ms
        part = early(max(0, ready_ms - now))
        now = max(now, ready_ms + late(level.lead_ms)) if part is None else now + part
        stamp, came_from = now, decision.level


@quick
@given(level_lists(), st.data())
def test_hand_offs_reach_the_window_in_time_and_in_few_hops(
    levels: Levels, data: st.DataObject
) -> None:
    delay = data.draw(delays(levels))
    sent = data.draw(st.integers(0, 4 * T0))
    at, hops, last = follow(levels, sent + delay, sent)
    remaining = sent + delay - at
    assert len(hops) <= most_hops(levels, delay)
    if not hops:
        # Only delays below the finest unit are not parked.
        assert delay < levels[len(levels) - 1].unit_ms
        assert last == (WINDOW if delay > 0 else DUE)
        return
    finest = levels[max(hop.level for hop in hops)]
    assert last == WINDOW
    assert finest.lead_ms <= remaining <= finest.near_due_ms
    # Levels are used from coarse to fine, and only as needed.
    assert [hop.level for hop in hops] == sorted(hop.level for hop in hops)
    assert remaining < min(
        [level.unit_ms for level in levels][finest.index + 1 :] or [remaining + 1]
    )


@quick
@given(level_lists(), st.data())
def test_movers_late_and_a_producer_clock_off_by_at_most_the_lead_make_no_message_late(
    levels: Levels, data: st.DataObject
) -> None:
    lead, delay = levels.smallest_lead_ms, data.draw(delays(levels))
    skew = data.draw(st.sampled_from([0, -lead, lead]) | st.integers(-lead, lead))
    # The delay must be acceptable by the producer's own clock.
    assume(levels.overflow == "recirculate" or delay - skew <= levels.maximum_ms)
    lateness = st.sampled_from([0, 1, 2])
    at, hops, _ = follow(
        levels,
        T0 + delay,
        T0,
        skew_ms=skew,
        late=lambda lead_ms: lead_ms * data.draw(lateness) // 2,
    )
    assert at <= T0 + delay
    assert len(hops) <= most_hops(levels, max(delay, delay - skew))


@pytest.mark.parametrize("unit", [*NAMED, timedelta(seconds=2)])
def test_a_mover_later_than_the_lead_makes_a_message_late(unit: timedelta) -> None:
    """Prove that the lead is exact, with a message on the bound of a unit."""
    levels = Levels(PartitionStrategy(partition_by=unit, maximum_delay=unit * 3))
    due = T0 + levels[0].unit_ms
    at, hops, last = follow(levels, due, T0, late=lambda lead: lead + 1)
    assert [hop.partition for hop in hops] == [0]
    assert (at, last) == (due + 1, DUE)
    at, _, last = follow(levels, due, T0, late=lambda lead: lead)
    assert (at, last) == (due, DUE)


@quick
@given(level_lists(), st.data())
def test_an_early_message_is_parked_again_and_in_time(levels: Levels, data: st.DataObject) -> None:
    """Read messages before their hand-off, as may happen after a publish time a day ahead."""
    delay = data.draw(delays(levels))
    ahead = data.draw(st.sampled_from([0, DAY, -DAY]))
    assume(levels.overflow == "recirculate" or delay <= levels.maximum_ms)
    budget = [data.draw(st.integers(0, 5))]

    def early(wait_ms: int) -> int | None:
        if not budget[0]:
            return None
        budget[0] -= 1
        return data.draw(st.integers(0, wait_ms))

    given_early = budget[0]
    due = T0 + ahead + delay  # deliver_after, by a clock that is ahead
    # Exclude cases with too many rounds, such as a day in a level of one partition by 100 ms.
    assume(most_hops(levels, max(delay, due - T0)) < 2000)
    at, hops, last = follow(levels, due, T0, skew_ms=ahead, early=early)
    if hops:
        if due >= T0:
            assert at <= due
            assert due - at <= levels[hops[-1].level].near_due_ms
        assert len(hops) <= given_early + most_hops(levels, max(delay, due - T0))
    assert last == (DUE if at >= due else WINDOW) or not hops
