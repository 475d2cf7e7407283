"""The bound up to which a partition is ripe, against a model of the broker's own search."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from delaylevel.cluster.port import LedgerInfo
from delaylevel.model.level_topic import Role
from delaylevel.model.position import EARLIEST, Position
from delaylevel.model.source_partition import SourcePartition
from delaylevel.model.topic_name import TopicName
from delaylevel.mover import ready as frontier
from delaylevel.mover.ready import ready_bound

T0 = 1_800_000_000_000
DAY = 86_400_000
LEAD = 600_000
SLACK = LEAD // 2
AFTER = 3 * DAY - LEAD

quick = settings(max_examples=150)


def partition(after_ms: int = AFTER) -> SourcePartition:
    topic = "persistent://public/default/orders-delay-level-partition-2"
    return SourcePartition(topic.removesuffix("-partition-2"), topic, Role.LEVEL, 0, 2, after_ms)


@dataclass
class Stored:
    """A partition as a broker has it: ledgers of publish times, and its search by publish time.

    ``message_id_at`` goes step by step as ``OpFindNewest`` of the managed ledger does: the first
    entry, the last, then halves; whatever is stored takes part, acknowledged or not.
    """

    times: dict[int, list[int]] = field(default_factory=dict)
    calls: int = 0
    _entries: list[tuple[Position, int]] = field(default_factory=list)

    @classmethod
    def of(cls, times: list[int], cuts: tuple[int, ...] = ()) -> Stored:
        """Put times into ledgers 10, 12, … that are cut at these numbers of entries."""
        edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(times)}), len(times)]
        return cls(
            {
                10 + 2 * index: times[first:behind]
                for index, (first, behind) in enumerate(pairwise(edges))
            }
        )

    @property
    def entries(self) -> list[tuple[Position, int]]:
        size = sum(map(len, self.times.values()))
        if len(self._entries) != size:
            self._entries = [
                (Position(ledger, entry), time)
                for ledger, times in self.times.items()
                for entry, time in enumerate(times)
            ]
        return self._entries

    def append(self, time: int) -> None:
        self.times[max(self.times)].append(time)

    def roll(self) -> None:
        self.times[max(self.times) + 2] = []

    # -- the port

    def last_message_id(self, topic: TopicName) -> Position | None:
        self.calls += 1
        entries = self.entries
        return entries[-1][0] if entries else None

    def message_id_at(self, topic: TopicName, publish_ms: int) -> Position | None:
        self.calls += 1
        entries = self.entries

        def matches(number: int) -> bool:
            return entries[number][1] < publish_ms

        if not matches(0):
            return entries[0][0]
        if matches(len(entries) - 1):
            return None
        newest, low, high = 0, 0, len(entries) - 1
        while low < high:
            middle = low + max((high - low) // 2, 1)
            if matches(middle):
                newest = low = middle
            else:
                high = middle - 1
        return entries[newest + 1][0]

    def entry_publish_time(self, topic: TopicName, position: Position) -> int | None:
        self.calls += 1
        times = self.times.get(position.ledger, [])
        return times[position.entry] if 0 <= position.entry < len(times) else None

    def ledgers(self, topic: TopicName) -> list[LedgerInfo]:
        self.calls += 1
        return [LedgerInfo(ledger, len(times)) for ledger, times in self.times.items()]

    # -- what a mover sees

    def number(self, position: Position) -> int:
        """Say how many entries lie before a position."""
        return bisect_left(self.entries, position.entry_start, key=lambda entry: entry[0])


def look(stored: Stored, start: Position, now_ms: int, after_ms: int = AFTER) -> tuple[int, int]:
    """Return how many entries lie before the bound, and when to look again; check its form."""
    bound = ready_bound(stored, partition(after_ms), start, now_ms, LEAD)  # type: ignore[arg-type]
    assert bound.end >= start
    assert bound.next_check_ms >= now_ms
    if bound.end != start:
        # What is acknowledged is the entry before the bound: it has to exist.
        assert bound.end.batch == -1
        assert 0 < bound.end.entry <= len(stored.times[bound.end.ledger])
    return stored.number(bound.end), bound.next_check_ms


cuts = st.lists(st.integers(1, 60), max_size=4).map(tuple)


@quick
@given(
    st.lists(st.integers(-4 * DAY, 0), min_size=1, max_size=60).map(sorted),
    cuts,
    st.data(),
)
def test_bound_is_exact_where_times_rise(
    offsets: list[int], cut: tuple[int, ...], data: st.DataObject
) -> None:
    now = T0
    stored = Stored.of([now + offset for offset in offsets], cut)
    ripe = sum(offset <= -AFTER for offset in offsets)
    done = data.draw(st.integers(0, ripe))
    start = stored.entries[done - 1][0].next_entry if done else EARLIEST
    found, again = look(stored, start, now)
    assert found == max(ripe, done)
    if found < len(offsets):
        # Not later than the next one is ripe, and not before there can be something.
        assert now < again <= max(now + 1, now + offsets[found] + AFTER)


@pytest.mark.parametrize(("before", "expected"), [(0, 1), (1, 0), (-1, 1)])
def test_bound_to_the_millisecond(before: int, expected: int) -> None:
    stored = Stored.of([T0, T0 + DAY])
    assert look(stored, EARLIEST, T0 + AFTER - before)[0] == expected


def test_empty_partition_is_looked_at_when_a_newcomer_can_be_ripe() -> None:
    assert look(Stored(), EARLIEST, T0) == (0, T0 + AFTER)
    read = Stored.of([T0])
    assert look(read, Position(10, 1), T0) == (1, T0 + AFTER)


def test_front_of_a_ledger_is_never_an_end() -> None:
    stored = Stored.of([T0, T0 + 1, T0 + DAY], cuts=(2,))
    bound = ready_bound(stored, partition(), EARLIEST, T0 + AFTER + 1, LEAD)  # type: ignore[arg-type]
    assert bound.end == Position(10, 2)
    # Near enough for the broker's own answer to be taken:
    stored = Stored.of([T0, T0 + 1, T0 + 2], cuts=(2,))
    bound = ready_bound(stored, partition(), EARLIEST, T0 + AFTER + 1, LEAD)  # type: ignore[arg-type]
    assert bound.end == Position(10, 2)


@pytest.mark.parametrize("far", [2, DAY])
def test_start_at_the_end_of_a_ledger_and_nothing_ripe_behind(far: int) -> None:
    stored = Stored.of([T0, T0 + 1, T0 + far], cuts=(2,))
    bound = ready_bound(stored, partition(), Position(10, 2), T0 + AFTER + 1, LEAD)  # type: ignore[arg-type]
    assert bound.end == Position(10, 2)
    assert bound.next_check_ms == T0 + far + AFTER


def test_start_in_the_middle_of_a_batch() -> None:
    stored = Stored.of([T0, T0 + 1, T0 + DAY])
    start = Position(10, 1, 7)
    ripe = ready_bound(stored, partition(), start, T0 + AFTER + 1, LEAD)  # type: ignore[arg-type]
    assert ripe.end == Position(10, 2)
    # Read early once (parked anew, up to message 6), and not ripe now: the rest of it waits.
    early = ready_bound(stored, partition(), start, T0 + AFTER, LEAD)  # type: ignore[arg-type]
    assert early.end == start
    assert early.next_check_ms == T0 + 1 + AFTER


def test_ledgers_that_were_trimmed_stop_nothing() -> None:
    stored = Stored.of([T0, T0 + 1, T0 + 2, T0 + DAY], cuts=(2,))
    del stored.times[10]
    assert look(stored, Position(10, 1), T0 + AFTER + 2)[0] == 1
    assert look(stored, EARLIEST, T0 + AFTER + 2)[0] == 1


@quick
@given(
    st.lists(st.tuples(st.integers(0, DAY), st.integers(-SLACK, SLACK)), min_size=1, max_size=60),
    cuts,
    st.integers(0, 2 * DAY),
)
def test_skew_hides_nothing_for_longer_than_the_clocks_differ(
    sent: list[tuple[int, int]], cut: tuple[int, ...], at: int
) -> None:
    sent.sort()  # by the true time
    stored = Stored.of([T0 + true + skew for true, skew in sent], cut)
    now = T0 + AFTER + at
    found, again = look(stored, EARLIEST, now)
    widest = max(skew for _, skew in sent) - min(skew for _, skew in sent)
    for number, (true, skew) in enumerate(sent):
        if T0 + true + skew + AFTER + widest <= now:
            assert number < found
        elif number >= found:
            assert again <= max(now, T0 + true + skew + AFTER + max(widest, SLACK))


def follow(
    stamped: list[tuple[int, int]],
    rolls: frozenset[int],
    after_ms: int,
    pace_ms: int = LEAD // 4,
    first_look_ms: int = T0,
) -> dict[int, int]:
    """Let entries arrive and a mover look until it has read them all; return when each was read.

    Args:
        stamped: (true arrival, the stamp that it carries), by arrival.
        rolls: before which entries a new ledger begins.
        pace_ms: the mover looks at multiples of this only, once next_check_ms is reached.
    """
    stored, start, read = Stored({10: []}), EARLIEST, {}
    arrived, again, now = 0, 0, first_look_ms
    last_stamp = max(max(stamp, true) for true, stamp in stamped)
    while len(read) < len(stamped):
        while arrived < len(stamped) and stamped[arrived][0] <= now:
            if arrived in rolls:
                stored.roll()
            stored.append(stamped[arrived][1])
            arrived += 1
        if now >= again:
            bound = ready_bound(stored, partition(after_ms), start, now, LEAD)  # type: ignore[arg-type]
            assert bound.next_check_ms >= now
            for number in range(stored.number(start), stored.number(bound.end)):
                read[number] = now
            start, again = bound.end, bound.next_check_ms
        # To the next trigger at which anything can happen.
        upcoming = again if arrived == len(stamped) else min(again, stamped[arrived][0])
        now = max(now + pace_ms, -(-upcoming // pace_ms) * pace_ms)
        assert now <= max(last_stamp + after_ms, first_look_ms) + DAY, "stalled"
    return read


ahead = st.sampled_from([LEAD, 2 * LEAD, DAY // 2, DAY + 1, 2 * DAY])


@settings(max_examples=120)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 20_000, 900_000, DAY // 2, DAY]),
            st.one_of(st.just(0), ahead),
        ),
        min_size=1,
        max_size=50,
    ),
    st.frozensets(st.integers(1, 49), max_size=4),
    st.sampled_from([1000, LEAD, DAY - LEAD, AFTER]),
    st.sampled_from([T0, T0 + DAY, T0 + 4 * DAY, T0 + 60 * DAY]),
)
@example([(0, LEAD), (0, LEAD), (1, 0)], frozenset(), LEAD, T0)  # one pause after another
def test_stamps_ahead_stall_nothing(
    entries: list[tuple[int, int]], rolls: frozenset[int], after_ms: int, first_look_ms: int
) -> None:
    true, run, stamped = T0, 0, []
    for gap, wrong in entries:
        true += gap
        run = run + 1 if wrong else 0
        stamped.append((true, true + (wrong if run < 16 else 0)))
    read = follow(stamped, rolls, after_ms, first_look_ms=first_look_ms)
    pace = LEAD // 4
    for number, (_, stamp) in enumerate(stamped):
        # Never later than half the lead and the mover's own pace, or than the mover's first look
        # (where a catch-up may take several).
        in_time = stamp + after_ms + SLACK + pace
        assert read[number] <= max(in_time, first_look_ms + 4 * pace + SLACK), number


@pytest.mark.parametrize("wrong_run", [1, 16, 17, 500, 3000])
@pytest.mark.parametrize("place", ["front", "middle", "end"])
@pytest.mark.parametrize("after_ms", [DAY - LEAD, AFTER, 20 * DAY])
def test_long_runs_of_wrong_stamps(wrong_run: int, place: str, after_ms: int) -> None:
    """A producer a day ahead sends a burst into steady traffic of one entry a minute."""
    honest = 1500
    at = {"front": 0, "middle": honest // 2, "end": honest}[place]
    times = [T0 + 60_000 * number for number in range(honest)]
    burst = T0 + 60_000 * at + DAY
    times[at:at] = [burst + number for number in range(wrong_run)]
    stored = Stored.of(times, (700, 1900))
    for ripe in (1, at - 1, at, at + 1, at + 2, at + 30, honest - 1, honest):
        if not 0 < ripe <= honest:
            continue
        now = T0 + 60_000 * (ripe - 1) + after_ms
        start = EARLIEST
        for _ in range(4):
            stored.calls = 0
            found, _again = look(stored, start, now, after_ms)
            assert stored.calls < 400
            start = stored.entries[found - 1][0].next_entry if found else EARLIEST
        assert found == ripe + (wrong_run if ripe > at else 0) or (
            # Where nothing but the burst is behind, its own stamps decide.
            place == "end" and found == honest + wrong_run
        )


def test_every_second_entry_wrong_costs_no_scan() -> None:
    times = [T0 + number * 1000 + (DAY if number % 2 else 0) for number in range(20_000)]
    stored = Stored.of(times)
    now = T0 + 15_000 * 1000 + AFTER
    assert now < T0 + DAY + AFTER  # no wrong stamp has passed yet
    start, looks = EARLIEST, 0
    while (found := look(stored, start, now)[0]) < 15_001:
        start, looks = stored.entries[found - 1][0].next_entry, looks + 1
        assert looks < 4
    assert stored.calls < 2000


def test_where_rounds_run_out_the_next_look_goes_on_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = T0 + AFTER
    wrong = [now - DAY]
    stored = Stored.of([*wrong * 9, T0, *wrong * 14, T0, *wrong * 301])
    assert look(stored, EARLIEST, now) == (25, now + SLACK // 2)
    monkeypatch.setattr(frontier, "_ROUNDS", 1)
    assert look(stored, EARLIEST, now) == (10, now)


@pytest.mark.parametrize("run", range(1, 17))
def test_one_honest_entry_between_runs_is_found(run: int) -> None:
    now = T0 + AFTER
    stored = Stored.of([now - DAY] * run + [T0] + [now - DAY] * 200)
    assert look(stored, EARLIEST, now)[0] == run + 1


def test_where_only_the_future_is_seen_it_is_soon_asked_again() -> None:
    now = T0 + AFTER
    stored = Stored.of([now + DAY] * 1001 + [T0] + [now + DAY] * 5000)
    found, again = look(stored, EARLIEST, now)
    assert found == 0
    assert again == now + SLACK // 2


def test_a_stamp_that_is_ripe_soon_hides_nothing_behind_it() -> None:
    # After an outage: stamps a day ahead, and by now just short of ripe, among what is overdue.
    now = T0 + AFTER + DAY
    times = []
    for number in range(200):
        times += [now - AFTER - DAY // 2 + number, now - AFTER + 1 + number]
    stored = Stored.of(times)
    start, looks = EARLIEST, 0
    while (found := look(stored, start, now)[0]) < 399:
        start, looks = stored.entries[found - 1][0].next_entry if found else EARLIEST, looks + 1
        assert looks < 3


def test_a_bound_is_never_before_the_start() -> None:
    # The start's own ledger is gone, an older one still there.
    stored = Stored({10: [T0], 12: [T0 + 1, T0 + DAY]})
    start = Position(11, 3)
    assert ready_bound(stored, partition(), start, T0 + AFTER, LEAD).end == start  # type: ignore[arg-type]


def test_entries_that_are_gone_stop_nothing() -> None:
    class Trimmed(Stored):
        def ledgers(self, topic: TopicName) -> list[LedgerInfo]:
            return [LedgerInfo(8, 40), *super().ledgers(topic)]

    stored = Trimmed.of([T0, T0 + 1, T0 + DAY])
    bound = ready_bound(stored, partition(), Position(8, 3), T0 + AFTER + 1, LEAD)  # type: ignore[arg-type]
    assert bound.end == Position(10, 2)
    # They are no stamps that anybody could wait for, or that would be asked about again.
    bound = ready_bound(stored, partition(), Position(8, 3), T0 + AFTER - DAY, LEAD)  # type: ignore[arg-type]
    assert bound.end == Position(8, 40)
    assert bound.next_check_ms == T0 + AFTER


def test_honest_gap_is_slept_through() -> None:
    stored = Stored.of([T0, T0 + DAY, T0 + DAY + 1])
    found, again = look(stored, EARLIEST, T0 + AFTER)
    assert (found, again) == (1, T0 + DAY + AFTER)


def test_lead_of_a_millisecond_is_enough_to_ask() -> None:
    stored = Stored.of([T0, T0 + 1])
    bound = ready_bound(stored, partition(), EARLIEST, T0 + AFTER, 1)  # type: ignore[arg-type]
    assert bound.end == Position(10, 1)


def test_errors_of_the_broker_are_passed_on() -> None:
    class Away(Stored):
        def message_id_at(self, topic: TopicName, publish_ms: int) -> Position | None:
            raise ConnectionError("away")

    with pytest.raises(ConnectionError):
        look(Away.of([T0]), EARLIEST, T0)
