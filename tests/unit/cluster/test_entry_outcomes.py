"""Tests of the outcomes that messages of one entry share."""

from __future__ import annotations

from typing import Any

from delaylevel.cluster.targets.send_state import EntryLimits, EntryOutcomes
from delaylevel.model.message import ParkedMessage


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


def test_an_entry_ends_when_it_is_full() -> None:
    outcomes = EntryOutcomes(EntryLimits(3, 100))
    assert entries(outcomes, [payload()] * 7) == [0, 0, 0, 1, 1, 1, 2]


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


def test_a_flush_ends_all_entries() -> None:
    outcomes = EntryOutcomes(EntryLimits(10, 100))
    first, _ = outcomes.next(payload())
    outcomes.end()
    second, callback = outcomes.next(payload())
    assert second is not first
    assert callback is not None


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
