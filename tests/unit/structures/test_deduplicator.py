"""Tests of sets of IDs: the deduplicator, and one from which IDs can be removed."""

from __future__ import annotations

import random
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from delaylevel.errors import InvalidInputError
from delaylevel.structures import id_set
from delaylevel.structures.deduplicator import DamagedSnapshotError, Deduplicator
from delaylevel.structures.id_set import RemovableIds
from support.seeds import examples


class Model:
    """Reference implementation, one ID at a time."""

    def __init__(self, capacity: int) -> None:
        self.half = capacity // 2
        self.current: set[int] = set()
        self.previous: set[int] = set()

    def is_duplicate(self, value: int) -> bool:
        return value in self.current or value in self.previous

    def save(self, value: int) -> None:
        if value in self.current:
            return
        if len(self.current) == self.half:
            self.current, self.previous = set(), self.current
        self.current.add(value)


IDS = st.one_of(
    st.integers(0, 60),
    st.integers(0, 60).map(lambda x: x << 10),
    st.integers(0, 3000),
    st.integers(0, (1 << 63) - 1),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["one", "batch", "save", "reconstruct", "other key"]),
            st.lists(IDS, max_size=80),
        ),
        st.tuples(st.just("range"), st.tuples(st.integers(0, 300), st.integers(0, 150))),
        st.tuples(st.just("snapshot"), st.just(())),
    ),
    max_size=25,
)


@examples(30)
@example(steps=[("one", (1, 2, 3, 4, 5))], capacity=6)
@example(steps=[("save", (1, 2, 3, 4, 5))], capacity=6)
@given(steps=STEPS, capacity=st.sampled_from([2, 6, 40, 300, 10_000]))
def test_the_deduplicator_behaves_like_plain_sets(
    steps: list[tuple[str, tuple[int, ...]]], capacity: int
) -> None:
    with (
        patch.object(id_set, "_DENSE", 4),
        patch.object(id_set, "_MAX_PENDING", 8),
        patch.object(id_set, "_MAX_RECENT", 20),
        patch.object(id_set, "_BLOCK", 16),
        patch.object(id_set, "_MAX_RECENT_RUNS", 2),
    ):
        dedup, model = Deduplicator(capacity), Model(capacity)
        seen = {0, 1 << 10}
        for kind, values in steps:
            ids = list(range(values[0], sum(values))) if kind == "range" else list(values)
            seen |= set(ids)
            if kind == "one":
                for value in ids:
                    expected = model.is_duplicate(value)
                    assert dedup.is_duplicate(value, "k") == expected
                    assert dedup.is_duplicate_and_save(value, "k") == expected
                    if not expected:
                        model.save(value)
            elif kind == "save":
                dedup.save_all(ids, "k")
                for value in ids:
                    model.save(value)
            elif kind == "reconstruct":
                dedup.reconstruct(ids[:capacity], "k")
                model = Model(capacity)
                for value in ids[:capacity]:
                    model.save(value)
            elif kind == "other key":
                dedup.save_all(ids, "other")
                assert all(dedup.is_duplicate(value, "other") for value in ids[-1:])
                dedup.reconstruct([], "other")
            elif kind == "snapshot":
                data = dedup.snapshot("k")
                dedup = Deduplicator(capacity)
                dedup.restore(data, "k")
            else:
                ids = ids[:capacity]
                fresh = []
                for value in ids:
                    if not model.is_duplicate(value):
                        model.save(value)
                        fresh.append(value)
                assert dedup.deduplicate_and_save(ids, "k").tolist() == fresh
            assert len(dedup) == len(model.current) + len(model.previous)
            assert dedup.ids("k").tolist() == sorted(model.previous) + sorted(model.current)
        probe = sorted(seen)
        expected_mask = [model.is_duplicate(value) for value in probe]
        assert dedup.are_duplicates(probe, "k").tolist() == expected_mask
        assert {"k", "other"}.issuperset(dedup.keys())
        assert [dedup.is_duplicate(value, "k") for value in probe] == expected_mask


