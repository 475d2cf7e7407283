"""Tests of the result of the demonstration, which a night test runs on a broker."""

from __future__ import annotations

import pytest

pytest.importorskip("pyroaring")

from delaylevel.demo import Demonstration


@pytest.mark.parametrize(
    ("seen", "changed", "late_ms", "what"),
    [
        ([0, 1], set(), [5, 9], None),
        ([0], set(), [5], "lost"),
        ([0, 1, 1], set(), [5, 9, 9], "duplicated"),
        ([0, 1], set(), [-1, 9], "early"),
        ([0, 1], {1}, [5, 9], "changed"),
    ],
)
def test_all_is_well_only_if_every_message_came_once_unchanged_and_on_time(
    seen: list[int], changed: set[int], late_ms: list[int], what: str | None
) -> None:
    demo = Demonstration(2, changed=changed, late_ms=late_ms)
    demo.seen.update(seen)
    counts = {"lost": demo.lost, "duplicated": demo.duplicated, "early": demo.early}
    found = [name for name, count in {**counts, "changed": len(demo.changed)}.items() if count]
    assert (found, demo.ok) == ([what] if what else [], what is None)
    assert demo.late_at(1.0) == max(late_ms)
