"""Messages as they are read from a source partition, also those with fields that are not UTF-8.

Other clients accept any bytes as an ordering key, and some as a key or property. The Python client
decodes a field each time it is read, and raises UnicodeDecodeError. The error holds the bytes. The
properties are one field: they can be read only together.

A message with such a field gets a mark among its properties. The mark makes its envelope
unreadable, so that every mover and the dispatcher treat the message like any other that they
cannot understand, also where it crosses a process boundary as a row.
"""

from __future__ import annotations

import math
import re
from base64 import b64encode
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from .envelope import PREFIX, UNREADABLE, due_of
from .position import Position

#: A decimal number. Other spellings (1_000, 0x10, inf, 1,5, spaces) are no numbers.
NUMBER_PATTERN = "[+-]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][+-]?[0-9]+)?"
_fits = re.compile(NUMBER_PATTERN).fullmatch


def number(text: str | None) -> float:
    """Return the finite decimal number that a text spells, or NaN."""
    if text is None or not _fits(text):
        return math.nan
    value = float(text)
    return value if math.isfinite(value) else math.nan


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
    """Return the key, ordering key and marked properties of a message with unreadable fields."""
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


class Payload(Protocol):
    """The parts of a message that an application sets, as in a `ParkedMessage`."""

    @property
    def value(self) -> bytes | None: ...
    @property
    def key(self) -> str: ...
    @property
    def ordering_key(self) -> str: ...
    @property
    def event_ms(self) -> int: ...
    @property
    def properties(self) -> dict[str, str]: ...


class ParkedMessage(NamedTuple):
    """A message as it was read from a source partition. U+FFFD replaces what is not UTF-8."""

    ledger: int
    entry: int
    batch: int  # -1 for an unbatched entry
    publish_ms: int  # by the clock of the producer; of a batch, that of its first message
    key: str  # empty for none, as the ordering key
    ordering_key: str
    event_ms: int  # the application's event time; 0 for none
    properties: dict[str, str]  # ours included; with a mark if a field is unreadable
    value: bytes | None  # None for a null value, which differs from an empty one

    @property
    def position(self) -> Position:
        """The position of the message in its partition."""
        return Position(self.ledger, self.entry, self.batch)

    @property
    def due_ms(self) -> int | None:
        """The due time, ms since the epoch; None if it cannot be read."""
        return due_of(self.properties)

    @property
    def size(self) -> int:
        """The length of the payload in bytes."""
        return len(self.value or b"")

    def stable_id(self, partition_topic: str) -> str:
        """Return the identity of the message if this partition is the first that stored it."""
        # Same result as position.stable_id(), without a Position: this runs for every message.
        topic = partition_topic.removeprefix("persistent://")
        return f"{topic}:{self.ledger}:{self.entry}:{self.batch}"


# A message object of the client's native core, with its ledger, entry and batch index.
RawMessage = tuple[Any, int, int, int]


def parked_message(message: Any, ledger: int, entry: int, batch: int) -> ParkedMessage:
    """Copy every field of a message, with a mark if one is unreadable, or if it is encrypted."""
    # A try block costs nothing without an exception. This runs for every message.
    try:
        key, ordering_key = message.partition_key(), message.ordering_key()
        properties = message.properties()
    except UnicodeDecodeError:
        key, ordering_key, properties = readable_fields(message)
    # The client gives a whole batch as one message without an index if it cannot decrypt it.
    if batch < 0 and message.encryption_context() is not None:
        properties = {**properties, UNREADABLE: "it is encrypted, and cannot be moved on"}
    value = message.data()
    return ParkedMessage(
        ledger,
        entry,
        batch,
        message.publish_timestamp(),
        key,
        ordering_key,
        message.event_timestamp(),
        properties,
        None if not value and message.has_null_value() else value,
    )


def positions_of(messages: Sequence[Any]) -> tuple[list[int], list[int], list[int]]:
    """Return ledgers, entries and batch indices (-1 if unbatched) of successive messages."""
    # It reads the ID of few messages: between two messages of the same entry whose batch indices
    # differ by their distance are the messages of the batch indices between.
    ledgers: list[int] = []
    entries: list[int] = []
    batches: list[int] = []
    start, count = 0, len(messages)
    while start < count:
        first = messages[start].message_id()
        ledger, entry, batch = first.ledger_id(), first.entry_id(), first.batch_index()
        stop = start + 1
        if batch >= 0:
            stop = max(stop, min(start + batch_size(first) - batch, count))
        if stop > start + 1:
            last = messages[stop - 1].message_id()
            expected = ledger, entry, batch + stop - 1 - start
            if (last.ledger_id(), last.entry_id(), last.batch_index()) != expected:
                stop = start + 1  # some of its messages are missing
        ledgers += [ledger] * (stop - start)
        entries += [entry] * (stop - start)
        batches += range(batch, batch + stop - start)
        start = stop
    return ledgers, entries, batches


def batch_size(message_id: Any) -> int:
    """Return the number of messages in the entry of a batched message; 0 if not known."""
    # The client has it only in the serialized id: field 6 of Pulsar's `MessageIdData`.
    data: bytes = message_id.serialize()
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        if tag & 7 == 2:  # length-delimited
            length, at = _varint(data, at)
            at += length
            continue
        value, at = _varint(data, at)
        if tag >> 3 == 6:
            return value
    return 0


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
