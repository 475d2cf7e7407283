"""Tests of the order in which movers serve ready partitions."""

from __future__ import annotations

import random
from typing import Any

import pytest

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
    return ReadyRange(source(number), ReadyBound(END, NOW), NOW + due_ms)


def order(queue: ReadyQueue, *due_ms: int) -> list[int]:
    """Return the order of the partitions 0, 1, … whose messages are due after these times."""
    for number, each in enumerate(due_ms):
        queue.add(ready(number, each))
    found = [queue.take().source.partition for _ in due_ms]
    assert not queue
    return found


def test_the_earliest_due_is_first_and_equal_ones_keep_their_order() -> None:
    assert order(ReadyQueue(), 5, 3, 9, 3) == [1, 3, 0, 2]


def test_partitions_that_failed_are_served_after_the_others_until_they_succeed() -> None:
    """The first failure is perhaps that of another one, so what failed last is last."""
    queue = ReadyQueue()
    queue.add(ready(0, 0))
    queue.fail(source(0).topic, 1.0)
    assert not queue, "its ranges were found before"
    queue.fail(source(1).topic, 1.0)
    queue.add(ready(2, 9))
    assert not queue.is_first(ready(0, -5))
    queue.clear()
    assert order(queue, 5, 0, 9) == [2, 0, 1]
    queue.fail(source(0).topic, 1.0)
    assert order(queue, 0, 5, 9) == [2, 1, 0]
    queue.succeed(source(0).topic)
    assert order(queue, 0, 0, 9) == [0, 2, 1]


def test_a_partition_is_not_postponed_for_ever() -> None:
    """It may be innocent, and the others may have a backlog without an end."""
    queue = ReadyQueue()
    queue.fail(source(0).topic, 10.0)
    queue.forgive(60.0)
    assert order(queue, 0, 5) == [1, 0]
    queue.forgive(71.0)
    assert order(queue, 0, 5) == [0, 1]


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
    assert ready(0, 0).rest(NOW + 86_400_000, NOW).due_ms == NOW + 1000


@pytest.mark.parametrize(
    ("published_ms", "next_check_ms", "due_ms"),
    [
        (NOW - 50_000, 0, NOW - 40_000),
        (NOW - 50_000, NOW - 7, NOW + 993),  # nothing was ready before that check
        (None, 0, 1000),  # trimmed meanwhile
    ],
)
def test_the_first_message_counts_with_its_earliest_due_time(
    published_ms: int | None, next_check_ms: int, due_ms: int
) -> None:
    class Stored:
        last_message_id = staticmethod(lambda _: Position(1, 4))
        message_id_at = staticmethod(lambda *_: None)  # everything is ready
        open_transaction_at = staticmethod(lambda _: None)

    def entry_times(first: Position, last: Position) -> list[tuple[Position, int]]:
        assert not next_check_ms, "the broker is asked although enough is known"
        return [] if published_ms is None else [(first, published_ms)]

    admin: Any = Stored()
    found = ready_range(admin, entry_times, source(0), Position(1, 2), NOW, 1000, next_check_ms)
    assert found == ReadyRange(source(0), ReadyBound(END, NOW), due_ms)
