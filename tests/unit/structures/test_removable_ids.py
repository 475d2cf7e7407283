"""Tests of sets of IDs from which IDs can be removed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from delaylevel.structures import id_set
from delaylevel.structures.id_set import RemovableIds


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
