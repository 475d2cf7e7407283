"""Tests of the local mover on the in-memory Pulsar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel import topics
from delaylevel.cluster.reader import read_range
from delaylevel.errors import AlreadyRunningError, BrokerError
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.position import SourcePartition, source_partitions
from delaylevel.model.strategy import Levels, PartitionBy, PartitionStrategy
from delaylevel.mover import local
from delaylevel.mover.local import LocalMover
from delaylevel.testing import ManualClock, MemoryPulsar
from delaylevel.topics import lifecycle

DAY, HOUR, SECOND = timedelta(days=1), timedelta(hours=1), timedelta(seconds=1)
WEEK = PartitionStrategy(partition_by=PartitionBy.DAY, maximum_delay=7 * DAY)


def source_of(description: LevelTopicDescription, topic: str) -> SourcePartition:
    return next(item for item in source_partitions(description) if item.topic == topic)


def reading_all_but(broken: str) -> Callable[..., Iterator[Any]]:
    """Return a replacement of ``read_range`` that fails for a topic."""

    def read(client: Any, topic: str, *ends: Any) -> Iterator[Any]:
        if topic == broken:
            yield from ()
            raise BrokerError("the partition delivers nothing")
        yield from read_range(client, topic, *ends)

    return read


def test_a_mover_locks_new_partitions() -> None:
    with MemoryPulsar() as memory:
        producer = memory.client().create_producer(
            "orders", enable_delay_level_topic=True, partition_strategy=WEEK
        )
        with LocalMover(memory.client(), memory.admin, producer.description, memory.clock) as mover:
            longer = lifecycle.longer_levels(Levels(WEEK), 10 * DAY)
            after = lifecycle.expand(memory.admin, "orders", longer)
            memory.clock.advance(timedelta(seconds=31))
            mover.run_once()
            with pytest.raises(AlreadyRunningError):
                LocalMover(memory.client(), memory.admin, after, memory.clock)
            added = after.name.partition(8)
            subscription = memory.admin.partition_stats(added).subscriptions["delaylevel"]
            assert [consumer.name[:16] for consumer in subscription.consumers] == [
                "delaylevel-local"
            ]


def test_a_target_that_was_added_just_now_gets_its_messages() -> None:
    """A mover that decides by the description of its start takes them for dead letters."""
    with MemoryPulsar() as memory:
        client = memory.client()
        brief = PartitionStrategy(partition_by=SECOND / 4, maximum_delay=SECOND)
        options = {"enable_delay_level_topic": True, "final_window": "broker"}
        first = client.create_producer("orders", partition_strategy=brief, **options)
        with LocalMover(client, memory.admin, first.description, memory.clock) as mover:
            mover.run_once()
            added = "persistent://public/default/invoices"
            client.subscribe(added, "app", pulsar.ConsumerType.Shared)
            targets = (*first.description.targets, added)
            topics.create(memory.admin, replace(first.description, targets=targets))
            level_topic = {"delay_level_topic": first.description.topic}
            new = client.create_producer(added, enable_delay_level_topic=True, **level_topic)
            new.send(b"pay me", deliver_after=SECOND / 2)
            memory.clock.advance(SECOND)  # it reads the description less often
            report = mover.run_once()
            assert (report.due, report.dead) == (1, {})
            assert [each.data for each in memory.delivered(added)] == [b"pay me"]


def test_a_long_pass_routes_by_the_time_at_which_it_hands_off() -> None:
    """A pass over a large backlog can take longer than the lead of the next level."""
    hours = PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=DAY)
    with MemoryPulsar() as memory:
        producer = memory.client().create_producer(
            "orders", enable_delay_level_topic=True, partition_strategy=[WEEK, hours]
        )
        description = producer.description
        producer.send(b"pay me", deliver_after=DAY + timedelta(hours=2, minutes=55))
        memory.clock.advance(DAY - timedelta(minutes=10))
        slow = iter([timedelta(minutes=45)])

        def stopping() -> bool:
            # The mover asks this after it has found the ready messages.
            memory.clock.advance(next(slow, timedelta()))
            return False

        with LocalMover(memory.client(), memory.admin, description, memory.clock) as mover:
            assert mover.run_once(stopping).total == 1
        # It is due in 2:20. In the partition for three hours, it would be 35 minutes late.
        stored = [
            memory.admin.partition_stats(description.level_topic(1).partition(index))
            .subscriptions["delaylevel"]
            .backlog_entries
            for index in range(4)
        ]
        assert stored == [0, 1, 0, 0]


STEPS = [timedelta(seconds=60), timedelta(days=20), timedelta(seconds=-60), timedelta(days=-20)]


@pytest.mark.parametrize("step", STEPS, ids=str)
@pytest.mark.parametrize("sent", ["before", "while", "after"])
def test_a_clock_that_was_wrong_for_a_moment_makes_no_message_late(
    step: timedelta, sent: str
) -> None:
    """The mover's clock is wrong during one pass; the clock of the producer is always correct."""
    with MemoryPulsar() as memory:
        clock = ManualClock(memory.clock.now_ms())
        producer = memory.client().create_producer(
            "orders", enable_delay_level_topic=True, partition_strategy=WEEK, final_window="broker"
        )
        description = producer.description
        ready = timedelta(milliseconds=description.levels[0].hand_off_after_ms(0))

        def let_pass(delta: timedelta) -> None:
            memory.clock.advance(delta)
            clock.advance(delta)

        def send(moment: str) -> None:
            if moment == sent:
                producer.send(b"pay me", deliver_after=DAY + timedelta(seconds=5))

        with LocalMover(memory.client(), memory.admin, description, clock) as mover:
            send("before")
            clock.step(step)
            assert not mover.run_once().total, "the step may end soon"
            let_pass(timedelta(seconds=11))
            early = sent == "before" and step > ready
            assert mover.run_once().total == early, "ready by the wrong clock"
            send("while")
            mover.run_once()
            clock.step(-step)
            mover.run_once()
            send("after")
            if early:
                return
            let_pass(ready - timedelta(seconds=1))
            moved = mover.run_once().total
            let_pass(timedelta(seconds=2))
            moved += mover.run_once().total
            assert moved == 1, "late"


