"""Tests of the local mover on the in-memory Pulsar."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pulsar
import pytest

from delaylevel import topics
from delaylevel.cluster.port import ClientStats, PartitionStats, SubscriptionStats
from delaylevel.cluster.reader import read_range
from delaylevel.errors import (
    AlreadyRunningError,
    BatchTooLargeError,
    BrokerError,
    BrokerUnreachableError,
)
from delaylevel.model.delivery import ForwardReport
from delaylevel.model.envelope import DUE, ID, TARGET
from delaylevel.model.level_topic import LevelTopicDescription, MissingTarget
from delaylevel.model.strategy import PartitionBy, PartitionStrategy
from delaylevel.model.topic_name import TopicName
from delaylevel.mover import local
from delaylevel.mover.drain import drain
from delaylevel.mover.forwarder import Forwarder
from delaylevel.mover.local import LocalMover
from delaylevel.testing import ManualClock, MemoryPulsar
from delaylevel.topics import lifecycle
from support.fakes import PartTimeAdmin

DAY, HOUR = timedelta(days=1), timedelta(hours=1)
MINUTE, SECOND = timedelta(minutes=1), timedelta(seconds=1)
WEEK = PartitionStrategy(partition_by=PartitionBy.DAY, maximum_delay=7 * DAY)
HOURS = PartitionStrategy(partition_by=PartitionBy.HOUR, maximum_delay=DAY)


class World:
    """A level topic of ``orders`` with the producer of its messages.

    A test may step the clock of the movers; time passes by both clocks.
    """

    def __init__(self, *levels: PartitionStrategy, **options: Any) -> None:
        self.memory = MemoryPulsar()
        self.clock = ManualClock(self.memory.clock.now_ms())
        self.admin: Any = PartTimeAdmin(self.memory.admin)
        self.producer: Any = self.memory.client().create_producer(
            "orders", enable_delay_level_topic=True, partition_strategy=levels, **options
        )
        self.description: LevelTopicDescription = self.producer.description

    def send(self, body: bytes, after: timedelta) -> None:
        self.producer.send(body, deliver_after=after)

    def hold(self, body: bytes) -> None:
        topic = self.description.held_topic.partition(0).full
        due, target = str(self.clock.now_ms()), self.description.targets[0]
        self.memory.client().create_producer(topic).send(body, {DUE: due, TARGET: target, ID: due})

    def let_pass(self, time: timedelta) -> None:
        self.memory.clock.advance(time)
        self.clock.advance(time)

    def mover(self) -> LocalMover:
        return LocalMover(self.memory.client(), self.admin, self.description, self.clock)

    def backlog(self, partition: TopicName) -> int:
        stats = self.memory.admin.partition_stats(partition)
        return int(stats.subscriptions["delaylevel"].backlog_entries)


def reading(fail: Callable[[str, int], bool]) -> Callable[..., Iterator[Any]]:
    """Return a replacement of ``read_range`` that fails at some messages, by topic and number."""

    def read(client: Any, topic: str, *ends: Any) -> Iterator[Any]:
        for number, message in enumerate(read_range(client, topic, *ends)):
            if fail(topic, number):
                raise BrokerError("the partition delivers nothing")
            yield message

    return read


def test_a_mover_locks_new_partitions() -> None:
    world = World(WEEK)
    with closing(world.mover()) as mover:
        world.description = lifecycle.expand(world.memory.admin, "orders", 10 * DAY)
        world.let_pass(31 * SECOND)
        mover.run_once()
        with pytest.raises(AlreadyRunningError):
            world.mover()
        added = world.description.name.partition(8)
        (consumer,) = (
            world.memory.admin.partition_stats(added).subscriptions["delaylevel"].consumers
        )
        assert consumer.name.startswith("delaylevel-local")


def test_a_consumer_of_another_program_that_has_the_lock_can_be_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(WEEK)
    topic = world.description.name.partition(0)
    world.memory.client().subscribe(topic.full, "delaylevel", consumer_name="f3a9b")
    other = ClientStats("f3a9b", address="10.0.0.7:40112")
    stats = PartitionStats(0, {"delaylevel": SubscriptionStats(0, consumers=(other,))})
    monkeypatch.setattr(world.memory.admin, "partition_stats", lambda _: stats)
    with pytest.raises(AlreadyRunningError, match=r"f3a9b from 10\.0\.0\.7:40112") as refused:
        world.mover()
    assert refused.value.owner == "f3a9b"


@pytest.mark.parametrize("when", ["at first", "after an expansion"])
def test_a_mover_that_cannot_ask_where_to_begin_locks_nothing(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(WEEK)
    memory = world.memory.admin

    def away(*_: Any) -> Any:
        raise BrokerUnreachableError("nothing answers")

    with ExitStack() as stack:
        if when == "after an expansion":
            first = stack.enter_context(closing(world.mover()))
            world.description = lifecycle.expand(memory, "orders", 10 * DAY)
            world.let_pass(31 * SECOND)
        with monkeypatch.context() as patch:
            patch.setattr(memory, "mark_delete_position", away)
            with pytest.raises(BrokerUnreachableError):
                first.run_once() if when == "after an expansion" else world.mover()
    world.mover().close()


def handing_off() -> tuple[World, LocalMover]:
    """Return a mover that has just handed a message off, with the producer for that."""
    world = World(WEEK)
    world.send(b"soon", 2 * DAY)
    mover = world.mover()
    world.let_pass(2 * DAY - 5 * MINUTE)
    assert mover.run_once().total == 1
    return world, mover


def refuse(*_: Any) -> None:
    raise RuntimeError("can't start new thread")


def test_a_mover_whose_producers_cannot_be_closed_locks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, mover = handing_off()
    with monkeypatch.context() as patch:
        patch.setattr(Forwarder, "close", refuse)
        with pytest.raises(RuntimeError):
            mover.close()
    world.mover().close()


def test_a_mover_closes_its_producers_without_further_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, mover = handing_off()
    window = world.description.window_topic

    def producers() -> int:
        stats = world.memory.admin.partitioned_stats(window)
        return sum(len(each.publishers) for each in stats.values())

    assert producers()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        mover.close()
    assert not producers()


def test_a_target_that_was_added_just_now_gets_its_messages() -> None:
    """A mover that decides by the description of its start takes them for dead letters."""
    brief = PartitionStrategy(partition_by=SECOND / 4, maximum_delay=SECOND)
    world = World(brief, final_window="broker")
    client, added = world.memory.client(), "persistent://public/default/invoices"
    with closing(world.mover()) as mover:
        mover.run_once()
        client.subscribe(added, "app", pulsar.ConsumerType.Shared)
        targets = (*world.description.targets, added)
        topics.create(world.memory.admin, replace(world.description, targets=targets))
        options: Any = {"delay_level_topic": world.description.topic}
        new = client.create_producer(added, enable_delay_level_topic=True, **options)
        new.send(b"pay me", deliver_after=SECOND / 2)
        world.let_pass(SECOND)  # it reads the description less often
        report = mover.run_once()
    assert (report.due, report.dead) == (1, 0)
    assert [each.data for each in world.memory.delivered(added)] == [b"pay me"]


def test_settings_that_were_changed_just_now_decide_about_what_is_ready() -> None:
    world = World(WEEK, final_window="broker")
    ready = timedelta(milliseconds=world.description.levels[0].hand_off_after_ms(0))
    world.send(b"pay me", DAY + 5 * SECOND)
    world.producer.close()
    with closing(world.mover()) as mover:
        world.let_pass(ready - 10 * SECOND)
        mover.run_once()  # it is at rest for half a minute
        policy = MissingTarget.DROP
        lifecycle.change_settings(world.memory.admin, "orders", on_missing_target=policy)
        world.memory.admin.delete(TopicName.parse("orders"), force=True)
        world.let_pass(11 * SECOND)
        report = mover.run_once()
    assert (report.dropped, report.held) == (1, 0)


def test_a_mover_on_standby_begins_with_the_present_settings() -> None:
    world = World(WEEK, final_window="broker")
    world.send(b"pay me", DAY + 5 * SECOND)
    world.producer.close()
    set_policy = partial(lifecycle.change_settings, world.memory.admin, "orders")
    world.description = set_policy(on_missing_target=MissingTarget.DROP)  # as its process read it
    set_policy(on_missing_target=MissingTarget.HOLD)
    world.memory.admin.delete(TopicName.parse("orders"), force=True)
    world.let_pass(DAY)
    with closing(world.mover()) as mover:
        report = mover.run_once()
    assert (report.dropped, report.held) == (0, 1)


def test_a_long_pass_routes_by_the_time_at_which_it_hands_off() -> None:
    """A pass over a large backlog can take longer than the lead of the next level."""
    world = World(WEEK, HOURS)
    world.send(b"pay me", DAY + timedelta(hours=2, minutes=55))
    world.let_pass(DAY - 10 * MINUTE)
    slow = iter([45 * MINUTE])

    def stopping() -> bool:
        # The mover asks this after it has found the ready messages.
        world.let_pass(next(slow, timedelta()))
        return False

    with closing(world.mover()) as mover:
        assert mover.run_once(stopping).total == 1
    # It is due in 2:20. In the partition for three hours, it would be 35 minutes late.
    hours = world.description.level_topic(1)
    assert [world.backlog(hours.partition(index)) for index in range(4)] == [0, 1, 0, 0]


@pytest.mark.parametrize("step", [60 * SECOND, 20 * DAY, -60 * SECOND, -20 * DAY], ids=str)
@pytest.mark.parametrize("sent", ["before", "while"])
@pytest.mark.parametrize("longest_s", [0, 60])
def test_a_clock_that_was_wrong_for_a_moment_makes_no_message_late(
    step: timedelta, sent: str, longest_s: float
) -> None:
    """The mover's clock is wrong during one pass; the clock of the producer is always correct.

    A range that was only found by a clock that is ahead would end with a check weeks later.
    """
    world = World(WEEK, final_window="broker")
    ready = timedelta(milliseconds=world.description.levels[0].hand_off_after_ms(0))
    soon = DAY + 5 * SECOND
    with closing(world.mover()) as mover:
        if sent == "before":
            world.send(b"pay me", soon)
        world.clock.step(step)
        assert not mover.run_once().total, "the step may end soon"
        world.let_pass(11 * SECOND)
        total = mover.run_once(longest_s=longest_s).total
        early = sent == "before" and step > ready
        assert (total, mover.behind) == (early and longest_s > 0, early and not longest_s)
        if sent == "while":
            world.send(b"pay me", soon)
        total += mover.run_once(longest_s=longest_s).total
        world.clock.step(-step)
        mover.run_once(longest_s=0)
        world.send(b"pay me, too", soon)
        world.let_pass(ready - SECOND)
        total += mover.run_once().total
        world.let_pass(2 * SECOND)
        total += mover.run_once().total
    assert total == 2, "late"


def test_a_mover_hands_off_through_all_levels_without_the_admin_interface() -> None:
    world = World(WEEK, HOURS)
    for number in range(10):
        world.send(b"%d" % number, DAY + number * 3 * HOUR)
    with closing(world.mover()) as mover:
        mover.run_once()
        world.admin.failure = BrokerUnreachableError("the admin interface does not answer")
        window = 0
        for _ in range(3 * 24 * 4):
            world.let_pass(15 * MINUTE)
            window += mover.run_once().window
    assert window == 10


# -- one partition fails


@pytest.fixture
def stuck() -> World:
    """A ready message in partition 1, and one in partition 2, which is to break."""
    world = World(WEEK)
    world.send(b"stuck", 3 * DAY + HOUR)
    # It is due before the other one, so it would always be the first.
    world.let_pass(DAY + MINUTE)
    world.send(b"first", 2 * DAY + HOUR)
    world.let_pass(2 * DAY)
    return world


@pytest.mark.parametrize("common", [False, True], ids=["", "after a common failure"])
def test_a_partition_that_cannot_be_read_does_not_keep_the_others_unacknowledged(
    stuck: World, monkeypatch: pytest.MonkeyPatch, common: bool
) -> None:
    def refuse() -> None:
        raise BrokerError("not confirmed")

    healthy, broken = (stuck.description.name.partition(index) for index in (1, 2))
    with closing(stuck.mover()) as mover:
        if common:  # it must not put the wrong partition behind the guilty one
            with monkeypatch.context() as failing:
                failing.setattr(mover._forwarder, "flush", refuse)
                with pytest.raises(BrokerError, match="not confirmed"):
                    mover.run_once()
        with monkeypatch.context() as failing:
            failing.setattr(local, "read_range", reading(lambda topic, _: topic == broken.full))
            for _ in range(3):
                with pytest.raises(BrokerError, match="delivers nothing"):
                    mover.run_once()
        assert (stuck.backlog(healthy), stuck.backlog(broken)) == (0, 1)
        assert mover.postponed.keys() == {broken.full}
        assert mover.run_once().window == 1
        assert not mover.postponed


def test_a_partition_that_cannot_be_searched_stops_no_other(
    stuck: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(stuck.mover()) as mover:
        find = mover._ready_search.ready_range

        def ready_range(source: Any, *given: Any) -> Any:
            if source.name == stuck.description.name.partition(2):
                raise BrokerError("no broker serves it")
            return find(source, *given)

        with monkeypatch.context() as failing:
            failing.setattr(mover._ready_search, "ready_range", ready_range)
            with pytest.raises(BrokerError, match="no broker serves it"):
                mover.run_once()
        assert mover.made_progress
        assert not mover.postponed
        assert mover.run_once().total == 1


# -- a pass that ends early


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> World:
    """A level topic with 50 ready messages, and movers that confirm every 10 of them."""
    monkeypatch.setattr(local, "_FLUSH_EVERY", 10)
    monkeypatch.setattr(local, "_LOOK_EVERY", 1)
    world = World(WEEK, batching_enabled=False)
    for number in range(50):
        world.send(b"%d" % number, DAY + HOUR)
    world.let_pass(DAY)
    return world


def test_a_long_range_is_acknowledged_in_portions(
    many: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mover that is killed repeats only the last portion."""
    first = many.description.name.partition(0)
    with closing(many.mover()) as mover:
        with monkeypatch.context() as patch:
            patch.setattr(local, "read_range", reading(lambda _, number: number == 35))
            with pytest.raises(BrokerError, match="delivers nothing"):
                mover.run_once()
        assert many.backlog(first) == 20
        assert mover.run_once().window == 20
        assert many.backlog(first) == 0


