"""Tests of durations and instants as text."""

from __future__ import annotations

from datetime import datetime

import pytest

from delaylevel.model.clock import instant_ms
from delaylevel.model.formatting import exact_duration, format_duration, parse_iso


def test_durations_are_rounded_to_two_units() -> None:
    texts = {
        0: "0ms",
        999.4: "999ms",
        999.6: "1.0s",
        59_949: "59.9s",
        59_950: "1m00s",
        3_599_499: "59m59s",
        3_599_500: "1h00m",
        97_200_000: "1d03h",
        -65_000: "-1m05s",
    }
    assert {ms: format_duration(ms) for ms in texts} == texts


def test_exact_durations_have_every_unit_that_is_not_zero() -> None:
    """The names of level topics are made of them."""
    texts = {0: "0s", 1: "1ms", 5_400_000: "1h30m", 90_061_001: "1d1h1m1s1ms", -1500: "-1s500ms"}
    assert {ms: exact_duration(ms) for ms in texts} == texts


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("2026-11-22T23:58:22Z", 0),
        ("2026-11-22T23:58:22.7z", 700),
        ("2026-11-22T23:58:22.761999999+00:00", 761),
        ("2026-11-23T00:58:22.76+01:00", 760),
    ],
)
def test_times_with_any_number_of_decimals(text: str, ms: int) -> None:
    moment = parse_iso(text)
    assert moment.timestamp() // 1 == 1795391902
    assert moment.microsecond // 1000 == ms
    assert parse_iso("2026-11-22T23:58:22.7").tzinfo is None


@pytest.mark.parametrize("text", ["", "now", "2026-11-22T23:58:22.", "22.5"])
def test_texts_that_are_no_times(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_iso(text)


def test_naive_instants_are_refused() -> None:
    with pytest.raises(ValueError, match="2026-03-01T00:00:00 has no time zone"):
        instant_ms(datetime(2026, 3, 1))
