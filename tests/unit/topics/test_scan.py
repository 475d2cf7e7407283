"""Tests of the ranges that can have messages of a window of due times, against brute force."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from delaylevel.errors import NotFoundError
from delaylevel.model.level_topic import LevelTopicDescription, Role
from delaylevel.model.position import Position, source_partitions
from delaylevel.model.strategy import Levels, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.scan import ALWAYS, PendingRange, Window, pending_ranges, publish_window
from support.seeds import examples

NOW = 1_800_000_000_000
HOUR = 3_600_000
SLACK = 2 * HOUR
LEVELS = Levels(
    [
        PartitionStrategy(partition_by=timedelta(hours=6), maximum_delay=timedelta(hours=24)),
        PartitionStrategy(partition_by=timedelta(hours=2), maximum_delay=timedelta(hours=6)),
    ]
)
DESCRIPTION = LevelTopicDescription("orders-delay-level", LEVELS, ("orders",))
SOURCES = {(s.role, s.level, s.partition): s for s in source_partitions(DESCRIPTION)}

thorough = examples(100)


@dataclass(frozen=True)
class Message:
    published_ms: int
    due_ms: int


@dataclass
class Stored:
    """Partitions with one ledger and an entry per message, searched as by a broker."""

    partitions: dict[str, list[Message]]
    acknowledged: dict[str, int] = field(default_factory=dict)
    searches: int = 0
    requested: list[str] = field(default_factory=list)

    def mark_delete_position(self, partition: TopicName, subscription: str) -> Position:
        assert subscription == "delaylevel"
        self.requested.append(partition.full)
        return Position(7, self.acknowledged.get(partition.full, 0) - 1)

    def last_message_id(self, partition: TopicName) -> Position | None:
        stored = self.partitions.get(partition.full, [])
        return Position(7, len(stored) - 1, 3) if stored else None

    def message_id_at(self, partition: TopicName, publish_ms: int) -> Position | None:
        self.searches += 1
        times = [item.published_ms for item in self.partitions[partition.full]]
        if times[0] >= publish_ms:
            return Position(7, 0)
        if times[-1] < publish_ms:
            return None
        low, high = 0, len(times) - 1
        while high - low > 1:
            middle = (low + high) // 2
            if times[middle] < publish_ms:
                low = middle
            else:
                high = middle
        return Position(7, high)

    def read(self, ranges: list[PendingRange]) -> list[Message]:
        return [
            message
            for item in ranges
            for entry, message in enumerate(self.partitions[item.source.topic])
            if item.start <= Position(7, entry) < item.end
        ]


def search(stored: Stored, due: Window = ALWAYS, **options: Any) -> list[PendingRange]:
    admin: Any = stored
    options.setdefault("slack_ms", SLACK)
    return pending_ranges(admin, DESCRIPTION, NOW, due=due, **options)


bounds = st.none() | st.integers(NOW - 30 * HOUR, NOW + 40 * HOUR)


def example(seed: int) -> tuple[int, list[Message], Window]:
    """Return a 6-hour partition, messages with skews within the slack, and a window."""
    choose = random.Random(seed)

    def extreme(least: int, most: int) -> int:
        return choose.choice((least, most, choose.randint(least, most)))

    partition = choose.randint(0, 2)
    unit = 6 * HOUR
    skew = extreme(0, SLACK)
    messages = []
    for arrived in sorted(NOW - choose.randint(0, 8 * HOUR) for _ in range(choose.randint(0, 40))):
        published = arrived - extreme(0, skew)
        latest = (partition + 2) * unit
        if partition == 2 and choose.random() < 0.5:
            latest += choose.randint(0, 1000 * HOUR)  # clamped into the last partition
        due = published + extreme((partition + 1) * unit - (SLACK - skew), latest)
        messages.append(Message(published, due))
    edges = [None, choose.randint(NOW - 30 * HOUR, NOW + 40 * HOUR)]
    edges += [item.due_ms + more for item in messages[:20] for more in (0, 1)]
    return partition, messages, Window(choose.choice(edges), choose.choice(edges))


@given(st.integers(0, 1 << 32), st.integers(0, 10))
@thorough
def test_ranges_contain_all_messages_due_in_the_window(seed: int, acknowledged: int) -> None:
    number, messages, due = example(seed)
    topic = SOURCES[Role.LEVEL, 0, number].topic
    acknowledged = min(acknowledged, len(messages))
    stored = Stored({topic: messages} if messages else {}, {topic: acknowledged})
    read = stored.read(search(stored, due))
    wanted = [item for item in messages[acknowledged:] if item.due_ms in due]
    assert [item for item in read if item.due_ms in due] == wanted
    # Acknowledged messages are not read.
    assert len(read) <= len(messages) - acknowledged


@given(st.integers(0, 2), bounds, bounds)
@thorough
def test_with_equal_clocks_at_most_the_slack_is_read_in_addition(
    number: int, from_ms: int | None, before_ms: int | None
) -> None:
    topic = SOURCES[Role.LEVEL, 0, number].topic
    least = (number + 1) * 6 * HOUR
    messages = [Message(NOW - 20 * HOUR + n * 600_000, 0) for n in range(120)]
    stored = Stored({topic: messages})
    for message in stored.read(search(stored, Window(from_ms, before_ms))):
        if from_ms is not None and number < 2:
            assert message.published_ms + least + 6 * HOUR + SLACK >= from_ms
        if before_ms is not None and before_ms - least + SLACK <= NOW:
            assert message.published_ms + least - SLACK < before_ms


def test_the_last_partition_before_an_expansion_is_not_bounded_either() -> None:
    longer = Levels(
        [
            LEVELS.strategies[0].model_copy(update={"maximum_delay": timedelta(days=4)}),
            *LEVELS.strategies[1:],
        ]
    )
    expanded = replace(DESCRIPTION, levels=longer, former=(LEVELS,))
    far = Window(NOW + 1000 * HOUR, None)
    unbounded = [
        (source.level, source.partition)
        for source in source_partitions(expanded)
        if source.role is Role.LEVEL and publish_window(longer, source, far, SLACK) == ALWAYS
    ]
    assert unbounded == [(0, 2), (0, longer[0].partitions - 1), (1, LEVELS[1].partitions - 1)]


def test_a_partition_without_the_subscription_is_read_from_its_first_message() -> None:
    topic = SOURCES[Role.LEVEL, 0, 0].topic

    class Unsubscribed(Stored):
        def mark_delete_position(self, partition: TopicName, subscription: str) -> Position:
            raise NotFoundError("no subscription", status=404)

    stored = Unsubscribed({topic: [Message(NOW, NOW)]})
    assert stored.read(search(stored)) == [Message(NOW, NOW)]


def test_starts_are_read_before_ends() -> None:
    """Find a message that is moved during the read in one of the two partitions, or in both."""
    coarse, fine = SOURCES[Role.LEVEL, 0, 0].topic, SOURCES[Role.LEVEL, 1, 0].topic
    message = Message(NOW - HOUR, NOW + 5 * HOUR)

    class Moving(Stored):
        def last_message_id(self, partition: TopicName) -> Position | None:
            if not self.partitions[fine]:
                self.partitions[fine].append(message)  # forwarded ...
                self.acknowledged[coarse] = 1  # ... and acknowledged
            return super().last_message_id(partition)

    stored = Moving({coarse: [message], fine: []})
    assert message in stored.read(search(stored))
