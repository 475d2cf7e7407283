"""Tests of the translation of the client's exceptions."""

from __future__ import annotations

import pulsar
import pytest

from delaylevel.cluster.failures import client_error, may_pass
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
