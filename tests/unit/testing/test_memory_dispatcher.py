"""Tests of the in-memory dispatcher: it takes over, ends and is killed as the real one."""

from __future__ import annotations

import contextlib
import threading
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from pulsar import ConsumerType

from delaylevel.cluster import threads
from delaylevel.cluster.locks import PartitionLock
from delaylevel.dispatcher.assignment import window_sources
from delaylevel.dispatcher.journal.records import (
    LowWatermark,
    Record,
    Released,
    SnapshotChunk,
    decode,
)
from delaylevel.dispatcher.journal.topic import Journal, LostOwnershipError, counting
from delaylevel.dispatcher.owner import PartitionOwner
from delaylevel.dispatcher.publishing.flights import Flights
from delaylevel.errors import AlreadyRunningError, BrokerError
from delaylevel.model import envelope as env
from delaylevel.model.level_topic import SUBSCRIPTION, FinalWindow, LevelTopicDescription
from delaylevel.model.outcome import Outcome, OutcomeStatus
from delaylevel.structures.segments import pending as pending_segments
from delaylevel.testing import ManualClock, MemoryPulsar
from delaylevel.testing.memory.broker import Partition
from delaylevel.testing.memory.client import ConsumerLink
from delaylevel.testing.memory.dispatcher import MemoryDispatcher
from delaylevel.testing.memory.log import StoredMessage
from delaylevel.testing.memory.producer import ProducerLink
from delaylevel.topics import lifecycle
from delaylevel.topics.roster import DescriptionCache

NOON_MS = int(datetime(2026, 3, 1, 12, tzinfo=timezone.utc).timestamp() * 1000)
HOUR = timedelta(hours=1)


class Bench:
    """A level topic with a tracker, whose dispatchers the test runs.

    Attributes:
        description: its description.
    """

    def __init__(self) -> None:
        self.clock = ManualClock(NOON_MS)
        self.memory = MemoryPulsar(self.clock)
        self.client = self.memory.client()
        self.producer = self.client.create_producer(
            "orders", enable_delay_level_topic=True, final_window="tracker"
        )
        self.description: LevelTopicDescription = self.producer.description

    def send(self, body: bytes, after: timedelta, **options: Any) -> None:
        """Send a message to the window partition of the key "k"."""
        self.producer.send(body, deliver_after=after, partition_key="k", **options)

    def dispatcher(self) -> MemoryDispatcher:
        """Return a dispatcher, which the test has to close or kill."""
        broker = self.memory._broker
        return MemoryDispatcher(self.client, self.memory.admin, broker, self.description)

    def run(self, dispatcher: MemoryDispatcher) -> None:
        """Run a dispatcher for a second: what a step has sent is answered after it."""
        for _ in range(10):
            dispatcher.run_once()
            self.clock.advance(timedelta(milliseconds=100))

    def delivered(self) -> list[bytes | None]:
        return [message.data for message in self.memory.delivered("orders")]

    def pending(self) -> list[bytes | None]:
        return [message.data for message in self.memory.pending("orders")]

    def records(self) -> list[Record]:
        """Return the records of the journal of the key's partition."""
        index = self.description.window_partition("k", "")
        journal = self.description.journal_topic.partition(index)
        entries = self.memory._broker.partitions[journal].log.entries
        stored = ((each.messages[0].value or b"", each.position) for each in entries)
        return [decode(record) for record in counting(stored)]

    def kinds(self) -> list[type]:
        """Return the kinds of the records that concern messages."""
        every = [type(record) for record in self.records()]
        return [kind for kind in every if kind not in (LowWatermark, SnapshotChunk)]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_message_is_released_when_it_is_due_and_then_in_the_journal(bench: Bench) -> None:
    bench.send(b"x", HOUR)
    with bench.dispatcher() as dispatcher:
        dispatcher.run_once()
        assert (bench.kinds(), bench.pending()) == ([], [b"x"])
        # Before that, its target is opened.
        assert dispatcher.next_event_ms() == NOON_MS + 3_600_000 - 300
        bench.clock.move_to(NOON_MS + 3_600_000 - 300)
        assert dispatcher.run_once().total == 0
        assert (bench.kinds(), bench.pending(), bench.delivered()) == ([], [b"x"], [])
        assert dispatcher.next_event_ms() == NOON_MS + 3_600_000
        bench.clock.move_to(NOON_MS + 3_600_000)
        report = dispatcher.run_once()
        assert (report.due, report.latest_ms, dispatcher.next_event_ms()) == (1, 0, None)
        assert bench.kinds() == [Released]
        assert (bench.pending(), bench.delivered()) == ([], [b"x"])


