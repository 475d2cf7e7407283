"""Tests that one refusal or one lost connection makes a dispatcher tell or lose nothing untrue."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from delaylevel.dispatcher.assignment import window_sources
from delaylevel.dispatcher.journal.topic import Journal, LostOwnershipError
from delaylevel.errors import BrokerError
from delaylevel.model.outcome import Outcome, OutcomeStatus
from delaylevel.model.topic_name import TopicName
from delaylevel.mover.local import LocalMover
from delaylevel.testing import MemoryPulsar
from delaylevel.testing.memory.dispatcher import MemoryDispatcher

HOUR, SECOND = timedelta(hours=1), timedelta(seconds=1)
CANCELLED, TOO_LATE = OutcomeStatus.CANCELLED, OutcomeStatus.TOO_LATE


class Bench:
    """A level topic with a tracker, and a dispatcher that the test runs."""

    def __init__(self, memory: MemoryPulsar) -> None:
        self.memory = memory
        self.client = memory.client()
        self.producer: Any = self.client.create_producer(
            "orders", enable_delay_level_topic=True, final_window="tracker"
        )
        self.description = self.producer.description
        self.index = self.description.window_partition("k", "")
        self.dispatcher = self.start()

    def start(self) -> MemoryDispatcher:
        broker = self.memory._broker
        return MemoryDispatcher(self.client, self.memory.admin, broker, self.description)

    def schedule(self, body: bytes, after: timedelta) -> Any:
        return self.producer.schedule(body, deliver_after=after, partition_key="k")

    def run(self, seconds: float = 1.0) -> None:
        """Run the dispatcher: what a step has sent is answered after it."""
        for _ in range(round(seconds * 10)):
            self.dispatcher.run_once()
            self.memory.clock.advance(timedelta(milliseconds=100))

    def refuse_once(self, topic: TopicName, monkeypatch: pytest.MonkeyPatch) -> list[TopicName]:
        """Let the broker refuse the next entry of a topic; return a list that then has its name."""
        store, refused = self.memory._broker.store, list[TopicName]()

        def refuse(name: TopicName, *arguments: Any, **options: Any) -> Any:
            if name == topic and not refused:
                refused.append(name)
                raise pulsar.Timeout("Pulsar error: Timeout")
            return store(name, *arguments, **options)

        monkeypatch.setattr(self.memory._broker, "store", refuse)
        return refused

    def fence(self) -> None:
        """Open the journal, as another dispatcher does."""
        _, source = window_sources(self.description, self.index)
        unused: Any = None
        Journal(self.client, self.memory.admin, source, unused).close()

    def told(self) -> list[OutcomeStatus]:
        topic = self.description.outcomes_topic.partition(0).full
        return [Outcome.read(each.properties).status for each in self.memory.delivered(topic)]

    def delivered(self) -> list[bytes | None]:
        return [message.data for message in self.memory.delivered("orders")]


@pytest.fixture
def bench() -> Iterator[Bench]:
    memory = MemoryPulsar()
    found = Bench(memory)
    yield found
    found.dispatcher.kill()
    memory.close()


def test_an_outcome_that_is_refused_is_told_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipt = bench.schedule(b"x", HOUR)
    bench.run()
    refused = bench.refuse_once(bench.description.outcomes_topic.partition(0), monkeypatch)
    bench.producer.cancel(receipt)
    bench.run()
    assert refused
    bench.dispatcher.close()
    bench.memory.advance(2 * HOUR)
    assert (bench.told(), bench.delivered()) == ([CANCELLED], [])


def test_an_owner_whose_journal_refused_a_record_gives_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipt = bench.schedule(b"x", HOUR)
    bench.run()
    refused = bench.refuse_once(bench.description.journal_topic.partition(bench.index), monkeypatch)
    bench.producer.cancel(receipt)
    with pytest.raises(BrokerError, match="did not confirm"):
        bench.run()
    assert refused
    assert bench.told() == []
    bench.dispatcher.kill()
    bench.memory.advance(2 * HOUR)
    assert (bench.told(), bench.delivered()) == ([CANCELLED], [])


def test_an_owner_that_was_replaced_tells_nothing_that_it_knows(bench: Bench) -> None:
    receipt = bench.schedule(b"x", HOUR)
    bench.producer.cancel(receipt)
    bench.run()
    assert bench.told() == [CANCELLED]
    bench.fence()
    bench.producer.cancel(receipt)  # the decision needs no record
    with pytest.raises(LostOwnershipError):
        bench.run()
    assert bench.told() == [CANCELLED]


def test_a_decision_without_a_record_of_its_own_waits_for_the_journal(bench: Bench) -> None:
    receipt = bench.schedule(b"x", HOUR)
    bench.producer.cancel(receipt)
    bench.run()
    stored: list[TopicName] = []
    bench.memory._broker.watchers.append(
        lambda event: stored.append(event.topic) if event.subscription is None else None
    )
    bench.producer.cancel(receipt)
    bench.run()
    journal = bench.description.journal_topic.partition(bench.index)
    outcomes = bench.description.outcomes_topic.partition(0)
    assert bench.told() == [CANCELLED] * 2
    assert journal in stored[: stored.index(outcomes)]


def test_a_checkpoint_of_an_owner_that_was_replaced_fails(bench: Bench) -> None:
    bench.schedule(b"x", HOUR)
    bench.run()
    bench.fence()
    bench.schedule(b"y", HOUR)  # nothing is due, and nothing is released
    with pytest.raises(LostOwnershipError):
        bench.run()


def test_a_cancellation_that_overtakes_its_message_cancels_it_at_once(bench: Bench) -> None:
    due_ms = bench.memory.clock.now_ms() + 3_600_000
    options: dict[str, Any] = {"deliver_at": due_ms, "message_id": "x", "partition_key": "k"}
    bench.producer.cancel(**options)
    bench.run()
    assert bench.told() == []
    bench.producer.send(b"x", **options)
    bench.run()
    assert bench.told() == [CANCELLED]
    bench.dispatcher.close()
    bench.memory.advance(2 * HOUR)
    assert (set(bench.told()), bench.delivered()) == ({CANCELLED}, [])


def test_a_message_is_handed_off_in_the_millisecond_in_which_it_is_ready() -> None:
    with MemoryPulsar() as memory:
        producer = memory.client().create_producer(
            "orders", enable_delay_level_topic=True, final_window="tracker"
        )
        producer.send(b"x", deliver_after=25 * HOUR)
        ready_ms = producer.description.levels[0].hand_off_after_ms(0)
        client = memory.client()
        with LocalMover(client, memory.admin, producer.description, memory.clock) as mover:
            memory.clock.advance(timedelta(milliseconds=ready_ms - 1))
            assert mover.run_once().total == 0
            memory.clock.advance(timedelta(milliseconds=1))
            assert mover.run_once().window == 1
