"""Tests of the outcomes that messages of one entry share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pulsar
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.cluster.targets import send_state
from delaylevel.cluster.targets.send_state import EntryLimits, EntryOutcome, EntryOutcomes
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import Position
from support.fakes import FakeMessageId


def payload(size: int = 1, key: str = "", ordering_key: str = "") -> ParkedMessage:
    return ParkedMessage(1, 1, -1, 0, key, ordering_key, 0, {}, b"x" * size)


def entries(outcomes: EntryOutcomes, payloads: list[ParkedMessage]) -> list[int]:
    """Return the number of each message's entry; only the first of an entry has a callback."""
    numbers: dict[int, int] = {}
    kept: list[Any] = []
    found = []
    for each in payloads:
        outcome, callback = outcomes.next(each)
        assert (callback is not None) == (id(outcome) not in numbers)
        kept.append(outcome)
        found.append(numbers.setdefault(id(outcome), len(numbers)))
    return found


def test_an_entry_ends_before_a_message_for_which_it_has_no_room() -> None:
    outcomes = EntryOutcomes(EntryLimits(10, 100))
    sizes = [60, 40, 60, 50, 1, 200, 1]
    assert entries(outcomes, [payload(size) for size in sizes]) == [0, 0, 1, 2, 2, 3, 4]


def test_each_key_has_its_own_entry() -> None:
    outcomes = EntryOutcomes(EntryLimits(4, 100))
    keys = ["a", "b", "a", "a", "b", "b"]
    assert entries(outcomes, [payload(key=key) for key in keys]) == [0, 1, 0, 0, 2, 2]
    outcomes.end()
    ordered = [payload(key="a", ordering_key="o"), payload(key="b", ordering_key="o")]
    assert entries(outcomes, ordered) == [0, 0]


def test_keys_share_an_entry_unless_the_client_separates_them() -> None:
    outcomes = EntryOutcomes(EntryLimits(4, 100, by_key=False))
    keys = ["a", "b", "", "a", "b"]
    assert entries(outcomes, [payload(key=key) for key in keys]) == [0, 0, 0, 0, 1]


@dataclass
class Client:
    """A fake client that builds batches like the C++ client. Each is stored or lost as a whole."""

    messages: int
    size: int
    failing: frozenset[int] = frozenset()
    gathered: list[tuple[ParkedMessage, Any, EntryOutcome]] = field(default_factory=list)
    batches: int = 0
    #: For each message, if it is stored, and its outcome.
    sent: list[tuple[bool, EntryOutcome]] = field(default_factory=list)

    def send(self, message: ParkedMessage, outcomes: EntryOutcomes) -> None:
        outcome, callback = outcomes.next(message)
        length = message.size
        held = sum(each.size for each, _, _ in self.gathered)
        if self.gathered and held + length > self.size:
            self.flush()
            held = 0
        self.gathered.append((message, callback, outcome))
        if len(self.gathered) >= self.messages or held + length >= self.size:
            self.flush()

    def flush(self) -> None:
        gathered, self.gathered = self.gathered, []
        if not gathered:
            return
        stored = self.batches not in self.failing
        self.batches += 1
        for index, (_, callback, outcome) in enumerate(gathered):
            self.sent.append((stored, outcome))
            if callback is not None:
                at = FakeMessageId(Position(7, self.batches, index), len(gathered))
                callback(pulsar.Result.Ok if stored else pulsar.Result.Timeout, at)


def confirmed(outcome: EntryOutcome) -> bool:
    ((result, message_id),) = outcome.items() or ((None, None),)
    return result == pulsar.Result.Ok and outcome.is_proven(message_id)


lengths_given = st.lists(st.integers(0, 120), min_size=1, max_size=60)
failing_given = st.frozensets(st.integers(0, 10))


@given(lengths_given, st.integers(1, 10), st.integers(1, 200), failing_given)
def test_one_callback_for_each_batch_tells_what_is_stored(
    lengths: list[int], messages: int, size: int, failing: frozenset[int]
) -> None:
    outcomes = EntryOutcomes(EntryLimits(messages, size, by_key=False))
    client = Client(messages, size, failing)
    for length in lengths:
        client.send(payload(length), outcomes)
    client.flush()
    assert len({id(outcome) for _, outcome in client.sent}) == client.batches
    assert all(confirmed(outcome) == stored for stored, outcome in client.sent)


@given(lengths_given, st.integers(1, 10), st.integers(1, 10), failing_given)
def test_batches_of_unexpected_sizes_confirm_nothing_that_is_not_stored(
    lengths: list[int], messages: int, cut: int, failing: frozenset[int]
) -> None:
    outcomes, client = (
        EntryOutcomes(EntryLimits(messages, 10_000, by_key=False)),
        Client(cut, 10_000),
    )
    client.failing = failing
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(send_state, "_mistakes", 0)
        for length in lengths:
            client.send(payload(length), outcomes)
        client.flush()
        assert all(stored for stored, outcome in client.sent if confirmed(outcome))


def test_after_some_wrong_predictions_every_message_has_a_callback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(send_state, "_mistakes", 0)
    outcomes = EntryOutcomes(EntryLimits(10, 100))
    wrong = EntryOutcomes(EntryLimits(10, 100))
    first, _ = wrong.next(payload())
    wrong.next(payload())
    for _ in range(10):
        assert entries(outcomes, [payload()] * 3) == [0, 0, 0]
        outcomes.end()
        assert not first.is_proven(StoredId(0))
    assert entries(outcomes, [payload()] * 3) == [0, 1, 2]


def test_nothing_joins_an_entry_that_has_failed() -> None:
    outcomes = EntryOutcomes(EntryLimits(10, 100))
    first, callback = outcomes.next(payload())
    assert callback is not None
    callback("failed", None)
    second, callback = outcomes.next(payload())
    assert second is not first
    assert callback is not None


def test_without_limits_each_message_has_its_own_outcome() -> None:
    assert entries(EntryOutcomes(), [payload()] * 3) == [0, 1, 2]


class StoredId:
    """ID of the message at an index of an entry with 3 messages."""

    def __init__(self, index: int) -> None:
        self._index = index

    def batch_index(self) -> int:
        return self._index

    def serialize(self) -> bytes:
        return bytes((6 << 3, 3))


def test_a_confirmation_counts_for_the_messages_of_its_entry_only() -> None:
    outcomes = EntryOutcomes(EntryLimits(10, 100))
    outcome, _ = outcomes.next(payload())
    assert outcome.is_proven(StoredId(1))  # it has a callback of its own
    outcomes.next(payload())
    assert not outcome.is_proven(StoredId(0))
    outcomes.next(payload())
    assert outcome.is_proven(StoredId(0))
    assert not outcome.is_proven(StoredId(1))