@pytest.mark.parametrize("step", [1, 1 << 10])
def test_message_ids_are_compact_in_any_order(step: int) -> None:
    ids = (np.arange(400_000) // 50_000 + 10_000 << 32) + np.arange(400_000) % 50_000 * step
    for order in (ids, np.random.default_rng(1).permutation(ids)):
        dedup = Deduplicator(1_000_000)
        for start in range(0, ids.size, 5000):
            part = order[start : start + 5000]
            assert dedup.deduplicate_and_save(part, "k").size == part.size
        dedup._keys["k"].current.compact()
        assert dedup.are_duplicates(ids, "k").all()
        assert len(dedup.snapshot("k")) < 30_000


def test_invalid_input_is_refused() -> None:
    dedup = Deduplicator(10)
    for capacity in (0, 1, 7):
        with pytest.raises(InvalidInputError, match="capacity must be even"):
            Deduplicator(capacity)
    for value in (-1, 1 << 63, "5", None, 1.0):
        with pytest.raises(InvalidInputError, match="an ID must be an integer"):
            dedup.save(value, "k")  # type: ignore[arg-type]
    for ids in ([-1], [1 << 63], ["5"], [[1]], [1.5]):
        with pytest.raises(InvalidInputError, match=r"integers? in \[0"):
            dedup.deduplicate_and_save(ids, "k")
    calls: tuple[Any, ...] = (dedup.is_duplicate, dedup.deduplicate_and_save)
    for key, (call, ids) in product(("", None, 5), zip(calls, (1, [1]), strict=True)):
        with pytest.raises(InvalidInputError, match="key must be a non-empty string"):
            call(ids, key)
    for take in (dedup.reconstruct, dedup.deduplicate_and_save):
        with pytest.raises(InvalidInputError, match="11 IDs exceed the capacity of 10"):
            take(range(11), "k")
    assert len(dedup) == 0


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign"])
def test_a_damaged_snapshot_restores_nothing(damage: str) -> None:
    dedup = Deduplicator(100)
    dedup.save_all(range(40), "k")
    data = dedup.snapshot("k")
    middle = len(data) // 2
    bad = {
        "cut": data[:-9],
        "flipped": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        "empty": b"",
        "foreign": b"x" * 100,
    }[damage]
    other = Deduplicator(100)
    other.save(99, "k")
    with pytest.raises(DamagedSnapshotError, match="not a complete snapshot"):
        other.restore(bad, "k")
    assert other.is_duplicate(99, "k")
    other.restore(data, "k")
    assert other.are_duplicates(range(40), "k").all()
    assert not other.is_duplicate(99, "k")


def test_the_ids_of_a_larger_capacity_are_forgotten_in_time() -> None:
    large, small = Deduplicator(100), Deduplicator(10)
    large.save_all(range(40), "k")
    small.restore(large.snapshot("k"), "k")
    for value in range(100, 110):
        small.save(value, "k")
    assert small.ids("k").tolist() == list(range(100, 110))


@pytest.mark.parametrize("seed", range(8))
def test_it_is_a_set(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(id_set, "_LEAST_GONE", rng.choice([0, 5, 4_096]))
    monkeypatch.setattr(id_set, "_MAX_PENDING", 7)
    monkeypatch.setattr(id_set, "_MAX_RECENT", 50)
    monkeypatch.setattr(id_set, "_BLOCK", 100)
    ids = RemovableIds()
    expected: dict[str, set[int]] = {"a": set(), "b": set()}
    base = rng.getrandbits(40) << 10

    def some() -> int:
        kind = rng.random()
        if kind < 0.4:
            return base + (rng.randrange(2_000) << 10)
        return base + rng.randrange(3_000) if kind < 0.7 else rng.getrandbits(63)

    for _ in range(120):
        key = rng.choice("ab")
        known = sorted(expected[key])
        batch = [some() for _ in range(rng.choice([1, 3, 200]))]
        if known and rng.random() < 0.6:
            batch += rng.choices(known, k=rng.choice([1, 50, 300]))
        action = rng.choice(["save", "save_all", "remove", "remove_all", "remove_all"])
        if action == "save":
            ids.save(batch[0], key)
            expected[key].add(batch[0])
        elif action == "save_all":
            ids.save_all(np.array(batch), key)
            expected[key].update(batch)
        elif action == "remove":
            ids.remove(batch[-1], key)
            expected[key].discard(batch[-1])
        else:
            ids.remove_all(np.array(batch), key)
            expected[key].difference_update(batch)
        asked = [*batch, *rng.choices(known or [0], k=20)]
        found = ids.are_duplicates(np.array(asked), key).tolist()
        assert found == [each in expected[key] for each in asked]
        assert [ids.is_duplicate(each, key) for each in asked] == found
        assert len(ids) == sum(map(len, expected.values()))
        assert ids._keys.keys() == {each for each, left in expected.items() if left}, "memory"
