"""Tests of warnings about lasting failures: few lines, and one at the end."""

from __future__ import annotations

import logging

import pytest

from delaylevel.cluster.logs import RepeatedWarning

log = logging.getLogger(__name__)


class Failing:
    """A warning with a clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self.warning = RepeatedWarning(log, "orders", lambda: self.now_s)

    def fail(self, seconds: int, reason: str = "no broker answers") -> None:
        """Fail once a second."""
        for _ in range(seconds):
            self.warning.failed(reason)
            self.now_s += 1


def test_a_lasting_failure_is_logged_at_growing_intervals(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = Failing()
    failing.fail(1500)
    failing.warning.over()
    failing.warning.over()
    assert caplog.messages == [
        "orders: no broker answers",
        "orders: no broker answers (failure 11 in 10.0s)",
        "orders: no broker answers (failure 71 in 1m10s)",
        "orders: no broker answers (failure 671 in 11m10s)",
        "orders: no broker answers (failure 1271 in 21m10s)",
        "orders: works again after 25m00s (failures: 1500)",
    ]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_a_failure_that_comes_and_goes_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = Failing()
    for _ in range(720):  # an hour
        failing.fail(2)
        failing.warning.over()
        failing.now_s += 3
    begun, ended = caplog.messages[::2], caplog.messages[1::2]
    assert all("no broker answers" in line for line in begun)
    assert all("works again" in line for line in ended)
    assert len(begun) == len(ended) <= 3600 / 10
