"""Tests of the deduplication option, the IDs of messages, and the claims on them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from delaylevel.consumer import Deduplication, HandledIds, InvalidIdError, TopicIdStore
from delaylevel.consumer.handled_ids import key_of
from delaylevel.consumer.retry import Verdict
from delaylevel.model.topic_name import TopicName
from delaylevel.testing import MemoryPulsar


def message(id_: str = "a", **values: Any) -> Any:
    """Return a received message, as far as deduplication looks at it."""
    return SimpleNamespace(id=id_, identity=id_, **values)


def opened(**options: Any) -> HandledIds:
    return Deduplication(**options).open(None, "orders", "billing")


def handle(handled: HandledIds, each: Any) -> bool:
    """Handle a message with success; return False if it was handled before."""
    verdict = handled.begin(each)
    if verdict is Verdict.HANDLE:
        handled.save(each, lambda: None)
    return verdict is Verdict.HANDLE


# -- IDs


def test_texts_and_integers_are_different_ids() -> None:
    class Name(str):
        __slots__ = ()

    values = ["5", 5, -5, "-5", "\ud800", -(1 << 63), (1 << 63) - 1]
    assert len({key_of(value) for value in values}) == len(values)
    assert key_of(np.int64(7)) == 7
    assert key_of(Name("x")) == key_of("x")
    # Stored in files and topics: it must not change.
    assert key_of("order-4711") == 2685631818634700321


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "was None"),
        (1.0, r"was 1.0 \(float\)"),
        (b"x", r"was b'x' \(bytes\)"),
        ("", "was an empty text"),
        (True, r"was True \(bool\)"),
        (1 << 63, "does not fit into 64 bits"),
        (-(1 << 63) - 1, "does not fit into 64 bits"),
    ],
)
def test_a_wrong_id_is_an_error_and_leaves_no_claim(value: Any, text: str) -> None:
    handled = opened(by=lambda each: each.given)
    wrong = message(given=value)
    with pytest.raises(InvalidIdError, match=rf"lambda.*{text}"):
        handled.begin(wrong)
    handled.release(wrong)
    assert len(handled) == 0
    assert handle(handled, message(given=1))


# -- handled messages


def test_a_message_is_handled_once_and_a_failed_one_again() -> None:
    handled = opened()
    first, other = message("a"), message("a")
    assert handled.begin(first) is Verdict.HANDLE
    handled.release(other)  # it has no claim
    assert handled.begin(other) is Verdict.WAIT
    assert handle(handled, message("b"))
    assert not handle(handled, message("b"))
    failing = message("c")
    assert handled.begin(failing) is Verdict.HANDLE
    handled.release(failing)
    assert handle(handled, message("c"))
    assert not handle(handled, message("c"))
    assert (len(handled), handled.unsaved) == (2, 0)
    assert handled.flush()
    handled.close()


def test_the_second_message_waits_for_the_first() -> None:
    handled = opened()
    first, second = message(), message()
    assert handled.begin(first) is Verdict.HANDLE
    assert handled.begin(second) is Verdict.WAIT
    handled.release(first)
    assert handled.begin(second) is Verdict.HANDLE
    assert handled.begin(first) is Verdict.WAIT
    handled.save(second, lambda: None)
    assert handled.begin(first) is Verdict.DUPLICATE


def test_ids_that_a_topic_refuses_are_kept_as_far_as_they_are_remembered() -> None:
    with MemoryPulsar() as memory:
        store = Deduplication(capacity=4, store=TopicIdStore())
        handled = store.open(memory.client(), "orders", "billing")
        memory.admin.terminate(TopicName.parse("orders-billing-handled").partition(0))
        assert all(handle(handled, message(str(number))) for number in range(9))
        assert handled.unsaved == 4
