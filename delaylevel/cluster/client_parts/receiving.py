"""Cores of readers, consumers and received messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .parts import ClientPart, has, require

_SCHEMA_BYTES = 8


def read_next_of(reader: Any) -> Callable[[int], Any]:
    """Return the fastest function that reads a message: it takes a timeout in ms.

    The message is one of the client's core, or has the same methods.
    """
    core = getattr(reader, "_reader", None) if has(ClientPart.READER) else None
    if core is not None:
        read: Callable[[int], Any] = core.read_next
        return read
    public = reader.read_next
    return lambda timeout_ms: PublicMessage(public(timeout_ms))


def receive_of(consumer: Any) -> Callable[[int], Any]:
    """Return the fastest function that receives a message: it takes a timeout in ms."""
    receive: Callable[[int], Any] = acknowledging(consumer).receive
    return receive


def acknowledging(consumer: Any) -> Any:
    """Return the fastest object with the methods of a consumer that take messages of the core."""
    core = getattr(consumer, "_consumer", None) if has(ClientPart.CONSUMER) else None
    return consumer if core is None else core


def message_core(message: Any) -> Any:
    """Return the message of the core, or an object with its methods."""
    return core_of_messages()(message)


def core_of_messages() -> Callable[[Any], Any]:
    """Return the function of :func:`message_core`, for loops."""
    return _core_of if has(ClientPart.MESSAGE) else _with_methods_of_core


def _core_of(message: Any) -> Any:
    return getattr(message, "_message", message)


def _with_methods_of_core(message: Any) -> Any:
    return message if isinstance(message, PublicMessage) else PublicMessage(message)


class PublicMessage:
    """A received message with the methods of the core's messages, by public ones.

    Args:
        message: a ``pulsar.Message``.
    """

    __slots__ = ("_public",)

    def __init__(self, message: Any) -> None:
        self._public = message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._public, name)

    def length(self) -> int:
        """Return the size of the payload, in bytes."""
        return len(self._public.data())

    def has_null_value(self) -> bool:
        """Return True for a null value, whose payload looks like an empty one.

        Raises:
            PrerequisiteError: the client does not tell.
        """
        require(ClientPart.NULL_VALUES)
        return bool(self._public.has_null_value())

    def int_schema_version(self) -> int:
        """Return the number of the schema's version; -1 without a schema."""
        raw = self._public.schema_version()
        data = raw.encode("latin-1") if isinstance(raw, str) else bytes(raw or b"")
        return int.from_bytes(data, "big") if len(data) == _SCHEMA_BYTES else -1
