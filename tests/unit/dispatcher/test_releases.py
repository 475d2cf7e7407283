"""Tests of the release times of the last messages."""

from __future__ import annotations

from delaylevel.dispatcher.cancellations import RecentReleases
from delaylevel.dispatcher.positions import IdColumns


def release(times: RecentReleases, at_ms: int, *ids: int, key: str = "k") -> None:
    times.add(IdColumns.of([(key, number) for number in ids]), at_ms)


def test_the_last_release_of_each_message_is_known() -> None:
    times = RecentReleases(most=10_000)
    for number in range(3_000):
        release(times, number, 2 * number, 2 * number + 1, key=f"k{number % 3}")
    release(times, 9_999, 0, key="k0")
    wanted = [("k0", 0), ("k0", 1), ("k1", 2), ("k2", 2), ("k2", 5_999)]
    found = times.times_of(wanted)
    assert found == {("k0", 0): 9_999, ("k0", 1): 0, ("k1", 2): 1, ("k2", 5_999): 2_999}


def test_at_least_the_given_number_is_known() -> None:
    times = RecentReleases(most=2_500)
    for number in range(10_000):
        release(times, number, number)
    known = [number for number in range(5_000, 10_000) if times.times_of([("k", number)])]
    assert known == list(range(known[0], 10_000))
    assert known[0] > 5_000
    assert 2_500 <= len(known) <= 2_500 + 2_000