@pytest.fixture
def stuck() -> Iterator[tuple[MemoryPulsar, LevelTopicDescription]]:
    """A ready message in partition 1, and one in partition 2, which is to break."""
    with MemoryPulsar() as memory:
        producer = memory.client().create_producer(
            "orders", enable_delay_level_topic=True, partition_strategy=WEEK
        )
        producer.send(b"stuck", deliver_after=3 * DAY + HOUR)
        # It is due before the other one, so it would always be the first.
        memory.clock.advance(DAY + timedelta(minutes=1))
        producer.send(b"first", deliver_after=2 * DAY + HOUR)
        memory.clock.advance(2 * DAY)
        yield memory, producer.description


def test_a_partition_that_cannot_be_read_does_not_keep_the_others_unacknowledged(
    stuck: tuple[MemoryPulsar, LevelTopicDescription], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, description = stuck
    first, broken = (description.name.partition(number).full for number in (1, 2))
    with LocalMover(memory.client(), memory.admin, description, memory.clock) as mover:
        with monkeypatch.context() as patch:
            patch.setattr(local, "read_range", reading_all_but(broken))
            for _ in range(3):
                with pytest.raises(BrokerError, match="delivers nothing"):
                    mover.run_once()
        assert mover.next_check_ms(source_of(description, first)) > memory.clock.now_ms()
        assert mover.run_once().window == 1


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[MemoryPulsar, LevelTopicDescription]]:
    """A level topic with 50 ready messages, and movers that confirm every 10 of them."""
    monkeypatch.setattr(local, "_FLUSH_EVERY", 10)
    monkeypatch.setattr(local, "_LOOK_EVERY", 1)
    with MemoryPulsar() as memory:
        producer = memory.client().create_producer(
            "orders",
            enable_delay_level_topic=True,
            partition_strategy=WEEK,
            batching_enabled=False,
        )
        for number in range(50):
            producer.send(b"%d" % number, deliver_after=DAY + HOUR)
        memory.clock.advance(DAY)
        yield memory, producer.description


def acknowledged(memory: MemoryPulsar, description: LevelTopicDescription) -> int:
    """Return the number of messages of the first partition that are acknowledged."""
    name = description.name.partition(0)
    return int(memory.admin.mark_delete_position(name, "delaylevel").next_entry.entry)


