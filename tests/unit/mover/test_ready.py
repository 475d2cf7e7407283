"""Tests of the ready messages of partitions: bounds by publish times, and their order."""

from __future__ import annotations

import random
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from delaylevel.cluster.port import LedgerInfo
from delaylevel.cluster.reader import entry_times
from delaylevel.errors import BrokerUnreachableError, NotFoundError
from delaylevel.model.level_topic import Role
from delaylevel.model.position import EARLIEST, Position, SourcePartition, source_partitions
from delaylevel.model.strategy import PartitionBy, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.mover import ready
from delaylevel.mover.ready import (
    NextChecks,
    ReadyQueue,
    ReadyRange,
    ReadySearch,
    first_due_ms,
    read_ready_range,
    ready_bound,
)
from delaylevel.testing import ManualClock, MemoryPulsar
from support.fakes import PartTimeAdmin
from support.seeds import examples

T0 = 1_800_000_000_000
HOUR, DAY = 3_600_000, 86_400_000
LEAD = 600_000
SLACK = LEAD // 2
AFTER = 3 * DAY - LEAD


def partition(after_ms: int = AFTER) -> SourcePartition:
    topic = "persistent://public/default/orders-delay-level-partition-2"
    return SourcePartition(topic.removesuffix("-partition-2"), topic, Role.LEVEL, 0, 2, after_ms)


@dataclass
class Stored:
    """A partition on a broker: ledgers of publish times, and the search by publish time.

    ``message_id_at`` searches like ``OpFindNewest`` of the managed ledger: the first entry, the
    last, then a binary search. It covers all stored entries, acknowledged or not. The broker lists
    ``missing`` ledgers, and delivers nothing of them.
    """

    times: dict[int, list[int]] = field(default_factory=dict)
    missing: dict[int, int] = field(default_factory=dict)
    miscount: int = 0
    calls: int = 0
    readable_until: Position | None = None
    _entries: list[tuple[Position, int]] = field(default_factory=list)

    @classmethod
    def of(cls, times: list[int], cuts: tuple[int, ...] = ()) -> Stored:
        """Put times into ledgers 10, 12, …, split after these numbers of entries."""
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

    def open_transaction_at(self, topic: TopicName) -> Position | None:
        return self.readable_until

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

    def ledgers(self, topic: TopicName) -> list[LedgerInfo]:
        self.calls += 1
        counts = {**self.missing, **{ledger: len(times) for ledger, times in self.times.items()}}
        counts[max(counts)] += self.miscount
        return [LedgerInfo(*each) for each in counts.items()]

    # -- a reader

    def entry_times(self, first: Position, last: Position) -> list[tuple[Position, int]]:
        self.calls += 1
        entries = self.entries
        behind = bisect_left(entries, last, key=lambda entry: entry[0]) + 1
        assert self.readable_until is None or last < self.readable_until
        return entries[self.number(first) : behind]

    # -- for the tests

    def bound(
        self, start: Position, now_ms: int, after_ms: int = AFTER, lead_ms: int = LEAD
    ) -> ReadyRange:
        """Return the ready bound of the partition."""
        admin: Any = self
        source = partition(after_ms)
        return ready_bound(admin, self.entry_times, source, start, now_ms, lead_ms)

    def number(self, position: Position) -> int:
        """Return the number of entries before a position."""
        return bisect_left(self.entries, position.entry_start, key=lambda entry: entry[0])


def check(stored: Stored, start: Position, now_ms: int, after_ms: int = AFTER) -> tuple[int, int]:
    """Return the number of entries before the bound, and the next check; verify its form."""
    bound = stored.bound(start, now_ms, after_ms)
    assert bound.end >= start
    assert bound.next_check_ms >= now_ms
    if bound.end != start:
        # The mover acknowledges the entry before the bound, so that entry must exist.
        assert bound.end.batch == -1
        assert 0 < bound.end.entry <= len(stored.times[bound.end.ledger])
    return stored.number(bound.end), bound.next_check_ms


cuts = st.lists(st.integers(1, 60), max_size=4).map(tuple)


