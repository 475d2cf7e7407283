"""Tests of the delays between attempts."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from delaylevel.consumer import Backoff
from delaylevel.errors import InvalidInputError

SECOND = timedelta(seconds=1)


@pytest.mark.parametrize(("number", "seconds"), [(0.0, 9), (0.5, 10), (1.0, 11)])
def test_jitter_makes_a_delay_shorter_or_longer(number: float, seconds: int) -> None:
    assert Backoff("10s", jitter=0.1).delay(1, lambda: number) == seconds * SECOND


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (("soon",), {}, "is no duration"),
        ((10,), {}, "is a timedelta or a text"),
        ((timedelta(-1),), {}, "is negative"),
        (("1s",), {"jitter": 2}, "jitter is a number from 0 to 1"),
        (("1s",), {"retry_on": "ValueError"}, "retry_on has classes of exceptions"),
        (("1s",), {"give_up_on": (ValueError, int)}, "give_up_on has classes of exceptions"),
        (("1s",) * 10_000, {}, "at most 10000 attempts"),
    ],
)
def test_invalid_delays_are_refused(
    arguments: tuple[Any, ...], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidInputError, match=said):
        Backoff(*arguments, **options)
