"""Tests of the in-memory dispatcher: it takes over, fails, ends and is killed as the real one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pulsar
import pytest
from pulsar import ConsumerType

from delaylevel.cluster import threads
from delaylevel.cluster.locks import PartitionLock
from delaylevel.dispatcher.assignment import window_sources
from delaylevel.dispatcher.journal.topic import Journal
from delaylevel.dispatcher.owner import PartitionOwner
from delaylevel.errors import AlreadyRunningError, BrokerError
from delaylevel.model import envelope as env
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription
from delaylevel.model.outcome import Outcome, OutcomeStatus
from delaylevel.model.topic_name import TopicName
from delaylevel.structures.segments import pending as pending_segments
from delaylevel.testing import ManualClock, MemoryPulsar
from delaylevel.testing.memory.client import ConsumerLink
from delaylevel.testing.memory.dispatcher import MemoryDispatcher
from delaylevel.testing.memory.partition import Partition, StoredMessage
from delaylevel.testing.memory.producer import ProducerLink
from delaylevel.topics import lifecycle
from delaylevel.topics.roster import DescriptionCache

NOON_MS = int(datetime(2026, 3, 1, 12, tzinfo=timezone.utc).timestamp() * 1000)
HOUR, SECOND = timedelta(hours=1), timedelta(seconds=1)
HOUR_MS = 3_600_000
CANCELLED, TOO_LATE = OutcomeStatus.CANCELLED, OutcomeStatus.TOO_LATE


class Bench:
    """A level topic with a tracker, whose dispatchers the test runs.

    Its window partition is that of the key "k".
    """

    def __init__(self) -> None:
        self.clock = ManualClock(NOON_MS)
        self.memory = MemoryPulsar(self.clock)
        self.client = self.memory.client()
        self.producer: Any = self.client.create_producer(
            "orders", enable_delay_level_topic=True, final_window="tracker"
        )
        self.description: LevelTopicDescription = self.producer.description
        self.index = self.description.window_partition("k", "")
        self.window = self.description.window_topic.partition(self.index)
        self.journal = self.description.journal_topic.partition(self.index)
        self.outcomes = self.description.outcomes_topic.partition(0)
        self.dispatchers: list[MemoryDispatcher] = []

    def send(self, body: bytes, after: timedelta, **options: Any) -> Any:
        """Send a message with the key "k"; return its receipt."""
        return self.producer.schedule(body, deliver_after=after, partition_key="k", **options)

    def dispatcher(self) -> MemoryDispatcher:
        """Return a dispatcher, which is killed at the end."""
        broker = self.memory._broker
        found = MemoryDispatcher(self.client, self.memory.admin, broker, self.description)
        self.dispatchers.append(found)
        return found

    def run(self, dispatcher: MemoryDispatcher) -> None:
        """Run a dispatcher for a second: what a step has sent is answered after it."""
        for _ in range(10):
            dispatcher.run_once()
            self.clock.advance(timedelta(milliseconds=100))

    def refuse_once(self, topic: TopicName, patch: pytest.MonkeyPatch) -> list[TopicName]:
        """Let the broker refuse the next entry of a topic; return a list that then has its name."""
        store, refused = self.memory._broker.store, list[TopicName]()

        def refuse(name: TopicName, *arguments: Any, **options: Any) -> Any:
            if name == topic and not refused:
                refused.append(name)
                raise pulsar.Timeout("Pulsar error: Timeout")
            return store(name, *arguments, **options)

        patch.setattr(self.memory._broker, "store", refuse)
        return refused

    def open_journal(self) -> Journal:
        """Open the journal, as another dispatcher does: the present owner is fenced."""
        unused: Any = None
        _, source = window_sources(self.description, self.index)
        return Journal(self.client, self.memory.admin, source, unused)

    def stored(self, topic: TopicName) -> list[StoredMessage]:
        entries = self.memory._broker.partition(topic).entries
        return [message for entry in entries for message in entry.messages]

    def told(self) -> list[OutcomeStatus]:
        return [Outcome.read(each.properties).status for each in self.stored(self.outcomes)]

    def letters(self) -> list[StoredMessage]:
        return self.stored(self.description.dead_letter_topic.partition(0))

    def delivered(self) -> list[bytes | None]:
        return [message.data for message in self.memory.delivered("orders")]

    def pending(self) -> list[bytes | None]:
        return [message.data for message in self.memory.pending("orders")]


@pytest.fixture
def bench() -> Iterator[Bench]:
    found = Bench()
    yield found
    for dispatcher in found.dispatchers:
        dispatcher.kill()
    found.memory.close()


def test_a_message_that_was_sent_is_not_pending_while_later_ones_are(bench: Bench) -> None:
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
    dispatcher = bench.dispatcher()
    while len(bench.delivered()) < 50:
        dispatcher.run_once()
        bench.clock.move_to(dispatcher.next_event_ms() or 0)


# -- the description


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
        bench.clock.advance(HOUR - 10 * SECOND)
        bench.run(dispatcher)
        assert read_ms == [], "there is nothing to decide"
        lifecycle.pause(bench.memory.admin, "orders", None, bench.clock)
        bench.clock.advance(20 * SECOND)
        bench.run(dispatcher)
        assert (bench.delivered(), bench.pending()) == ([], [b"x"])
    lifecycle.resume(bench.memory.admin, "orders", None, bench.clock)
    bench.memory.advance(SECOND)
    assert bench.delivered() == [b"x"]


def test_a_clock_that_is_ahead_for_some_seconds_drops_and_releases_nothing(bench: Bench) -> None:
    bench.send(b"due soon", HOUR)
    bench.send(b"expires", HOUR / 2, expires_after=HOUR / 6)
    dispatcher = bench.dispatcher()
    dispatcher.run_once()
    bench.clock.step(HOUR)
    for _ in range(3):
        dispatcher.run_once()
        assert (bench.delivered(), len(bench.pending())) == ([], 2)
        bench.clock.advance(SECOND)
    bench.clock.step(-HOUR)
    bench.clock.advance(HOUR / 2)
    dispatcher.run_once()
    assert bench.delivered() == [b"expires"]
    bench.clock.step(HOUR)
    dispatcher.run_once()
    bench.clock.advance(11 * SECOND)
    dispatcher.run_once()
    assert bench.delivered() == [b"expires", b"due soon"], "it was a correction"


# -- owners that are replaced


@pytest.mark.parametrize(("left", "suspended"), [(SECOND, 0 * HOUR), (SECOND / 2, HOUR)])
def test_an_owner_that_the_broker_did_not_fence_publishes_and_tells_nothing(
    bench: Bench, left: timedelta, suspended: timedelta, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The monotonic clock stands still while a machine is suspended: its proof only seems fresh."""

    # As the broker does if two open the journal at the same time, this one accepts both.
    def enter(self: ProducerLink, partition: Partition) -> None:
        partition.producers[f"{self.name} {id(self)}"] = self

    monkeypatch.setattr(ProducerLink, "_enter", enter)
    receipt = bench.send(b"x", HOUR)
    first = bench.dispatcher()
    bench.clock.advance(HOUR - left)
    first.run_once()
    bench.clock.step(suspended)
    # Its connection breaks, and another dispatcher is faster.
    for partition in bench.memory._broker.partitions.values():
        for consumer in tuple(partition.consumers):
            if isinstance(consumer, ConsumerLink):
                consumer.disconnect()
    second = bench.dispatcher()
    second.run_once()
    bench.clock.advance(left)
    second.run_once()
    assert bench.delivered() == [b"x"]
    if not suspended:
        bench.producer.cancel(receipt)
    with pytest.raises(BrokerError, match="another dispatcher has opened"):
        bench.run(first)
    if suspended:
        bench.producer.cancel(receipt)
    bench.run(second)
    second.close()
    with bench.dispatcher() as third:
        third.run_once()
    assert (bench.delivered(), bench.told()) == ([b"x"], [TOO_LATE])


