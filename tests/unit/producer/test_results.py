"""Tests of the client's results: exceptions for them, and failures that may pass."""

from __future__ import annotations

import pulsar
import pytest

from delaylevel.producer.client_calls import error_of, is_transient, result_of

Result = pulsar.Result
FAILURES = [result for name, result in Result.__members__.items() if name != "Ok"]


@pytest.mark.parametrize("result", FAILURES, ids=lambda result: result.name)
def test_a_result_and_its_exception_stand_for_each_other(result: pulsar.Result) -> None:
    error = error_of(result)
    assert isinstance(error, pulsar.PulsarException)
    if hasattr(pulsar, result.name):  # the client has no exception for a few results
        assert type(error) is getattr(pulsar, result.name)
        assert result_of(error) == result
    assert result.name in str(error)


def test_trouble_with_the_broker_passes_and_refusals_stay() -> None:
    passing = ("ConnectError", "NotConnected", "Timeout", "ServiceUnitNotReady", "LookupError")
    refused = (
        *("AuthorizationError", "TopicNotFound", "TopicTerminated", "ProducerBusy"),
        *("ProducerBlockedQuotaExceededError", "NotAllowedError", "AlreadyClosed", "Interrupted"),
    )
    members = Result.__members__
    assert all(is_transient(members[name]) for name in passing)
    assert not any(is_transient(members[name]) for name in refused)
