"""Tests of the decision about one message."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from delaylevel.consumer import Backoff, ReceivedMessage, Reject, Retry
from delaylevel.consumer.retry import Bury, Handling, Park, Verdict
from delaylevel.errors import InvalidInputError


class Raw:
    """A message of the client with the given properties."""

    def __init__(self, properties: dict[str, str]) -> None:
        self._properties = properties

    def properties(self) -> dict[str, str]:
        return self._properties

    def topic_name(self) -> str:
        return "persistent://public/default/orders-billing-RETRY"


def received(failed: int = 0, own_id: str = "a") -> ReceivedMessage:
    properties = {"RECONSUMETIMES": str(failed), "delaylevel-retry-id": own_id}
    properties |= {"REAL_TOPIC": "persistent://public/default/orders"}
    properties |= {"REAL_SUBSCRIPTION": "billing"}
    return ReceivedMessage(Raw(properties), "persistent://public/default/orders", "billing", 0)


class Handled:
    """IDs of handled messages in sets."""

    def __init__(self) -> None:
        self.saved: set[str] = set()
        self.reserved: set[str] = set()

    def begin(self, message: ReceivedMessage, ended: Any = None) -> bool:
        if message.id in self.reserved:
            return False
        self.reserved.add(message.id)
        return True

    def contains(self, message: ReceivedMessage) -> bool:
        return message.id in self.saved

    def save(self, message: ReceivedMessage, saved: Any = None) -> None:
        self.saved.add(message.id)
        self.release(message)
        saved()

    def release(self, message: ReceivedMessage) -> None:
        self.reserved.discard(message.id)

    def flush(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        pass


def raised(error: BaseException) -> BaseException:
    """Return an exception with a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


def test_every_message_is_handled_by_default() -> None:
    handling = Handling(Backoff("1s"))
    assert handling.begin(received()) is Verdict.HANDLE
    assert handling.handles_all


def test_the_filter_leaves_messages_out() -> None:
    handling = Handling(None, lambda message: message.id == "a")
    assert handling.begin(received(own_id="a")) is Verdict.HANDLE
    assert handling.begin(received(own_id="b")) is Verdict.FILTERED
    assert not handling.handles_all


def test_a_failure_waits_for_its_delay_and_the_last_one_is_final() -> None:
    handling = Handling(Backoff("10s", "5m"))
    error = raised(ValueError("no such\n account"))
    assert handling.failed(received(0), error) == Park(
        timedelta(seconds=10), (error, "ValueError: no such account", "")
    )
    assert isinstance(handling.failed(received(1), error), Park)
    buried = handling.failed(received(2), error)
    assert isinstance(buried, Bury)
    assert buried.failure.reason == "ValueError: no such account"
    assert "Traceback" in buried.failure.trace


def test_without_retry_the_first_failure_is_final() -> None:
    assert isinstance(Handling(None).failed(received(), ValueError()), Bury)


def test_an_error_to_give_up_on_is_final() -> None:
    handling = Handling(Backoff("1s", give_up_on=KeyError))
    assert isinstance(handling.failed(received(), KeyError()), Bury)


def test_a_rejected_message_is_buried_at_once() -> None:
    decision = Handling(Backoff("1s")).failed(received(), Reject("no such customer"))
    assert isinstance(decision, Bury)
    assert decision.failure.reason == "no such customer"


def test_a_handler_chooses_the_delay() -> None:
    handling = Handling(Backoff("1s", retry_on=KeyError))
    decision = handling.failed(received(), Retry("15m", "closed"))
    assert isinstance(decision, Park)
    assert decision.delay == timedelta(minutes=15)
    assert decision.failure.reason == "closed"
    ordinary = handling.failed(received(), Retry())
    assert isinstance(ordinary, Park)
    assert ordinary.delay == timedelta(seconds=1)


def test_a_chosen_delay_counts_as_an_attempt() -> None:
    assert isinstance(Handling(Backoff("1s")).failed(received(1), Retry("1h")), Bury)


def test_retry_without_delays_says_that_it_has_no_effect() -> None:
    decision = Handling(None).failed(received(), Retry("1h"))
    assert isinstance(decision, Bury)
    assert "retry=False" in decision.failure.reason


@pytest.mark.parametrize("after", ["soon", -1, timedelta(-1)])
def test_a_wrong_delay_is_refused_where_it_is_raised(after: Any) -> None:
    with pytest.raises(InvalidInputError, match="after"):
        Retry(after)


def test_a_system_exit_is_a_failed_attempt() -> None:
    decision = Handling(Backoff("1s")).failed(received(), raised(SystemExit(1)))
    assert isinstance(decision, Park)
    assert decision.failure.reason == "SystemExit: 1"


def test_a_broken_exception_is_still_described() -> None:
    class BrokenError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("broken")

    decision = Handling(None).failed(received(), raised(BrokenError()))
    assert decision.failure.reason.startswith("BrokenError")


def test_a_long_reason_is_one_short_line() -> None:
    decision = Handling(None).failed(received(), ValueError("x\n" * 5000))
    assert len(decision.failure.reason) == 1000
    assert "\n" not in decision.failure.reason


def test_only_success_makes_a_duplicate() -> None:
    handling = Handling(Backoff("1s"), handled=Handled())
    message = received()
    assert handling.begin(message) is Verdict.HANDLE
    handling.failed(message, ValueError())
    assert handling.begin(message) is Verdict.HANDLE
    acknowledged: list[str] = []
    handling.succeeded(message, lambda: acknowledged.append(message.id))
    assert acknowledged == ["a"]
    assert handling.begin(message) is Verdict.DUPLICATE
    assert handling.begin(message) is Verdict.DUPLICATE


def test_the_same_id_is_not_handled_twice_at_once() -> None:
    handling = Handling(Backoff("1s"), handled=Handled())
    assert handling.begin(received()) is Verdict.HANDLE
    assert handling.begin(received()) is Verdict.WAIT
    handling.release(received())
    assert handling.begin(received()) is Verdict.HANDLE
