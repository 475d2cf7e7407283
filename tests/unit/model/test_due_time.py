"""Tests of due times: valid values, and a remedy for each invalid value.

Whole numbers of milliseconds are in the vectors of the wire format.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone, tzinfo
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaylevel.errors import InvalidDelayError
from delaylevel.model.due_time import LATEST_DUE_MS, due_time_ms
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
        (LATEST_DUE_MS + 1, None, "beyond the year 9999.*micro- or nanoseconds"),
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