def test_what_is_due_waits_until_an_old_description_was_read_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_ms: list[int] = []

    def is_current(cache: DescriptionCache) -> bool:
        if read_ms[-1:] == [bench.clock.now_ms()]:
            return True
        read_ms.append(bench.clock.now_ms())
        cache.refresh(cache._now_s())
        return False

    bench.send(b"x", HOUR)
    with bench.dispatcher() as dispatcher, monkeypatch.context() as patch:
        dispatcher.run_once()
        patch.setattr(DescriptionCache, "is_current", is_current)
        bench.clock.advance(HOUR - timedelta(seconds=10))
        bench.run(dispatcher)
        assert read_ms == [], "there is nothing to decide"
        lifecycle.pause(bench.memory.admin, "orders", None, bench.clock)
        bench.clock.advance(timedelta(seconds=20))
        bench.run(dispatcher)
        assert (bench.delivered(), bench.pending()) == ([], [b"x"])
    lifecycle.resume(bench.memory.admin, "orders", None, bench.clock)
    bench.memory.advance(timedelta(seconds=1))
    assert bench.delivered() == [b"x"]


def test_no_message_is_read_by_an_old_description(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bench.dispatcher() as dispatcher, monkeypatch.context() as patch:
        patch.setattr(DescriptionCache, "is_current", lambda _: False)
        bench.send(b"x", HOUR)
        bench.run(dispatcher)
        assert dispatcher.next_event_ms() is None, "the message is not pending"
        patch.undo()
        bench.send(b"y", 2 * HOUR)
        dispatcher.run_once()
        assert dispatcher.next_event_ms() == NOON_MS + 3_600_000 - 300
        bench.clock.advance(2 * HOUR)
        bench.run(dispatcher)
        assert bench.delivered() == [b"x", b"y"]


def test_a_dispatcher_that_dies_before_the_commit_repeats_messages_with_the_same_id(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.send(b"x", HOUR)

    def die(self: Any) -> None:
        if bench.delivered():
            raise BrokerError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Flights, "write_commits", die)
        with pytest.raises(BrokerError, match="killed"):
            bench.memory.advance(2 * HOUR)
    assert (bench.kinds(), bench.pending(), bench.delivered()) == ([], [b"x"], [b"x"])
    assert bench.memory.advance(HOUR).due == 1
    assert (bench.pending(), bench.delivered()) == ([], [b"x", b"x"])
    first, second = bench.memory.delivered("orders")
    assert first.properties[env.ID] == second.properties[env.ID]
    assert bench.memory.advance(HOUR).due == 0


def test_a_proof_grows_old_by_the_clock_that_advances_more(bench: Bench) -> None:
    """The monotonic clock stands still while a machine is suspended."""
    index = bench.description.window_partition("k", "")
    _, source = window_sources(bench.description, index)
    unused: Any = None
    now_s, now_ms = 5.0, NOON_MS
    journal = Journal(
        bench.client, bench.memory.admin, source, unused, lambda: now_s, lambda: now_ms
    )
    assert (list(journal.read()), journal.is_new) == ([], True)
    journal.claim()
    assert (journal.proof_age_s, journal.is_new) == (0, False)
    now_s += 2
    assert journal.proof_age_s == 2
    now_ms += 3_000
    assert journal.proof_age_s == 3
    journal.append(LowWatermark(1))
    assert journal.proof_age_s == 0
    journal.close()


def test_an_owner_that_the_broker_did_not_fence_publishes_and_tells_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As the broker does if two open the journal at the same time, this one accepts both.
    def enter(self: ProducerLink, partition: Partition) -> None:
        partition.producers[f"{self.name} {id(self)}"] = self

    monkeypatch.setattr(ProducerLink, "_enter", enter)
    receipt = bench.producer.schedule(b"x", deliver_after=HOUR, partition_key="k")
    first = bench.dispatcher()
    bench.clock.advance(HOUR - timedelta(seconds=1))
    first.run_once()
    partitions = bench.memory._broker.partitions.values()
    for partition in partitions:  # its connection breaks, and another dispatcher is faster
        for consumer in tuple(partition.consumers):
            if isinstance(consumer, ConsumerLink):
                consumer.disconnect()
    second = bench.dispatcher()
    second.run_once()
    bench.clock.advance(timedelta(seconds=1))
    second.run_once()
    assert bench.delivered() == [b"x"]
    bench.producer.cancel(receipt)
    with pytest.raises(LostOwnershipError):
        bench.run(first)
    bench.run(second)
    second.close()
    third = bench.dispatcher()
    third.run_once()
    third.close()
    assert bench.delivered() == [b"x"]
    log = bench.memory._broker.partitions[bench.description.outcomes_topic.partition(0)].log
    told = [Outcome.read(each.messages[0].properties).status for each in log.entries]
    assert told == [OutcomeStatus.TOO_LATE]


def test_a_message_that_was_sent_is_not_pending_while_later_ones_are(
    bench: Bench,
) -> None:
    seen: list[tuple[bytes, list[bytes | None]]] = []

    def look(consumer: Any, message: Any) -> None:
        seen.append((message.data(), bench.pending()))
        consumer.acknowledge(message)

    bench.client.subscribe("orders", "app", ConsumerType.Shared, message_listener=look)
    for number in range(5):  # the first one opens the target
        bench.send(b"%d" % number, HOUR + timedelta(milliseconds=40 * number))
    bench.memory.advance(2 * HOUR)
    bodies: list[bytes | None] = [b"0", b"1", b"2", b"3", b"4"]
    assert seen == [(body, bodies[number + 1 :]) for number, body in enumerate(bodies)]


def test_there_are_no_threads_and_no_files(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("not in memory")

    for number in range(50):
        bench.send(b"%d" % number * 100_000, HOUR + timedelta(seconds=number % 3))
    bench.producer.close()
    for where, name in (
        (threading.Thread, "start"),
        (threads, "in_thread"),
        (pending_segments, "make_spill_folder"),
        (pending_segments.SpillDirectory, "write"),
        (Path, "mkdir"),
    ):
        monkeypatch.setattr(where, name, refuse)
    with bench.dispatcher() as dispatcher:
        due = 0
        while due < 50:
            due += dispatcher.run_once().due
            bench.clock.move_to(dispatcher.next_event_ms() or 0)
    assert len(bench.delivered()) == 50


def test_a_dispatcher_that_finds_a_partition_taken_locks_none(bench: Bench) -> None:
    sources = window_sources(bench.description, bench.description.window_partitions - 1)
    lock = PartitionLock(bench.client, bench.memory.admin, sources, "test")
    assert bench.description.final_window is FinalWindow.TRACKER
    with pytest.raises(AlreadyRunningError):
        bench.dispatcher()
    lock.close()
    bench.dispatcher().close()


def test_a_clock_that_is_ahead_for_some_seconds_drops_and_releases_nothing(bench: Bench) -> None:
    bench.send(b"due soon", HOUR)
    bench.send(b"expires", timedelta(minutes=30), expires_after=timedelta(minutes=10))
    with bench.dispatcher() as dispatcher:
        dispatcher.run_once()
        bench.clock.step(HOUR)
        for _ in range(3):
            dispatcher.run_once()
            assert (bench.delivered(), len(bench.pending())) == ([], 2)
            bench.clock.advance(timedelta(seconds=1))
        bench.clock.step(-HOUR)
        bench.clock.advance(timedelta(minutes=30))
        dispatcher.run_once()
        assert bench.delivered() == [b"expires"]
        bench.clock.step(HOUR)
        dispatcher.run_once()
        bench.clock.advance(timedelta(seconds=11))
        dispatcher.run_once()
        assert bench.delivered() == [b"expires", b"due soon"], "it was a correction"


@pytest.mark.parametrize("size", [1_100, 2_500])
def test_a_batch_with_too_many_messages_costs_nobody_else_anything(bench: Bench, size: int) -> None:
    index = bench.description.window_partition("k", "")
    window = bench.description.window_topic.partition(index).full
    raw = bench.client.create_producer(
        window, batching_enabled=True, batching_max_messages=5_000, max_pending_messages=5_000
    )
    due = {env.DUE: str(NOON_MS + 3_600_000), env.TARGET: bench.description.targets[0]}
    for number in range(size):
        raw.send_async(b"foreign %d" % number, None, properties=due, partition_key="k")
    raw.flush()
    for number in range(3):
        bench.send(b"own %d" % number, HOUR)

    def letters() -> list[StoredMessage]:
        topic = bench.description.dead_letter_topic.partition(0)
        log = bench.memory._broker.partitions[topic].log
        return [message for entry in log.entries for message in entry.messages]

    with bench.dispatcher() as first:  # which ends while they are pending
        first.run_once()
        assert len(letters()) == size - 1_024
    bench.memory.advance(2 * HOUR)
    assert bench.delivered() == [
        *(b"foreign %d" % number for number in range(1_024)),
        *(b"own %d" % number for number in range(3)),
    ]
    assert {each.value for each in letters()} == {b"foreign %d" % n for n in range(1_024, size)}
    assert "1,024 messages" in letters()[0].properties[env.REASON]
    partition = bench.memory._broker.partitions[bench.description.window_topic.partition(index)]
    assert partition.subscriptions[SUBSCRIPTION].backlog == 0


def test_the_end_of_a_large_batch_is_not_acknowledged_before_it_is_a_dead_letter(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = bench.description.window_partition("k", "")
    window = bench.description.window_topic.partition(index)
    raw = bench.client.create_producer(
        window.full, batching_enabled=True, batching_max_messages=5_000, max_pending_messages=5_000
    )
    due = {env.DUE: str(NOON_MS + 60_000), env.TARGET: bench.description.targets[0]}
    for number in range(2_500):
        raw.send_async(b"%d" % number, None, properties=due, partition_key="k")
    raw.flush()

    def refuse(*arguments: Any) -> None:
        raise BrokerError("the dead-letter topic does not confirm")

    with monkeypatch.context() as patch:
        patch.setattr(PartitionOwner, "_set_aside_unnumbered", refuse)
        first = bench.dispatcher()
        bench.clock.advance(timedelta(minutes=2))
        with contextlib.suppress(BrokerError):
            bench.run(first)
        first.kill()
    bench.memory.advance(HOUR)
    letters = bench.memory.delivered(bench.description.dead_letter_topic.partition(0).full)
    assert {message.data for message in letters} == {b"%d" % n for n in range(1_024, 2_500)}
    assert len(set(bench.delivered())) == 1_024
