"""Tests of due times, and of durations and instants as text.

Whole numbers of milliseconds are in the vectors of the wire format.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone, tzinfo
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.errors import InvalidDelayError
from delaylevel.model.clock import instant_ms
from delaylevel.model.due_time import LATEST_DUE_MS, due_time_ms, named_due_ms
from delaylevel.model.formatting import exact_duration, format_duration, parse_iso
from support.seeds import examples

T0 = 1_800_000_000_000
UTC = timezone.utc


class Nowhere(tzinfo):
    """A time zone without an offset, equivalent to none."""

    def utcoffset(self, dt: datetime | None) -> None:
        return None


@pytest.mark.parametrize(
    ("deliver_at", "deliver_after", "due"),
    [
        (0, None, None),
        (None, timedelta(0), None),
        (100_000_000_000, None, 100_000_000_000),
        (LATEST_DUE_MS, None, LATEST_DUE_MS),
        (datetime(2027, 1, 15, 8, 0, 0, 1, tzinfo=UTC), None, T0 + 1),
        (datetime(2027, 1, 15, 10, tzinfo=timezone(timedelta(hours=2))), None, T0),
        (None, timedelta(microseconds=1), T0 + 1),
        (None, timedelta(milliseconds=1), T0 + 1),
    ],
)
def test_valid_values_give_a_due_time(deliver_at: Any, deliver_after: Any, due: int | None) -> None:
    assert due_time_ms(deliver_at, deliver_after, T0) == due


@pytest.mark.parametrize(
    ("deliver_at", "deliver_after", "said"),
    [
        (T0, timedelta(days=1), f"{T0}.*days=1.*give one of them"),
        (-1, None, "deliver_at=-1.*before 1970"),
        (datetime.min.replace(tzinfo=timezone(timedelta(hours=14))), None, "before 1970"),
        (None, timedelta(microseconds=-1), "deliver_after is negative.*zero or more"),
        (None, timedelta.min, "negative"),
        (99_999_999_999, None, "99999999999.*1973.*multiply seconds by 1000"),
        (LATEST_DUE_MS + 1, None, "beyond the year 9999.*milliseconds"),
        (10**400, None, "beyond the year 9999"),
        (None, timedelta.max, "deliver_after.*beyond the year 9999"),
        (datetime.max.replace(tzinfo=timezone(timedelta(hours=-14))), None, "beyond the year"),
        (datetime(2027, 1, 15, 8), None, r"naive.*2027-01-15T08:00:00.*timezone.utc"),
        (datetime(2027, 1, 15, tzinfo=Nowhere()), None, "naive.*time zone"),
        (float(T0), None, "milliseconds.*aware datetime, not float"),
        (True, None, "not bool"),
        (timedelta(days=1), None, "not timedelta"),
        (None, 60, r"not int.*60.*timedelta\(seconds=…\)"),
        (None, "3 days", "not str.*'3 days'"),
    ],
)
def test_invalid_values_are_refused_with_a_remedy(
    deliver_at: Any, deliver_after: Any, said: str
) -> None:
    with pytest.raises(InvalidDelayError, match=f"(?s){said}.*he message was not sent"):
        due_time_ms(deliver_at, deliver_after, T0)


@pytest.mark.parametrize("due_ms", [1, 5_000, 99_999_999_999])
def test_every_time_is_a_due_time_for_a_clock_that_begins_in_1970(due_ms: int) -> None:
    assert due_time_ms(due_ms, None, now_ms=5_000) == due_ms
    with pytest.raises(InvalidDelayError, match="multiply seconds by 1000"):
        named_due_ms(due_ms)
    assert named_due_ms(T0) == T0


@examples(60)
@given(
    st.none() | st.integers() | st.datetimes(timezones=st.none() | st.timezones()) | st.floats(),
    st.none() | st.timedeltas() | st.floats(),
)
def test_any_value_gives_a_due_time_or_one_kind_of_error(at: Any, after: Any) -> None:
    try:
        due = due_time_ms(at, after, T0)
    except InvalidDelayError:
        return
    assert due is None or 0 < due <= LATEST_DUE_MS
    assert due is None or after is None or due > T0


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
