"""Tests of results and errors of the client, and of a process that ends with open producers."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pulsar
import pulsar.asyncio
import pytest

from delaylevel import Receipt, errors
from delaylevel.producer import client_calls
from delaylevel.producer.aio import asyncio_errors
from delaylevel.producer.client_calls import client_errors, error_of, is_transient, result_of
from delaylevel.producer.receipts import explained

VALUES = {"name": "Timeout", "transient": True, "status": 404, "entries": 5, "reasons": {"a": 1}}


def kinds(root: type[BaseException]) -> Iterator[type[BaseException]]:
    for kind in root.__subclasses__():
        # Without their twins, of which there may be some already.
        if not issubclass(kind, pulsar.PulsarException):
            yield kind
            yield from kinds(kind)


def made(kind: Any) -> Any:
    """Return an error of a kind with all of its attributes."""
    parameters = list(inspect.signature(kind.__init__).parameters)
    names = [name for name in parameters if name not in ("self", "message", "args", "kwargs")]
    return kind("the text", **{name: VALUES.get(name, "x") for name in names})


@pytest.mark.parametrize("kind", [errors.BrokerError, *kinds(errors.BrokerError)])
def test_every_error_about_the_broker_is_an_exception_of_the_client(kind: Any) -> None:
    plain = made(kind)
    attributes = dict(plain.__dict__)
    for handled in (kind, pulsar.PulsarException, pulsar.asyncio.PulsarException):
        with pytest.raises(handled) as raised, client_errors():
            raise plain
        assert raised.value is plain
    assert (str(plain), type(plain).__name__) == ("the text", kind.__name__)
    assert isinstance(plain.error(), pulsar.Result)
    assert {name: getattr(plain, name) for name in attributes} == attributes
    for twin in (pickle.loads(pickle.dumps(plain)), copy.copy(plain)):
        assert type(twin) is kind
        assert (twin.args, twin.__dict__) == (plain.args, attributes)
        with pytest.raises(pulsar.PulsarException), client_errors():
            raise twin
        assert twin.error() == plain.error()


@pytest.mark.parametrize("error", [errors.InvalidDelayError("x"), ValueError("x"), KeyError("x")])
def test_other_errors_stay_as_they_are(error: Exception) -> None:
    kind = type(error)
    for boundary in (client_errors, asyncio_errors):
        with pytest.raises(kind) as raised, boundary():
            raise error
        assert type(raised.value) is kind


def test_exceptions_of_the_synchronous_client_become_those_of_asyncio() -> None:
    expected = pytest.raises(pulsar.asyncio.PulsarException, match="no such topic")
    with expected as raised, asyncio_errors():
        raise pulsar.TopicNotFound("no such topic")
    assert raised.value.error() == pulsar.Result.TopicNotFound
    assert isinstance(raised.value.__cause__, pulsar.TopicNotFound)
    own = pulsar.asyncio.PulsarException(pulsar.Result.Timeout)
    with pytest.raises(pulsar.asyncio.PulsarException) as raised, asyncio_errors():
        raise own
    assert raised.value is own


def test_a_result_and_its_exception_stand_for_each_other() -> None:
    for name, result in pulsar.Result.__members__.items():
        if name == "Ok":
            continue
        error = error_of(result)
        assert isinstance(error, pulsar.PulsarException)
        if hasattr(pulsar, name):  # the client has no exception for a few results
            assert (type(error), result_of(error)) == (getattr(pulsar, name), result)
        assert name in str(error)


def test_trouble_with_the_broker_passes_and_refusals_stay() -> None:
    passing = {"ConnectError", "NotConnected", "Timeout", "ServiceUnitNotReady", "LookupError"}
    refused = {
        *("AuthorizationError", "TopicNotFound", "TopicTerminated", "ProducerBusy"),
        *("ProducerBlockedQuotaExceededError", "NotAllowedError", "AlreadyClosed", "Interrupted"),
    }
    members = pulsar.Result.__members__
    assert {name for name in passing | refused if is_transient(members[name])} == passing


@pytest.mark.parametrize("name", ["Timeout", "AlreadyClosed", "ConnectError", "NotConnected"])
def test_an_unknown_result_of_a_cancellation_is_not_called_a_refusal(name: str) -> None:
    result, receipt = getattr(pulsar.Result, name), Receipt("old", 1, "orders", "levels")
    plain = getattr(pulsar, name)(f"Pulsar error: {name}")
    for error in (plain, pulsar.asyncio.PulsarException(result, "text")):
        expected = pytest.raises(errors.CancellationFailedError)
        with expected as caught, client_errors(), explained(receipt, None):
            raise error
        found: Any = caught.value
        assert isinstance(found, type(plain))
        assert isinstance(found, pulsar.asyncio.PulsarException)
        assert "the cancellation of message 'old' was not confirmed" in str(found)
        assert "twice does no harm" in str(found)
        assert (found.error(), found.transient, found.receipt) == (result, True, "")
        assert found.__cause__ is error


class Work:
    """Messages of a producer that are stored at some time, or when it is closed."""

    def __init__(self, clock: list[float], until_s: float) -> None:
        self.clock, self.until_s, self.closed = clock, until_s, False

    def is_outstanding(self) -> bool:
        return self.clock[0] < self.until_s

    def closes(self) -> list[Callable[[Any], None]]:
        return [self._close]

    def _close(self, done: Any) -> None:
        self.closed, self.until_s = True, 0.0


@pytest.mark.parametrize(("until_s", "closed"), [(1.0, False), (math.inf, True)])
def test_the_exit_waits_for_work_and_lets_the_last_callback_end(
    monkeypatch: pytest.MonkeyPatch, until_s: float, closed: bool
) -> None:
    """The process aborts if Python shuts down while the client's thread runs Python code."""
    clock, pauses = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        pauses.append(seconds)

    monkeypatch.setattr(client_calls.time, "sleep", sleep)
    monkeypatch.setattr(client_calls.time, "monotonic", lambda: clock[0])
    end, work = client_calls.Exit(), Work(clock, until_s)
    end.works.add(work)
    end.close(work)
    end.finish()
    assert (work.closed, work.is_outstanding()) == (closed, False)
    pauses.clear()
    client_calls.Exit().finish()
    assert pauses == [], "no producer, no callback"
    end.finish()
    assert [pause > 0.01 for pause in pauses] == [True], "the way out of a callback"
