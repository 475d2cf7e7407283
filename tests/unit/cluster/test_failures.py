"""Tests of the translation of the client's exceptions, and of what is logged."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pulsar
import pytest

from delaylevel.cluster.failures import client_error, may_pass
from delaylevel.cluster.logs import RepeatedWarning
from delaylevel.errors import (
    AdminError,
    BrokerError,
    BrokerUnreachableError,
    LevelTopicError,
    NotFoundError,
)


def caused(error: Exception, cause: Exception) -> Exception:
    """Return an error with its cause."""
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (caused(BrokerUnreachableError("away"), ConnectionRefusedError()), True),
        (BrokerError("not confirmed"), True),
        (AdminError("Session expired", status=500), True),
        (AdminError("moving", status=503), True),
        (AdminError("in a circle", status=307), True),
        (AdminError("too many", status=406), False),
        (NotFoundError("gone", status=404), False),
        (LevelTopicError("deleted"), False),
        (client_error("UnknownError"), True),
        (client_error("TopicTerminated"), False),
        (caused(BrokerError("x"), client_error("Timeout")), True),
        (caused(BrokerError("x"), client_error("ProducerBlockedQuotaExceededException")), False),
        (caused(BrokerError("x"), pulsar.ConnectError()), True),
        (caused(BrokerError("x"), pulsar.AuthorizationError()), False),
        (ValueError("a bug"), False),
    ],
)
def test_a_refusal_does_not_pass(error: Exception, passes: bool) -> None:
    assert may_pass(error) is passes


CLOSED = b"Closing Pulsar client"
PROGRAM = """
import pulsar, sys
from delaylevel.cluster import logs
pulsar.Client("pulsar://127.0.0.1:1", logger=logs.{}).close()
print("ours", file=sys.stderr)
"""


def run(logger: str, **streams: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", PROGRAM.format(logger)], check=True, **streams)


def test_output_in_a_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "errors"
    with path.open("wb") as errors:
        run("to_stderr(pulsar.LoggerLevel.Info)", stderr=errors)
    first, *_, last = path.read_bytes().splitlines()
    assert (CLOSED in first, last) == (True, b"ours")


def test_a_socket_as_of_the_journal_receives_the_log() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        run("to_stderr(pulsar.LoggerLevel.Info)", stderr=theirs)
        theirs.close()
        assert CLOSED in ours.makefile("rb").read()


def test_a_silent_client_writes_nothing() -> None:
    done = run("silent()", capture_output=True)
    assert (done.stdout, done.stderr) == (b"", b"ours\n")


class Failing:
    """A warning about what fails once a second."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self.warning = RepeatedWarning(logging.getLogger(__name__), "orders", lambda: self.now_s)

    def fail(self, seconds: int, reason: str = "no broker answers") -> None:
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
    times = ((11, "10.0s"), (31, "30.0s"), (71, "1m10s"), (151, "2m30s"), (311, "5m10s"))
    times += ((631, "10m30s"), (1231, "20m30s"))
    assert caplog.messages == [
        "orders: no broker answers",
        *(f"orders: no broker answers (failure {count} in {time})" for count, time in times),
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


def test_another_reason_is_logged_after_a_moment(caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing()
    failing.fail(300)
    caplog.clear()
    for number in range(20):
        failing.fail(1, f"port {number} is refused")
    assert caplog.messages == [
        "orders: port 0 is refused (failure 301 in 5m00s)",
        "orders: port 10 is refused (failure 311 in 5m10s)",
    ]
