"""Helpers that the tests of topic ids share."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from delaylevel.consumer import HandledIds


def message(number: object) -> Any:
    return SimpleNamespace(id=f"m-{number}", identity=f"m-{number}")


def save(handled: HandledIds, *numbers: object) -> None:
    """Save IDs without waiting for each, then wait for all."""
    for number in numbers:
        each = message(number)
        assert handled.begin(each)
        handled.save(each, lambda: None)
    assert handled.flush()


def save_one(handled: HandledIds, number: object) -> None:
    """Save an ID, and wait until the broker has confirmed it."""
    each, saved = message(number), threading.Event()
    handled.save(each, saved.set)
    assert saved.wait(60)


def known(handled: HandledIds, *numbers: object) -> list[bool]:
    return [handled.contains(message(number)) for number in numbers]