# A quiet ledger: one message, one a day later.
PAIR = {10: [0, DAY]}
SPLIT = {10: [0, 1], 12: [DAY]}
FUTURE = [9 * DAY] * 5000
# Ledgers by the times of their entries since T0, the start, the time since T0 + AFTER, and the
# expected end and next check (since T0; None: now).
BOUNDS = {
    "just ready": (PAIR, EARLIEST, 0, Position(10, 1), DAY + AFTER),
    "not ready for a millisecond": (PAIR, EARLIEST, -1, EARLIEST, AFTER),
    # A new message can be ready then at the earliest.
    "empty": ({}, EARLIEST, -AFTER, EARLIEST, AFTER),
    "everything is read": ({10: [0]}, Position(10, 1), -AFTER, Position(10, 1), AFTER),
    "a quiet day": ({10: [0, DAY, DAY + 1]}, EARLIEST, 0, Position(10, 1), DAY + AFTER),
    # An acknowledgement needs an entry that exists, so never the front of a ledger.
    "end of a ledger": (SPLIT, EARLIEST, 1, Position(10, 2), DAY + AFTER),
    "by the broker's answer": ({10: [0, 1], 12: [2]}, EARLIEST, 1, Position(10, 2), 2 + AFTER),
    "stays at the end": (SPLIT, Position(10, 2), 1, Position(10, 2), DAY + AFTER),
    "stays by its answer": ({10: [0, 1], 12: [2]}, Position(10, 2), 1, Position(10, 2), 2 + AFTER),
    # Messages up to 6 were read early and parked again.
    "in a batch": ({10: [0, 1, DAY]}, Position(10, 1, 7), 1, Position(10, 2), DAY + AFTER),
    "the rest of it is early": ({10: [0, 1]}, Position(10, 1, 7), 0, Position(10, 1, 7), 1 + AFTER),
    "trimmed": ({12: [2, DAY]}, Position(10, 1), 2, Position(12, 1), DAY + AFTER),
    "the ledger of the start is gone": ({10: [0], 12: [1]}, Position(11, 3), 0, None, 1 + AFTER),
    # Its entries are ready when the next one is.
    "missing entries": ({8: 40, 10: [0, DAY]}, Position(8, 3), 0, Position(10, 1), DAY + AFTER),
    "early missing ones": ({8: 40, 10: [0]}, Position(8, 3), -DAY, Position(8, 3), AFTER),
    "only future times": ({10: [*FUTURE[:1001], 0, *FUTURE]}, EARLIEST, 0, EARLIEST, 1),
}


@pytest.mark.parametrize(("times", "start", "now", "end", "again"), BOUNDS.values(), ids=BOUNDS)
def test_the_bound_in_special_cases(
    times: dict[int, Any], start: Position, now: int, end: Position | None, again: int
) -> None:
    missing = {ledger: count for ledger, count in times.items() if isinstance(count, int)}
    stored = Stored(
        {
            ledger: [T0 + time for time in found]
            for ledger, found in times.items()
            if ledger not in missing
        },
        missing=missing,
    )
    now_ms = T0 + AFTER + now
    check(stored, start, now_ms)
    # A time in the future may hide what is ready: it is looked for soon.
    again_ms = now_ms + SLACK // 2 if again == 1 else T0 + again
    found = stored.bound(start, now_ms)
    assert (found.end, found.next_check_ms) == (end or start, again_ms)


def test_a_held_message_from_the_future_is_tried_again_at_once() -> None:
    """A clock was ahead when it was held. Otherwise it would wait for months."""
    stored: Any = Stored.of([T0 + 90 * DAY, T0])
    held = replace(partition(30_000), role=Role.HELD)
    bound = ready_bound(stored, stored.entry_times, held, EARLIEST, T0, LEAD)
    assert bound == ReadyRange(held, Position(10, 2), T0)


@pytest.mark.parametrize("miscount", [-2, 2])
def test_the_count_of_an_open_ledger_may_be_wrong(miscount: int) -> None:
    stored = Stored({10: [T0, T0 + 1, T0 + DAY]}, miscount=miscount)
    found = stored.bound(EARLIEST, T0 + AFTER + 1)
    assert (found.end, found.next_check_ms) == (Position(10, 2), T0 + DAY + AFTER)


