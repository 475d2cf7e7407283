"""Tests of the translation of the client's exceptions, and of opening and using producers."""

from __future__ import annotations

from typing import Any

import pulsar
import pytest

from delaylevel.cluster.failures import client_error, may_pass
from delaylevel.cluster.publisher import open_producer
from delaylevel.errors import (
    AdminError,
    BrokerError,
    BrokerUnreachableError,
    ClientError,
    LevelTopicError,
    NotFoundError,
)

TOPIC = "persistent://public/default/orders"


class Client:
    """A fake client that raises one given error for each call, and then creates a producer."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def create_producer(self, topic: str, **_: Any) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return topic


def test_a_producer_name_in_use_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    busy = [pulsar.ProducerBusy("taken")] * 2
    assert open_producer(Client(*busy), TOPIC, {}, name="me") == TOPIC
    assert pauses == [0.1, 0.1]
    for name in ("me", None):
        with pytest.raises(ClientError) as raised:
            open_producer(Client(*busy), TOPIC, {}, name=name, patience_s=-1.0)
        assert raised.value.name == "ProducerBusy"
    assert len(pauses) == 2


def caused(error: Exception, cause: Exception) -> Exception:
    """Return an error with its cause."""
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (BrokerUnreachableError("away"), True),
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
