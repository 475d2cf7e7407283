"""Tests of the translation of the client's exceptions, and of opening and using producers."""

from __future__ import annotations

import logging
from typing import Any

import pulsar
import pytest

from delaylevel.cluster.failures import (
    client_error,
    close_quietly,
    may_pass,
    result_name,
    translate_errors,
)
from delaylevel.cluster.publisher import OWN_SEQUENCE_SETTINGS, PRODUCER_SETTINGS, open_producer
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
        self.settings: dict[str, Any] = {}

    def create_producer(self, topic: str, **settings: Any) -> str:
        self.settings = settings
        if self.errors:
            raise self.errors.pop(0)
        return topic


class Core:
    """A fake producer that is closed already."""

    def close(self) -> None:
        raise pulsar.AlreadyClosed("closed")


@pytest.mark.parametrize(
    ("error", "name", "transient"),
    [
        (pulsar.TopicTerminated("over"), "TopicTerminated", False),
        (pulsar.ConnectError("away"), "ConnectError", True),
        (pulsar.AlreadyClosed("closed"), "AlreadyClosed", True),
        (pulsar.UnknownError("KeeperErrorCode = Session expired"), "UnknownError", True),
        (pulsar.Timeout("late"), "Timeout", True),
        (pulsar.AuthorizationError("no"), "AuthorizationError", False),
    ],
)
def test_an_error_keeps_its_text_and_its_name(error: Exception, name: str, transient: bool) -> None:
    with pytest.raises(ClientError) as raised, translate_errors():
        raise error
    assert isinstance(raised.value, BrokerError)
    assert str(raised.value) == str(error)
    assert (raised.value.name, raised.value.transient) == (name, transient)
    assert raised.value.__cause__ is error


def test_an_error_without_a_text_has_its_name() -> None:
    with pytest.raises(ClientError, match=r"^Timeout$"), translate_errors():
        raise pulsar.Timeout


def test_other_errors_are_not_translated() -> None:
    with pytest.raises(KeyError), translate_errors():
        raise KeyError("ours")


def test_a_result_has_the_same_name_as_the_error() -> None:
    assert result_name(pulsar.Result.TopicTerminated) == "TopicTerminated"


def test_closing_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        close_quietly(Core(), "producer")
    assert caplog.messages == ["closing a producer: AlreadyClosed"]


def test_a_producer_has_plain_bytes_and_no_name_by_default() -> None:
    client = Client()
    assert open_producer(client, TOPIC, PRODUCER_SETTINGS) == TOPIC
    assert isinstance(client.settings.pop("schema"), pulsar.schema.BytesSchema)
    assert client.settings == PRODUCER_SETTINGS | OWN_SEQUENCE_SETTINGS


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
