"""Tests of the order in which movers serve ready partitions."""

from __future__ import annotations

import random
from typing import cast

import pytest

from delaylevel.cluster.port import TopicAdmin
from delaylevel.model.level_topic import Role
from delaylevel.model.position import Position, SourcePartition
from delaylevel.mover.ready import ReadyBound, ReadyQueue, ReadyRange, first_due_ms, ready_range

NOW = 1_800_000_000_000
FAMILY = "persistent://public/default/_orders-delay-level"
END = Position(1, 5)


def source(number: int, lead_ms: int = 1000, after_ms: int = 9000) -> SourcePartition:
    topic = f"{FAMILY}-partition-{number}"
    return SourcePartition(FAMILY, topic, Role.LEVEL, 0, number, after_ms, lead_ms=lead_ms)


def ready(number: int, due_ms: int) -> ReadyRange:
    return ReadyRange(source(number), ReadyBound(END, NOW), due_ms)


def test_the_earliest_due_is_first_and_equal_ones_keep_their_order() -> None:
    queue = ReadyQueue()
    for number, due_ms in enumerate([5, 3, 9, 3]):
        queue.add(ready(number, NOW + due_ms))
    assert f"{FAMILY}-partition-2" in queue
    assert [queue.take().source.partition for _ in range(4)] == [1, 3, 0, 2]
    assert not queue


def test_a_partition_that_failed_is_served_after_the_others_until_it_succeeds() -> None:
    queue = ReadyQueue()
    queue.add(ready(0, NOW))
    queue.fail(source(0).topic, 1.0)
    assert not queue
    queue.add(ready(0, NOW))
    queue.add(ready(1, NOW + 1_000_000))
    assert not queue.is_first(ready(0, NOW - 5))
    assert [queue.take().source.partition for _ in range(2)] == [1, 0]
    queue.succeed(source(0).topic)
    queue.add(ready(1, NOW + 1_000_000))
    assert queue.is_first(ready(0, NOW))


def test_the_partition_that_failed_last_is_last() -> None:
    """The first failure is perhaps that of another partition, in a common confirmation."""
    queue = ReadyQueue()
    queue.fail(source(0).topic, 1.0)
    queue.fail(source(1).topic, 1.0)
    queue.add(ready(1, NOW))
    queue.add(ready(0, NOW + 5))
    queue.add(ready(2, NOW + 9))
    assert [queue.take().source.partition for _ in range(3)] == [2, 0, 1]
    queue.fail(source(0).topic, 1.0)
    queue.add(ready(0, NOW))
    queue.add(ready(1, NOW + 5))
    assert [queue.take().source.partition for _ in range(2)] == [1, 0]


def test_a_partition_is_not_postponed_for_ever() -> None:
    """It may be innocent, and the others may have a backlog without an end."""
    queue = ReadyQueue()
    queue.fail(source(0).topic, 10.0)
    for now_s, first in ((60.0, 1), (71.0, 0)):
        queue.forgive(now_s)
        queue.add(ready(0, NOW))
        queue.add(ready(1, NOW + 5))
        assert [queue.take().source.partition for _ in range(2)] == [first, 1 - first]


@pytest.mark.parametrize("seed", range(20))
def test_no_partition_starves_and_none_is_served_before_a_more_urgent_one(seed: int) -> None:
    """Portions of a random length, from partitions with one message per second each."""
    chosen = random.Random(seed)
    sources = [source(number, chosen.randint(1, 600_000)) for number in range(6)]
    lag_ms = [chosen.randint(0, 3_600_000) for _ in sources]
    fronts = [NOW - lag for lag in lag_ms]
    queue = ReadyQueue()
    for item, front in zip(sources, fronts, strict=True):
        queue.add(ReadyRange(item, ReadyBound(END, NOW), first_due_ms(item, front, NOW)))
    portion_ms = 30_000
    while queue:
        item = queue.take()
        number = item.source.partition
        urgency = [front + each.lead_ms for each, front in zip(sources, fronts, strict=True)]
        waiting = [urgency[each.partition] for each in sources if each.topic in queue]
        assert urgency[number] <= min(waiting, default=urgency[number])
        fronts[number] += chosen.randint(1, portion_ms)
        if fronts[number] < NOW:
            queue.add(item.rest(fronts[number] - item.source.hand_off_after_ms, NOW))
        # All are as far behind their due times, but for what was not so far behind at the start.
        assert all(
            urgent <= max(urgency[number], NOW - lag + each.lead_ms) + portion_ms
            for urgent, lag, each in zip(urgency, lag_ms, sources, strict=True)
        )


def test_a_publish_time_in_the_future_makes_no_partition_wait() -> None:
    assert first_due_ms(source(0), NOW + 86_400_000, NOW) == NOW + 1000
    assert ready(0, NOW).rest(NOW + 86_400_000, NOW).due_ms == NOW + 1000


class _Stored:
    """A broker with ready messages at one publish time."""

    def __init__(self, published_ms: int | None) -> None:
        self.published_ms, self.asked = published_ms, 0

    def entry_times(self, first: Position, last: Position) -> list[tuple[Position, int]]:
        self.asked += 1
        return [] if self.published_ms is None else [(first, self.published_ms)]

    def last_message_id(self, topic: object) -> Position:
        return Position(1, 4)

    def message_id_at(self, topic: object, time_ms: int) -> Position | None:
        return None

    def open_transaction_at(self, topic: object) -> Position | None:
        return None


@pytest.mark.parametrize(
    ("published_ms", "next_check_ms", "due_ms", "asked"),
    [
        (NOW - 50_000, 0, NOW - 40_000, 1),
        (NOW - 50_000, NOW - 7, NOW + 993, 0),
        (None, 0, 1000, 1),  # trimmed meanwhile
    ],
)
def test_the_broker_is_asked_only_if_nothing_is_known_of_the_first_message(
    published_ms: int | None, next_check_ms: int, due_ms: int, asked: int
) -> None:
    broker = _Stored(published_ms)
    start = Position(1, 2)
    admin, times = cast(TopicAdmin, broker), broker.entry_times
    found = ready_range(admin, times, source(0), start, NOW, 1000, next_check_ms)
    assert found == ReadyRange(source(0), ReadyBound(END, NOW), due_ms)
    assert broker.asked == asked
