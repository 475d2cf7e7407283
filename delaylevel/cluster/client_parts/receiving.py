"""Cores of readers, consumers and received messages.

Objects of an application that have no core stand for themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def read_next_of(reader: Any) -> Callable[[int], Any]:
    """Return the function that reads a message of the core: it takes a timeout in ms."""
    read: Callable[[int], Any] = getattr(reader, "_reader", reader).read_next
    return read


def consumer_core(consumer: Any) -> Any:
    """Return the object with the methods of a consumer that take messages of the core."""
    return getattr(consumer, "_consumer", consumer)


def message_core(message: Any) -> Any:
    """Return the message of the core."""
    return getattr(message, "_message", message)
