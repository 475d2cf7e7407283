"""Tests of the outcomes that messages of one entry share."""

from __future__ import annotations

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


@pytest.fixture(autouse=True)
def _no_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_state, "_mistakes", 0)


def payload(size: int = 1, key: str = "", ordering_key: str = "") -> ParkedMessage:
    return ParkedMessage(1, 1, -1, 0, key, ordering_key, 0, {}, b"x" * size)


class Client:
    """A client that makes entries like the C++ client; each is stored or lost as a whole.

    ``sent`` tells for each message if it is stored, and its outcome.
    """

    def __init__(self, limits: EntryLimits, failing: frozenset[int] = frozenset()) -> None:
        self._limits = limits
        self._failing = failing
        self._gathered: dict[str, list[tuple[int, Any, EntryOutcome]]] = {}
        self.entries = 0
        self.sent: list[tuple[bool, EntryOutcome]] = []

    def send(self, message: ParkedMessage, outcomes: EntryOutcomes) -> None:
        outcome, callback = outcomes.next(message)
        if self._gathered and self._held + message.size > self._limits.size:
            self.flush()
        key = (message.ordering_key or message.key) if self._limits.by_key else ""
        self._gathered.setdefault(key, []).append((message.size, callback, outcome))
        count = sum(map(len, self._gathered.values()))
        if count >= self._limits.messages or self._held >= self._limits.size:
            self.flush()

    @property
    def _held(self) -> int:
        return sum(size for entry in self._gathered.values() for size, _, _ in entry)

    def flush(self) -> None:
        gathered, self._gathered = self._gathered, {}
        for entry in gathered.values():
            stored = self.entries not in self._failing
            for index, (_, callback, outcome) in enumerate(entry):
                self.sent.append((stored, outcome))
                if callback is not None:
                    at = FakeMessageId(Position(7, self.entries, index), len(entry))
                    callback(pulsar.Result.Ok if stored else pulsar.Result.Timeout, at)
            self.entries += 1


def confirmed(outcome: EntryOutcome) -> bool:
    ((result, message_id),) = outcome.items() or ((None, None),)
    return result == pulsar.Result.Ok and outcome.is_proven(message_id)


messages_given = st.lists(
    st.builds(
        payload,
        st.sampled_from([0, 1, 20, 50, 100]),
        st.sampled_from(["a", "b", ""]),
        st.sampled_from(["", "", "b"]),
    ),
    min_size=1,
    max_size=60,
)
failing_given = st.frozensets(st.integers(0, 10))


@given(
    messages_given,
    st.integers(1, 10),
    st.sampled_from([20, 50, 100, 120]),
    st.booleans(),
    failing_given,
)
def test_one_callback_for_each_entry_tells_what_is_stored(
    messages: list[ParkedMessage], most: int, size: int, by_key: bool, failing: frozenset[int]
) -> None:
    limits = EntryLimits(most, size, by_key)
    client, outcomes = Client(limits, failing), EntryOutcomes(limits)
    for message in messages:
        client.send(message, outcomes)
    client.flush()
    assert len({id(outcome) for _, outcome in client.sent}) == client.entries
    assert all(confirmed(outcome) == stored for stored, outcome in client.sent)


@given(messages_given, st.integers(1, 10), st.integers(1, 10), failing_given)
def test_entries_of_unexpected_sizes_confirm_nothing_that_is_not_stored(
    messages: list[ParkedMessage], most: int, cut: int, failing: frozenset[int]
) -> None:
    send_state._mistakes = 0
    client = Client(EntryLimits(cut, 10_000), failing)
    outcomes = EntryOutcomes(EntryLimits(most, 10_000))
    for message in messages:
        client.send(message, outcomes)
    client.flush()
    assert all(stored for stored, outcome in client.sent if confirmed(outcome))


def test_after_some_wrong_predictions_every_message_has_a_callback() -> None:
    outcomes = EntryOutcomes(EntryLimits(1000, 1000))
    outcome, _ = outcomes.next(payload())
    for _ in range(10):
        shared, callback = outcomes.next(payload())
        assert (shared, callback) == (outcome, None)
        assert not outcome.is_proven(FakeMessageId(Position(7, 0, 0), 1000))
    for _ in range(2):
        alone, callback = outcomes.next(payload())
        assert alone is not outcome
        assert callback is not None


def test_nothing_joins_an_entry_that_has_failed() -> None:
    outcomes = EntryOutcomes(EntryLimits(10, 100))
    first, callback = outcomes.next(payload())
    assert callback is not None
    callback("failed", None)
    second, callback = outcomes.next(payload())
    assert second is not first
    assert callback is not None