def test_a_pass_that_is_stopped_acknowledges_what_it_has_handed_off(many: World) -> None:
    first = many.description.name.partition(0)
    looks = iter(range(100))
    with closing(many.mover()) as mover:
        moved = mover.run_once(lambda: next(looks) > 12).window
        assert 0 < moved < 50
        assert many.backlog(first) == 50 - moved
        assert mover.run_once(lambda: True).window == 0
        assert mover.run_once().window == 50 - moved
        assert many.backlog(first) == 0


@pytest.fixture
def backlog(monkeypatch: pytest.MonkeyPatch) -> World:
    """Ready messages of an hour in a coarse and in a fine level, and movers that confirm each.

    The coarse ones are due five minutes before the fine ones, at the earliest. A held
    message was ready before all of them.
    """
    monkeypatch.setattr(local, "_FLUSH_EVERY", 1)
    world = World(WEEK, HOURS)
    for payload, delay in ((b"coarse", DAY + HOUR / 2), (b"fine", HOUR + HOUR / 2)):
        for _ in range(4):
            world.send(payload, delay)
            world.let_pass(HOUR / 4)
        world.let_pass(DAY - 2 * HOUR + 5 * MINUTE)
        world.hold(b"held")
    return world


def test_a_backlog_is_handed_off_in_the_order_of_the_due_times(
    backlog: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[bytes | None] = []

    def read(*given: Any) -> Iterator[Any]:
        for message in read_range(*given):
            order.append(message.value)
            yield message

    monkeypatch.setattr(local, "read_range", read)
    with closing(backlog.mover()) as mover:
        assert mover.run_once().total == 9
        assert not mover.behind
    # The rest of a partition counts with the due time of the message before it.
    in_turns = [b"coarse", b"coarse", b"fine", *2 * [b"fine", b"coarse"], b"fine"]
    assert order == [*in_turns, b"held"], "a target that refuses makes no message of others late"


def test_a_long_pass_ends_and_the_next_one_continues(
    backlog: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = ManualClock.monotonic_s

    def monotonic_s(clock: ManualClock) -> float:
        clock.advance(SECOND)  # each look takes a second
        return look(clock)

    monkeypatch.setattr(ManualClock, "monotonic_s", monotonic_s)
    with closing(backlog.mover()) as mover:
        passes = [mover.run_once(longest_s=5).total]
        while mover.behind:
            passes.append(mover.run_once(longest_s=5).total)
    assert sum(passes) == 9
    assert 0 < passes[0] < 9


def test_a_drain_does_not_take_batches_that_are_too_large_for_new_messages(
    backlog: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush, failures = Forwarder.flush, 25

    def refuse(forwarder: Forwarder) -> ForwardReport:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            forwarder.reset()
            raise BatchTooLargeError("a batch is too large")
        return flush(forwarder)

    monkeypatch.setattr(Forwarder, "flush", refuse)
    client, memory = backlog.memory.client(), backlog.memory
    assert drain(client, memory.admin, backlog.description, clock=backlog.clock).total == 10