@examples(50)
@given(
    st.lists(st.tuples(st.integers(0, DAY), st.integers(-SLACK, SLACK)), min_size=1, max_size=60),
    st.booleans(),
    cuts,
    st.integers(-AFTER, 2 * DAY),
    st.data(),
)
def test_the_bound_is_exact_but_for_the_difference_of_the_clocks(
    sent: list[tuple[int, int]],
    equal: bool,
    cut: tuple[int, ...],
    at: int,
    data: st.DataObject,
) -> None:
    sent = sorted((true, 0 if equal else skew) for true, skew in sent)  # by the true time
    times = [T0 + true + skew for true, skew in sent]
    stored, now = Stored.of(times, cut), T0 + AFTER + at
    widest = max(skew for _, skew in sent) - min(skew for _, skew in sent)
    ready_count = sum(time + AFTER + widest <= now for time in times)
    done = data.draw(st.integers(0, ready_count)) if equal else 0
    start = stored.entries[done - 1][0].next_entry if done else EARLIEST
    found, again = check(stored, start, now)
    if equal:
        assert found == ready_count
    if equal and found < len(times):
        # The next check is in the future, and at the latest when the next entry is ready.
        assert now < again <= max(now + 1, times[found] + AFTER)
    for number, time in enumerate(times):
        if time + AFTER + widest <= now:
            assert number < found
        elif number >= found:
            assert again <= max(now, time + AFTER + max(widest, SLACK))