def test_a_long_range_is_acknowledged_in_portions(
    many: tuple[MemoryPulsar, LevelTopicDescription], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mover that is killed repeats only the last portion."""
    memory, description = many

    def read(client: Any, topic: str, *ends: Any) -> Iterator[Any]:
        for count, message in enumerate(read_range(client, topic, *ends)):
            if count == 35:
                raise BrokerError("the partition delivers nothing")
            yield message

    with LocalMover(memory.client(), memory.admin, description, memory.clock) as mover:
        with monkeypatch.context() as patch:
            patch.setattr(local, "read_range", read)
            with pytest.raises(BrokerError, match="delivers nothing"):
                mover.run_once()
        assert acknowledged(memory, description) == 30
        assert mover.run_once().window == 20
        assert acknowledged(memory, description) == 50


def test_a_pass_that_is_stopped_acknowledges_what_it_has_handed_off(
    many: tuple[MemoryPulsar, LevelTopicDescription],
) -> None:
    memory, description = many
    looks = iter(range(100))
    with LocalMover(memory.client(), memory.admin, description, memory.clock) as mover:
        first = mover.run_once(lambda: next(looks) > 12).window
        assert 0 < first < 50
        assert acknowledged(memory, description) == first
        assert mover.run_once(lambda: True).window == 0
        assert mover.run_once().window == 50 - first
        assert acknowledged(memory, description) == 50


@pytest.fixture
def backlog(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[MemoryPulsar, LevelTopicDescription]]:
    """Ready messages of an hour in a coarse and in a fine level, and movers that confirm each.

    The coarse ones are due five minutes before the fine ones, at the earliest.
    """
    monkeypatch.setattr(local, "_FLUSH_EVERY", 1)
    hours = PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=DAY)
    with MemoryPulsar() as memory:
        producer = memory.client().create_producer(
            "orders", enable_delay_level_topic=True, partition_strategy=[WEEK, hours]
        )
        for payload, delay in ((b"coarse", DAY + HOUR / 2), (b"fine", HOUR + HOUR / 2)):
            for _ in range(4):
                producer.send(payload, deliver_after=delay)
                memory.clock.advance(HOUR / 4)
            memory.clock.advance(DAY - 2 * HOUR + timedelta(minutes=5))
        yield memory, producer.description


def test_a_backlog_is_handed_off_in_the_order_of_the_due_times(
    backlog: tuple[MemoryPulsar, LevelTopicDescription], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, description = backlog
    order: list[bytes | None] = []

    def read(client: Any, topic: str, *ends: Any) -> Iterator[Any]:
        for message in read_range(client, topic, *ends):
            order.append(message.value)
            yield message

    monkeypatch.setattr(local, "read_range", read)
    with LocalMover(memory.client(), memory.admin, description, memory.clock) as mover:
        assert mover.run_once().total == 8
        assert not mover.behind
    # The rest of a partition counts with the due time of the message before it.
    assert order == [b"coarse", b"coarse", b"fine", *2 * [b"fine", b"coarse"], b"fine"]


def test_a_long_pass_ends_and_the_next_one_continues(
    backlog: tuple[MemoryPulsar, LevelTopicDescription],
) -> None:
    class Ticking(ManualClock):
        """A clock on which each look takes a second."""

        def monotonic_s(self) -> float:
            self.advance(timedelta(seconds=1))
            return super().monotonic_s()

    memory, description = backlog
    clock = Ticking(memory.clock.now_ms())
    with LocalMover(memory.client(), memory.admin, description, clock) as mover:
        passes = [mover.run_once(longest_s=5).total]
        while mover.behind:
            passes.append(mover.run_once(longest_s=5).total)
    assert sum(passes) == 8
    assert 0 < passes[0] < 8


def test_ready_messages_are_found_again_after_a_step_of_the_clock() -> None:
    """A range that was found by a clock that is ahead would end with a check weeks later."""
    with MemoryPulsar() as memory:
        producer = memory.client().create_producer(
            "orders", enable_delay_level_topic=True, partition_strategy=WEEK
        )
        ready = timedelta(milliseconds=producer.description.levels[0].hand_off_after_ms(0))
        clock = ManualClock(memory.clock.now_ms())

        def let_pass(time: timedelta) -> None:
            memory.clock.advance(time)
            clock.advance(time)

        with LocalMover(memory.client(), memory.admin, producer.description, clock) as mover:
            mover.run_once()
            producer.send(b"early", deliver_after=DAY + timedelta(seconds=5))
            let_pass(timedelta(seconds=5))
            clock.step(20 * DAY)
            mover.run_once()
            assert not mover.behind, "the step may end soon"
            let_pass(timedelta(seconds=11))
            mover.run_once(longest_s=0)
            assert mover.behind
            clock.step(-20 * DAY)
            mover.run_once()
            producer.send(b"pay me", deliver_after=DAY + timedelta(seconds=5))
            let_pass(ready + timedelta(seconds=2))
            assert mover.run_once().total == 2


def test_a_common_failure_does_not_put_the_wrong_partition_behind_the_guilty_one(
    stuck: tuple[MemoryPulsar, LevelTopicDescription], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise BrokerError("not confirmed")

    memory, description = stuck
    healthy, broken = (description.name.partition(index) for index in (1, 2))
    with LocalMover(memory.client(), memory.admin, description, memory.clock) as mover:
        with monkeypatch.context() as failing:
            failing.setattr(mover._forwarder, "flush", refuse)
            with pytest.raises(BrokerError, match="not confirmed"):
                mover.run_once()
        monkeypatch.setattr(local, "read_range", reading_all_but(broken.full))
        for _ in range(3):
            with pytest.raises(BrokerError, match="delivers nothing"):
                mover.run_once()
        backlog = memory.admin.partition_stats(healthy).subscriptions["delaylevel"]
        assert not backlog.backlog_entries
        assert mover.postponed.keys() == {broken.full}
        monkeypatch.setattr(local, "read_range", read_range)
        assert mover.run_once().total == 1
        assert not mover.postponed


def test_a_partition_that_cannot_be_searched_stops_no_other(
    stuck: tuple[MemoryPulsar, LevelTopicDescription], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, description = stuck
    broken = description.name.partition(2)
    with LocalMover(memory.client(), memory.admin, description, memory.clock) as mover:
        find = mover._ready_search.ready_range

        def ready_range(source: SourcePartition, *given: Any) -> Any:
            if source.name == broken:
                raise BrokerError("no broker serves it")
            return find(source, *given)

        with monkeypatch.context() as failing:
            failing.setattr(mover._ready_search, "ready_range", ready_range)
            with pytest.raises(BrokerError, match="no broker serves it"):
                mover.run_once()
        assert mover.made_progress
        assert not mover.postponed
        assert mover.run_once().total == 1
