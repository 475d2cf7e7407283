"""Fields of a message that are not UTF-8.

Other clients accept any bytes as an ordering key, and some as a key or property. The Python client
decodes a field each time it is read, and raises UnicodeDecodeError. The error holds the bytes. The
properties are one field: they can be read only together.

A message with such a field gets a mark among its properties. The mark makes its envelope
unreadable, so that every mover and the dispatcher treat the message like any other that they
cannot understand, also where it crosses a process boundary as a row.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from typing import Any

from .envelope import PREFIX, UNREADABLE

# Properties with the bytes of unreadable fields, in base64.
RAW = PREFIX + "raw."
RAW_KEY = RAW + "key"
RAW_ORDERING_KEY = RAW + "ordering_key"
RAW_PROPERTIES = RAW + "properties"

_NAMES = {
    RAW_KEY: "the key",
    RAW_ORDERING_KEY: "the ordering key",
    RAW_PROPERTIES: "the properties",
}


def text_of(read: Callable[[], str]) -> str:
    """Return a text field; U+FFFD replaces the bytes that are not UTF-8."""
    try:
        return str(read())
    except UnicodeDecodeError as error:
        return _replaced(error.object)


def properties_of(message: Any) -> dict[str, str]:
    """Return the properties of a message of the client's core; only the mark if unreadable."""
    try:
        properties: dict[str, str] = message.properties()
    except UnicodeDecodeError:
        return _mark({RAW_PROPERTIES: _printed_properties(message)})
    return properties


def readable_fields(message: Any) -> tuple[str, str, dict[str, str]]:
    """Return the key, ordering key and marked properties of a message with unreadable fields.

    Args:
        message: a message object of the client's native core.
    """
    raw: dict[str, bytes] = {}

    def text(name: str, read: Callable[[], str]) -> str:
        try:
            return read()
        except UnicodeDecodeError as error:
            raw[name] = error.object
            return _replaced(error.object)

    key = text(RAW_KEY, message.partition_key)
    ordering_key = text(RAW_ORDERING_KEY, message.ordering_key)
    properties: dict[str, str] = {}
    try:
        properties = message.properties()
    except UnicodeDecodeError:
        raw[RAW_PROPERTIES] = _printed_properties(message)
    return key, ordering_key, {**properties, **_mark(raw)}


def _mark(raw: dict[str, bytes]) -> dict[str, str]:
    verb = "are" if len(raw) > 1 or RAW_PROPERTIES in raw else "is"
    reason = f"{' and '.join(_NAMES[name] for name in raw)} {verb} not UTF-8"
    return {UNREADABLE: reason, **{name: b64encode(value).decode() for name, value in raw.items()}}


def _replaced(value: bytes) -> str:
    return value.decode(errors="replace")


def _printed_properties(message: Any) -> bytes:
    """Return all properties as the client prints them: the only form with all of their bytes."""
    try:
        printed = str(message).encode()
    except UnicodeDecodeError as error:
        printed = error.object
    return printed.partition(b", props=")[2].removesuffix(b")") or printed
