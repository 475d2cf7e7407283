"""Tests of durations and instants as text."""

from __future__ import annotations

from datetime import timedelta, timezone

import pytest

from delaylevel.model.formatting import (
    exact_duration,
    format_duration,
    format_instant,
    parse_iso,
)
from delaylevel.model.strategy import PartitionStrategy


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0, "0ms"),
        (999.4, "999ms"),
        (999.6, "1.0s"),
        (59_949, "59.9s"),
        (59_950, "1m00s"),
        (3_599_499, "59m59s"),
        (3_599_500, "1h00m"),
        (97_200_000, "1d03h"),
        (-65_000, "-1m05s"),
    ],
)
def test_format_durations(milliseconds: float, text: str) -> None:
    assert format_duration(milliseconds) == text


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0s"),
        (1, "1ms"),
        (250, "250ms"),
        (2000, "2s"),
        (90_000, "1m30s"),
        (5_400_000, "1h30m"),
        (3 * 86_400_000, "3d"),
        (86_400_000 + 3_600_000 + 60_000 + 1000 + 1, "1d1h1m1s1ms"),
        (-1500, "-1s500ms"),
    ],
)
def test_format_exact_durations(ms: int, text: str) -> None:
    assert exact_duration(ms) == text


def test_a_level_is_named_after_its_exact_unit() -> None:
    # The name is the suffix of the level topic.
    unit = timedelta(minutes=1, seconds=5, milliseconds=1)
    assert (
        PartitionStrategy(partition_by=unit, maximum_delay=timedelta(hours=1)).unit_name
        == "1m5s1ms"
    )


def test_format_instants() -> None:
    assert format_instant(1_772_355_600_007) == "2026-03-01T09:00:00.007Z"


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("2026-11-22T23:58:22Z", 0),
        ("2026-11-22T23:58:22.7Z", 700),
        ("2026-11-22T23:58:22.76", 760),
        ("2026-11-22T23:58:22.761+00:00", 761),
        ("2026-11-22T23:58:22.7614z", 761),
        ("2026-11-22T23:58:22.761999999Z", 761),
        ("2026-11-23T00:58:22.76+01:00", 760),
    ],
)
def test_times_with_any_number_of_decimals(text: str, ms: int) -> None:
    moment = parse_iso(text)
    assert moment.replace(tzinfo=moment.tzinfo or timezone.utc).timestamp() // 1 == 1795391902
    assert moment.microsecond // 1000 == ms


@pytest.mark.parametrize("text", ["", "now", "2026-11-22T23:58:22.", "22.5"])
def test_texts_that_are_no_times(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_iso(text)