def test_an_owner_that_was_replaced_tells_and_acknowledges_nothing(bench: Bench) -> None:
    receipt = bench.send(b"x", HOUR)
    bench.producer.cancel(receipt)
    first = bench.dispatcher()
    bench.run(first)
    assert bench.told() == [CANCELLED]
    bench.open_journal().close()
    bench.producer.cancel(receipt)  # the decision needs no record
    with pytest.raises(BrokerError, match="another dispatcher has opened"):
        bench.run(first)
    assert bench.told() == [CANCELLED]
    first.kill()
    second = bench.dispatcher()
    bench.run(second)
    bench.open_journal().close()
    bench.send(b"y", HOUR)  # nothing is due, and nothing is released: a checkpoint fails
    with pytest.raises(BrokerError, match="another dispatcher has opened"):
        bench.run(second)


def test_a_dispatcher_that_finds_a_partition_taken_locks_none(bench: Bench) -> None:
    sources = window_sources(bench.description, bench.description.window_partitions - 1)
    lock = PartitionLock(bench.client, bench.memory.admin, sources, "test")
    with pytest.raises(AlreadyRunningError):
        bench.dispatcher()
    lock.close()
    bench.dispatcher()


# -- cancellations


@pytest.mark.parametrize("topic", ["outcomes", "journal"])
def test_a_cancellation_of_which_a_topic_refuses_something_is_told_later(
    bench: Bench, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipt = bench.send(b"x", HOUR)
    dispatcher = bench.dispatcher()
    bench.run(dispatcher)
    refused = bench.refuse_once(getattr(bench, topic), monkeypatch)
    bench.producer.cancel(receipt)
    if topic == "outcomes":
        bench.run(dispatcher)
        dispatcher.close()
    else:
        with pytest.raises(BrokerError, match="did not confirm"):
            bench.run(dispatcher)
        assert bench.told() == []
        dispatcher.kill()
    assert refused
    bench.memory.advance(2 * HOUR)
    assert (bench.told(), bench.delivered()) == ([CANCELLED], [])


def test_a_decision_without_a_record_of_its_own_waits_for_the_journal(bench: Bench) -> None:
    receipt = bench.send(b"x", HOUR)
    bench.producer.cancel(receipt)
    dispatcher = bench.dispatcher()
    bench.run(dispatcher)
    stored: list[TopicName] = []
    bench.memory._broker.watchers.append(
        lambda event: stored.append(event.topic) if event.subscription is None else None
    )
    bench.producer.cancel(receipt)
    bench.run(dispatcher)
    assert bench.told() == [CANCELLED] * 2
    assert bench.journal in stored[: stored.index(bench.outcomes)]


def test_a_cancellation_that_overtakes_its_message_cancels_it_at_once(bench: Bench) -> None:
    options: dict[str, Any] = {"message_id": "x", "partition_key": "k"}
    bench.producer.cancel(deliver_at=NOON_MS + HOUR_MS, **options)
    dispatcher = bench.dispatcher()
    bench.run(dispatcher)
    assert bench.told() == []
    bench.producer.send(b"x", deliver_at=NOON_MS + HOUR_MS, **options)
    bench.run(dispatcher)
    assert bench.told() == [CANCELLED]
    dispatcher.close()
    bench.memory.advance(2 * HOUR)
    assert (set(bench.told()), bench.delivered()) == ({CANCELLED}, [])


# -- batches of others


@pytest.mark.parametrize("refused", [False, True])
def test_a_batch_with_too_many_messages_costs_nobody_else_anything(
    bench: Bench, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end becomes dead letters, and is not acknowledged before."""
    most = {"batching_max_messages": 5_000, "max_pending_messages": 5_000}
    raw = bench.client.create_producer(bench.window.full, batching_enabled=True, **most)
    due = {env.DUE: str(NOON_MS + HOUR_MS), env.TARGET: bench.description.targets[0]}
    foreign = [b"foreign %d" % number for number in range(2_100 if refused else 1_100)]
    for body in foreign:
        raw.send_async(body, None, properties=due, partition_key="k")
    raw.flush()
    own = [b"own %d" % number for number in range(3)]
    for body in own:
        bench.send(body, HOUR)

    def refuse(*arguments: Any) -> None:
        raise BrokerError("the dead-letter topic does not confirm")

    first = bench.dispatcher()  # which ends while they are pending
    with monkeypatch.context() as patch:
        if refused:
            patch.setattr(PartitionOwner, "_set_aside_unnumbered", refuse)
        with contextlib.suppress(BrokerError):
            bench.run(first)
        first.kill()
    assert len(bench.letters()) == (0 if refused else len(foreign) - 1_024)
    bench.memory.advance(2 * HOUR)
    assert bench.delivered() == foreign[:1_024] + own
    assert {each.value for each in bench.letters()} == set(foreign[1_024:])
    assert "1,024 messages" in bench.letters()[0].properties[env.REASON]
    subscription = bench.memory._broker.partition(bench.window).subscriptions[SUBSCRIPTION]
    assert subscription.backlog == 0
