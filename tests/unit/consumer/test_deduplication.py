"""Tests of the deduplication option, the IDs of messages, and the claims on them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from delaylevel.consumer import Deduplication, HandledIds, InvalidIdError
from delaylevel.consumer.handled_ids import key_of


def message(id_: str = "a", **values: Any) -> Any:
    """Return a received message, as far as deduplication looks at it."""
    return SimpleNamespace(id=id_, identity=id_, **values)


def opened(**options: Any) -> HandledIds:
    return Deduplication(**options).open(None, "orders", "billing")


def handle(handled: HandledIds, each: Any) -> bool:
    """Handle a message with success; return False if it was handled before."""
    assert handled.begin(each)
    if handled.contains(each):
        handled.release(each)
        return False
    handled.save(each, lambda: None)
    return True


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
    calls = (handled.begin, handled.contains, lambda each: handled.save(each, pytest.fail))
    for call in calls:
        with pytest.raises(InvalidIdError, match=text) as caught:
            call(wrong)
        assert "lambda" in str(caught.value)
    handled.release(wrong)
    assert len(handled) == 0
    assert handle(handled, message(given=1))


# -- handled messages


def test_a_message_is_handled_once_and_a_failed_one_again() -> None:
    handled = opened()
    assert handled.begin(message("a"))
    first = message("a")
    handled.release(first)  # it has no claim
    assert handle(handled, message("b"))
    assert not handle(handled, message("b"))
    failing = message("c")
    assert handled.begin(failing)
    handled.release(failing)
    assert handle(handled, message("c"))
    assert handled.contains(message("c"))
    assert not handled.contains(message("a"))
    assert (len(handled), handled.unsaved) == (2, 0)
    assert handled.flush()
    handled.close()


def test_the_second_message_waits_for_the_first() -> None:
    handled = opened()
    first, second = message(), message()
    ended: list[str] = []
    assert handled.begin(first)
    assert not handled.begin(second)
    assert not handled.begin(second, lambda: ended.append("once"))
    handled.release(first)
    assert ended == ["once"]
    assert handled.begin(second, lambda: ended.append("never"))
    assert not handled.contains(second)
    assert not handled.begin(first, lambda: ended.append("twice"))
    handled.save(second, lambda: ended.append("saved"))
    assert ended == ["once", "twice", "saved"]
    assert handled.begin(first)
    assert handled.contains(first)
