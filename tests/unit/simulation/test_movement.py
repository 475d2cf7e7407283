"""Tests of the movement of cohorts: conservation, ready times, equality with single messages."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delaylevel.cluster.values import LedgerInfo
from delaylevel.errors import DelayTooLongError
from delaylevel.model.position import EARLIEST, Position
from delaylevel.model.router import Hop, Router
from delaylevel.model.source_partition import source_partitions
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.mover.ready import ready_bound
from delaylevel.simulation.movement import Cohort, Movement, NoRecord, level_topic

TRIGGER_MS = 100


def levels(*units_s: float, longest_s: float) -> Levels:
    """Return levels with these units; each finer one covers a unit of the one before."""
    tops = [longest_s, *units_s]
    return Levels(
        PartitionStrategy(
            partition_by=timedelta(seconds=unit), maximum_delay=timedelta(seconds=top)
        )
        for unit, top in zip(units_s, tops, strict=False)
    )


THREE = levels(30, 6, 1, longest_s=200)


class Hops(NoRecord):
    """The times and places of all hops of each cohort."""

    def __init__(self) -> None:
        self.of: dict[Cohort, list[tuple[float, int]]] = defaultdict(list)
        self.handed_ms: list[tuple[float, float]] = []
        self.parked_messages = self.arrived_messages = 0.0

    def parked(self, level: int, now_ms: float, cohort: Cohort, came_from: int | None) -> None:
        self.of[cohort].append((now_ms, level))
        if came_from is None:
            self.parked_messages += cohort.messages

    def handed_off(self, level: int, now_ms: float, cohort: Cohort) -> None:
        self.handed_ms.append((now_ms, cohort.messages))

    def arrived(self, now_ms: float, cohort: Cohort, came_from: int | None) -> None:
        self.of[cohort].append((now_ms, -1))
        self.arrived_messages += cohort.messages


def moving(cohorts: Iterable[Cohort], among: Levels = THREE) -> tuple[Movement, Hops]:
    """Return the movement of cohorts and the record of their hops."""
    movement = Movement(level_topic(among), cohorts, trigger_ms=TRIGGER_MS)
    hops = movement.recorder = Hops()
    return movement, hops


def messages(seed: int, count: int = 300, longest_ms: int = 200_000) -> list[Cohort]:
    """Return single messages, published over two minutes."""
    chosen = random.Random(seed)
    times = sorted(chosen.randrange(120_000) for _ in range(count))
    return [Cohort(at, at + chosen.randint(1, longest_ms), 1) for at in times]


def one_by_one(sent: Cohort, among: Levels) -> list[tuple[float, int]]:
    """Return the hops of one message, of which a mover finds out at its triggers."""
    router = Router(among)
    hops: list[tuple[float, int]] = []
    now_ms, level = sent.published_ms, None
    while (hop := router.decide(sent.due_ms, now_ms, level)).hop is Hop.PARK:
        hops.append((now_ms, hop.level))
        ready_ms = router.hand_off_ms(hop.level, hop.partition, now_ms)
        now_ms, level = math.ceil(ready_ms / TRIGGER_MS) * TRIGGER_MS, hop.level
    return [*hops, (now_ms, -1)]


@given(st.integers(0, 1 << 32))
@settings(max_examples=20, deadline=None)
def test_cohorts_of_one_message_move_as_each_message_by_itself(seed: int) -> None:
    sent = messages(seed)
    movement, hops = moving(sent)
    movement.run(400_000)
    assert {cohort: hops.of[cohort] for cohort in sent} == {
        cohort: one_by_one(cohort, THREE) for cohort in sent
    }


@given(st.integers(0, 1 << 32), st.sampled_from([math.inf, 20.0, 3.0]))
@settings(max_examples=20, deadline=None)
def test_what_was_published_is_stored_or_has_arrived_after_each_step(
    seed: int, rate: float
) -> None:
    sent = [cohort._replace(messages=1 + index % 7) for index, cohort in enumerate(messages(seed))]
    movement, hops = moving(sent)
    movement.rate = rate
    for until_ms in range(0, 400_000, 7_000):
        movement.run(until_ms)
        stored = sum(cohort.messages for _, queue in movement.contents() for _, cohort in queue)
        assert stored == pytest.approx(sum(movement.stored))
        parked = sum(len(movement_hops) > 0 for movement_hops in hops.of.values())
        assert parked >= sum(cohort.published_ms < until_ms for cohort in sent)
        published = sum(cohort.messages for cohort in sent if cohort in hops.of)
        assert published == stored + hops.arrived_messages
    if rate == math.inf:
        assert not any(movement.stored)


@given(st.integers(0, 1 << 32))
@settings(max_examples=20, deadline=None)
def test_a_mover_without_backlog_is_never_late_and_never_too_early(seed: int) -> None:
    sent = messages(seed)
    movement, hops = moving(sent)
    movement.run(400_000)
    finest = THREE[len(THREE) - 1]
    for cohort in sent:
        arrived_ms, _ = hops.of[cohort][-1]
        assert arrived_ms <= cohort.due_ms
        longest_ms = finest.unit_ms + finest.lead_ms + finest.tolerance_ms
        assert cohort.due_ms - arrived_ms <= longest_ms


class _Stored:
    """The admin interface of a broker on which each cohort of a partition is an entry."""

    def __init__(self, times_ms: list[int]) -> None:
        self._times_ms = times_ms

    def last_message_id(self, topic: TopicName) -> Position | None:
        return Position(1, len(self._times_ms) - 1) if self._times_ms else None

    def message_id_at(self, topic: TopicName, time_ms: int) -> Position | None:
        after = [index for index, at in enumerate(self._times_ms) if at >= time_ms]
        return Position(1, after[0] if after else len(self._times_ms))

    def entry_publish_time(self, topic: TopicName, position: Position) -> int | None:
        inside = 0 <= position.entry < len(self._times_ms)
        return self._times_ms[position.entry] if inside else None

    def ledgers(self, topic: TopicName) -> list[LedgerInfo]:
        return [LedgerInfo(1, len(self._times_ms))]

    def open_transaction_at(self, topic: TopicName) -> Position | None:
        return None


@pytest.mark.parametrize("now_ms", range(110_000, 150_000, 4_000))
def test_a_pass_hands_off_what_the_movers_ready_bound_allows(now_ms: int) -> None:
    # The clock starts later: a publish time of 0 does not exist on a broker.
    sent = [
        cohort._replace(published_ms=cohort.published_ms + 1000, due_ms=cohort.due_ms + 1000)
        for cohort in messages(7, 3000)
    ]
    movement, _ = moving(sent)
    # No pass for a while, so that each partition has ready messages.
    movement.outage_ms = (90_000, now_ms)
    movement.run(now_ms)
    expected = {}
    for source, queue in movement.contents():
        times_ms = [int(at) for at, _ in queue]
        bound = ready_bound(
            _Stored(times_ms),  # type: ignore[arg-type]
            source,
            EARLIEST,
            now_ms,
            THREE.smallest_lead_ms,
        )
        expected[source] = max(0, bound.end.entry) if bound.end > EARLIEST else 0
    assert sum(expected.values()) > 100
    before = {source: {cohort for _, cohort in queue} for source, queue in movement.contents()}
    movement.outage_ms = (0, 0)
    movement.run(now_ms + 1)  # one pass
    for source, queue in movement.contents():
        left = before[source] & {cohort for _, cohort in queue}
        assert len(before[source]) - len(left) == expected[source], source


def test_a_mover_with_a_rate_hands_off_no_more() -> None:
    movement, hops = moving(messages(3, 2000))
    movement.rate = 40.0
    movement.run(400_000)
    times = [at for at, _ in hops.handed_ms]
    assert times == sorted(times)
    for first, last in ((0, 400), (400, 1200), (700, 1900)):
        assert last - first <= 40.0 * (times[last] - times[first]) / 1000 + 1


def test_nothing_moves_in_an_outage_and_everything_afterwards() -> None:
    sent = messages(4, 2000)
    movement, hops = moving(sent)
    movement.outage_ms = (60_000, 100_000)
    movement.run(400_000)
    assert not [at for at, _ in hops.handed_ms if 60_000 <= at < 100_000]
    assert hops.arrived_messages == len(sent)
    late = [cohort for cohort in sent if hops.of[cohort][-1][0] > cohort.due_ms]
    assert late
    assert all(60_000 <= cohort.due_ms <= 100_000 for cohort in late)


def test_a_fork_continues_independently() -> None:
    sent = messages(5, 1000)
    movement, hops = moving(sent)
    movement.run(50_000)
    rest = [cohort for cohort in sent if cohort.published_ms >= 50_000]
    fork = movement.fork(rest)
    other = fork.recorder = Hops()
    fork.run(400_000)
    before = hops.arrived_messages
    movement.run(400_000)
    assert hops.arrived_messages == len(sent) == before + other.arrived_messages


def test_a_level_that_needs_another_round_keeps_its_messages() -> None:
    # A lead that is long for the unit: many messages go round in the last partition.
    long_lead = Levels(
        [
            PartitionStrategy(
                partition_by=timedelta(seconds=10),
                maximum_delay=timedelta(seconds=30),
                lead=timedelta(seconds=9),
            ),
            PartitionStrategy(
                partition_by=timedelta(seconds=2), maximum_delay=timedelta(seconds=10)
            ),
        ]
    )
    sent = messages(6, 500, 30_000)
    movement, hops = moving(sent, long_lead)
    movement.run(400_000)
    assert hops.arrived_messages == 500
    assert max(len(found) for found in hops.of.values()) > 3
    assert {cohort: hops.of[cohort] for cohort in sent} == {
        cohort: one_by_one(cohort, long_lead) for cohort in sent
    }


def test_every_partition_of_the_levels_is_a_source() -> None:
    movement, _ = moving(())
    found = source_partitions(level_topic(THREE))
    assert movement.sources == [source for source in found if source.role.value == "level"]
    assert len(movement.sources) == THREE.partitions


def test_a_delay_beyond_the_longest_level_is_refused_as_by_a_producer() -> None:
    movement, _ = moving([Cohort(0, 200_001, 1)])
    with pytest.raises(DelayTooLongError):
        movement.run(1)
