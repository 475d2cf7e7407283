"""Helpers that the tests of topic ids share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from delaylevel.consumer import HandledIds
from delaylevel.consumer.retry import Verdict


def message(number: object) -> Any:
    return SimpleNamespace(id=f"m-{number}", identity=f"m-{number}")


def save(handled: HandledIds, *numbers: object) -> None:
    """Save IDs without waiting for each, then wait for all."""
    for number in numbers:
        save_one(handled, number, lambda: None)
    assert handled.flush()


def save_one(
    handled: HandledIds, number: object, saved: Callable[[], object] | None = None
) -> None:
    """Save an ID; without a function for it, wait until the broker has confirmed it."""
    each, event = message(number), threading.Event()
    assert handled.begin(each) is Verdict.HANDLE
    handled.save(each, saved or event.set)
    assert saved or event.wait(60)


def known(handled: HandledIds, *numbers: object) -> list[bool]:
    """Return which IDs are those of handled messages."""
    found = []
    for each in map(message, numbers):
        found.append(handled.begin(each) is Verdict.DUPLICATE)
        handled.release(each)
    return found