def simulate(
    stamped: list[tuple[int, int]],
    rolls: frozenset[int],
    after_ms: int,
    pace_ms: int = LEAD // 4,
    first_check_ms: int = T0,
) -> dict[int, int]:
    """Let entries arrive and a mover check until it has read all; return the time of each read.

    An entry has its true arrival time and its publish time; those in ``rolls`` begin a ledger.
    """
    stored, start, read = Stored({10: []}), EARLIEST, {}
    arrived, again, now = 0, 0, first_check_ms
    last_stamp = max(max(stamp, true) for true, stamp in stamped)
    while len(read) < len(stamped):
        while arrived < len(stamped) and stamped[arrived][0] <= now:
            if arrived in rolls:
                stored.roll()
            stored.append(stamped[arrived][1])
            arrived += 1
        if now >= again:
            bound = stored.bound(start, now, after_ms)
            assert bound.next_check_ms >= now
            for number in range(stored.number(start), stored.number(bound.end)):
                read[number] = now
            start, again = bound.end, bound.next_check_ms
        # The next multiple of the pace at which the state can change.
        upcoming = again if arrived == len(stamped) else min(again, stamped[arrived][0])
        now = max(now + pace_ms, -(-upcoming // pace_ms) * pace_ms)
        assert now <= max(last_stamp + after_ms, first_check_ms) + DAY, "the mover has stalled"
    return read


ahead = st.sampled_from([LEAD, 2 * LEAD, DAY // 2, DAY + 1, 2 * DAY])


@examples(24)
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
@example([(0, LEAD), (0, LEAD), (1, 0)], frozenset(), LEAD, T0)  # two pauses in a row
def test_publish_times_in_the_future_do_not_stall_the_mover(
    entries: list[tuple[int, int]], rolls: frozenset[int], after_ms: int, first_check_ms: int
) -> None:
    true, run, stamped = T0, 0, []
    for gap, wrong in entries:
        true += gap
        run = run + 1 if wrong else 0
        stamped.append((true, true + (wrong if run < 16 else 0)))
    read = simulate(stamped, rolls, after_ms, first_check_ms=first_check_ms)
    pace = LEAD // 4
    for number, (_, stamp) in enumerate(stamped):
        # An entry is late by at most half the lead and the mover's pace. After the mover's first
        # check, a catch-up may take several rounds.
        in_time = stamp + after_ms + SLACK + pace
        assert read[number] <= max(in_time, first_check_ms + 4 * pace + SLACK), number


@pytest.mark.parametrize("wrong_run", [1, 16, 17, 500, 3000])
@pytest.mark.parametrize("place", ["front", "middle", "end"])
@pytest.mark.parametrize("after_ms", [DAY - LEAD, AFTER, 20 * DAY])
def test_long_runs_of_wrong_times_hide_no_ready_entry(
    wrong_run: int, place: str, after_ms: int
) -> None:
    """Send a burst with a clock a day ahead into traffic of one entry a minute."""
    correct = 1500
    at = {"front": 0, "middle": correct // 2, "end": correct}[place]
    times = [T0 + 60_000 * number for number in range(correct)]
    burst = T0 + 60_000 * at + DAY
    times[at:at] = [burst + number for number in range(wrong_run)]
    stored = Stored.of(times, (700, 1900))
    for count in (1, at - 1, at, at + 1, at + 2, at + 30, correct - 1, correct):
        if not 0 < count <= correct:
            continue
        now = T0 + 60_000 * (count - 1) + after_ms
        start = EARLIEST
        for _ in range(4):
            stored.calls = 0
            found, _again = check(stored, start, now, after_ms)
            assert stored.calls < 400
            start = stored.entries[found - 1][0].next_entry if found else EARLIEST
        assert found == count + (wrong_run if count > at else 0) or (
            # A burst at the end is ready by its own times.
            place == "end" and found == correct + wrong_run
        )


def test_a_search_that_runs_out_of_rounds_continues_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = T0 + AFTER
    wrong = [now - DAY]
    stored = Stored.of([*wrong * 9, T0, *wrong * 14, T0, *wrong * 301])
    assert check(stored, EARLIEST, now) == (25, now + SLACK // 2)
    monkeypatch.setattr(ready, "_ROUNDS", 1)
    assert check(stored, EARLIEST, now) == (10, now)


@pytest.mark.parametrize(
    ("transaction", "end"),
    [
        (None, Position(12, 3)),
        (Position(10, 1), Position(10, 1)),
        (Position(10, 0), EARLIEST),
        # The mover acknowledges the entry before the bound, so that entry must exist.
        (Position(12, 0), Position(10, 3)),
        (Position(12, 2), Position(12, 2)),
        (Position(14, 0), Position(12, 3)),
    ],
)
def test_nothing_behind_an_open_transaction_is_ready(
    transaction: Position | None, end: Position
) -> None:
    """Readers do not get it, and the mover would acknowledge it unread."""
    stored = Stored.of([T0] * 6, (3,))
    stored.readable_until = transaction
    now_ms = T0 + AFTER + 1
    bound = stored.bound(EARLIEST, now_ms)
    assert bound.end == end
    assert bound.next_check_ms == now_ms


# -- the search without the admin interface, which reads the messages

DAY_AND_HOUR = timedelta(days=1, hours=1)


def producer_in(memory: MemoryPulsar, **options: Any) -> Any:
    """Return a producer whose level topic has a level of days."""
    days = PartitionStrategy(partition_by=PartitionBy.DAY, maximum_delay=timedelta(days=4))
    return memory.client().create_producer(
        "orders", enable_delay_level_topic=True, partition_strategy=days, **options
    )


@pytest.mark.parametrize("batched", [False, True])
def test_reading_finds_the_same_messages_as_the_admin_interface(batched: bool) -> None:
    choose = random.Random(7)
    with MemoryPulsar() as memory:
        producer = producer_in(memory, batching_enabled=batched)
        for number in range(100):
            for _ in range(choose.randint(1, 3)):
                producer.send_async(b"%d" % number, None, deliver_after=DAY_AND_HOUR)
            producer.flush()
            memory.clock.advance(choose.choice([0, 1, 60]) * timedelta(minutes=1))
        source = source_partitions(producer.description)[0]
        client, lead_ms = memory.client(), producer.description.levels.smallest_lead_ms
        end_ms = memory.clock.now_ms()
        times = partial(entry_times, client, source.topic)

        def find(start: Position, hours: int) -> Position:
            now_ms = end_ms + hours * HOUR
            bound = ready_bound(memory.admin, times, source, start, now_ms, lead_ms)
            found = read_ready_range(client, source, start, now_ms, lead_ms)
            assert found.end == bound.end
            assert now_ms <= found.next_check_ms <= now_ms + lead_ms // 2
            return bound.end

        ends = [find(EARLIEST, hours) for hours in range(30)]
        assert ends == sorted(ends)
        assert len(set(ends)) > 10
        for hours in range(10, 30):
            assert find(ends[10], hours) == ends[hours]


def test_a_search_reads_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "_MOST_READ", 7)
    with MemoryPulsar() as memory:
        producer = producer_in(memory, batching_enabled=False)
        for number in range(10):
            producer.send(b"%d" % number, deliver_after=DAY_AND_HOUR)
        memory.clock.advance(timedelta(days=1))
        source, now_ms = source_partitions(producer.description)[0], memory.clock.now_ms()
        found = read_ready_range(memory.client(), source, EARLIEST, now_ms, 1000)
        assert found.end.entry == 7
        assert found.next_check_ms == now_ms
        rest = read_ready_range(memory.client(), source, found.end, now_ms, 1000)
        assert rest.end == Position(found.end.ledger, 10)
        # The earliest due time of the first message.
        assert rest.due_ms == now_ms - 600_000 + source.lead_ms


@pytest.mark.parametrize(
    ("failure", "connected"),
    [
        (BrokerUnreachableError("no address answers"), False),
        (BrokerUnreachableError("a broker is away", address="other:8080"), True),
        (NotFoundError("no such topic", status=404), True),
    ],
    ids=["not connected", "one broker", "refusal"],
)
def test_nothing_is_read_for_other_reasons(failure: Exception, connected: bool) -> None:
    admin = PartTimeAdmin(None)
    admin.failure = failure
    searching = ReadySearch(None, admin, lambda: connected, "mover")  # type: ignore[arg-type]
    with pytest.raises(type(failure)):
        searching.ready_range(partition(), EARLIEST, 0, 1000, 0)


# -- the order of ready partitions


def test_a_check_that_is_due_at_once_says_nothing_of_the_first_message() -> None:
    """It may have been ready for long, and is the more urgent then."""
    checks = NextChecks(ManualClock(T0))
    assert checks.start_pass() == T0
    checks["behind"], checks["at rest"] = T0, T0 + 1
    assert [checks[topic] for topic in ("behind", "at rest", "new")] == [0, T0 + 1, 0]


@pytest.mark.parametrize("step_s", [60, -60, 2, -2, 0.25])
def test_the_checks_are_forgotten_when_the_wall_clock_steps(step_s: float) -> None:
    clock = ManualClock(T0)
    checks = NextChecks(clock)
    for number in range(5):
        checks["at rest"] = clock.now_ms() + 10 * DAY
        clock.step(timedelta(seconds=step_s))
        clock.advance(timedelta(hours=1))
        assert checks.start_pass() == clock.now_ms()
        # Many small corrections are a step, too.
        assert checks.stepped == (checks["at rest"] == 0) == (abs(step_s) > 1 or number == 4)


def waiting(number: int, due_ms: int, lead_ms: int = 1000) -> ReadyRange:
    topic = f"partition-{number}"
    source = replace(partition(9000), topic=topic, partition=number, lead_ms=lead_ms)
    return ReadyRange(source, Position(1, 5), T0, due_ms)


def order(queue: ReadyQueue, *due_ms: int) -> list[int]:
    """Return the order of the partitions 0, 1, … whose messages are due at these times."""
    for number, each in enumerate(due_ms):
        item = waiting(number, each)
        queue[item.source.topic] = item
    return [queue.take().source.partition for _ in due_ms]


def test_a_partition_that_failed_is_served_after_the_others_but_not_for_ever() -> None:
    """It may be innocent, and the others may have a backlog without an end."""
    queue = ReadyQueue()
    assert order(queue, 5, 3, 9, 3) == [1, 3, 0, 2]
    item = waiting(0, 0)
    queue[item.source.topic] = item
    queue.fail(waiting(0, 0).source.topic, 10.0)
    assert not queue, "its ranges were found before"
    for now_s, expected in ((60.0, [1, 0]), (71.0, [0, 1])):
        queue.forgive(now_s)
        assert order(queue, 0, 5) == expected


def test_a_publish_time_in_the_future_makes_no_partition_wait() -> None:
    item = waiting(0, T0)
    assert first_due_ms(item.source, T0 + 86_400_000, T0) == T0 + 1000
