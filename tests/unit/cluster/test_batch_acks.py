"""Tests that only stored messages are confirmed, whatever batches the client builds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pulsar
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.cluster import publisher
from delaylevel.cluster.publisher import UNPROVEN, BatchAckTracker
from support.fakes import serialized_id

OK, TIMEOUT = pulsar.Result.Ok, pulsar.Result.Timeout
LEDGER = 7


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(publisher, "_predictable", True)


def message_id(entry: int, index: int, size: int) -> Any:
    """Return an ID as the client passes it to callbacks, with the size of the batch."""
    return pulsar.MessageId.deserialize(serialized_id(LEDGER, entry, index, size))


@dataclass
class Client:
    """A fake client that builds batches like the C++ client. Each is stored or lost as a whole."""

    messages: int
    size: int
    outcomes: Callable[[int], pulsar.Result] = lambda _: OK
    gathered: list[tuple[int, Any]] = field(default_factory=list)
    batches: int = 0
    stored: int = 0

    def send(self, length: int, callback: Any) -> None:
        held = sum(size for size, _ in self.gathered)
        if self.gathered and held + length > self.size:
            self.flush()
            held = 0
        self.gathered.append((length, callback))
        if len(self.gathered) >= self.messages or held + length >= self.size:
            self.flush()

    def flush(self) -> None:
        gathered, self.gathered = self.gathered, []
        if not gathered:
            return
        result = self.outcomes(self.batches)
        self.batches += 1
        self.stored += len(gathered) if result == OK else 0
        for index, (_, callback) in enumerate(gathered):
            if callback is not None:
                callback(result, message_id(self.batches, index, len(gathered)))


def publish(tracker: BatchAckTracker, client: Client, lengths: list[int]) -> int:
    """Send messages and flush; return how many had a callback."""
    callbacks = 0
    for length in lengths:
        callback = tracker.callback(length)
        callbacks += callback is not None
        client.send(length, callback)
    client.flush()
    return callbacks


lengths_given = st.lists(st.integers(0, 120), min_size=1, max_size=60)


@given(lengths_given, st.integers(1, 10), st.integers(1, 200))
def test_one_callback_for_each_batch_is_enough(
    lengths: list[int], messages: int, size: int
) -> None:
    tracker, client = BatchAckTracker(messages, size), Client(messages, size)
    callbacks = publish(tracker, client, lengths)
    assert callbacks == client.batches
    assert tracker.failure() is None


@given(lengths_given, st.integers(1, 10), st.integers(1, 200), st.data())
def test_a_failed_batch_is_detected(
    lengths: list[int], messages: int, size: int, data: st.DataObject
) -> None:
    failing = data.draw(st.sets(st.integers(0, 10), min_size=1))
    tracker = BatchAckTracker(messages, size)
    client = Client(messages, size, lambda batch: TIMEOUT if batch in failing else OK)
    publish(tracker, client, lengths)
    assert (tracker.failure() is None) == (client.stored == len(lengths))


@given(lengths_given, st.integers(1, 10), st.integers(1, 10), st.sets(st.integers(0, 30)))
def test_unexpected_batch_sizes_never_confirm_unstored_messages(
    lengths: list[int], messages: int, cut: int, failing: set[int]
) -> None:
    publisher._predictable = True
    tracker = BatchAckTracker(messages, 10_000)
    client = Client(cut, 10_000, lambda batch: TIMEOUT if batch in failing else OK)
    publish(tracker, client, lengths)
    if client.stored < len(lengths):
        assert tracker.failure() is not None
    elif cut == messages:
        assert tracker.failure() is None


def test_after_an_unexpected_batch_every_message_has_a_callback() -> None:
    tracker = BatchAckTracker(5, 10_000)
    publish(tracker, Client(3, 10_000), [1] * 10)
    assert tracker.failure() == UNPROVEN
    tracker.start(True)
    assert publish(tracker, Client(3, 10_000), [1] * 10) == 10
    assert tracker.failure() is None


@pytest.mark.parametrize("left_over", [1, 4])
def test_messages_left_in_the_batch_do_not_count_for_new_ones(left_over: int) -> None:
    tracker = BatchAckTracker(5, 10_000)
    client = Client(5, 10_000, lambda batch: TIMEOUT if batch == 1 else OK)
    for _ in range(left_over):
        client.send(1, tracker.callback(1))
    tracker.start(False)
    # The first batch has five messages, but some of them were sent before.
    for _ in range(5):
        client.send(1, tracker.callback(1))
    client.flush()
    assert client.stored == 5
    assert tracker.failure() == "Timeout"


def test_a_callback_that_never_comes_is_no_confirmation() -> None:
    tracker = BatchAckTracker(5, 10_000)
    tracker.callback(1)
    assert tracker.failure() == "no confirmation"
    single = BatchAckTracker(1, 10_000)
    for number in range(3):
        callback = single.callback(1)
        assert callback is not None
        if number != 1:
            callback(OK, message_id(number, 0, 1))
    assert single.failure() == "no confirmation"


def test_unbatched_messages_count_too() -> None:
    tracker, client = BatchAckTracker(5, 10_000), Client(5, 10_000)
    tracker.unbatched_callback()
    publish(tracker, client, [1] * 7)
    assert tracker.failure() == "no confirmation"
    tracker.start(True)
    alone = tracker.unbatched_callback()
    publish(tracker, client, [1] * 7)
    alone(OK, message_id(100, 0, 1))
    assert tracker.failure() is None


def test_confirmed_outcomes_of_single_messages_are_dropped() -> None:
    tracker = BatchAckTracker(1, 10_000)
    for number in range(20_000):
        callback = tracker.callback(1)
        assert callback is not None
        callback(TIMEOUT if number == 500 else OK, message_id(number, 0, 1))
    assert len(tracker._outcomes) < 5_000
    assert tracker.failure() == "Timeout"
