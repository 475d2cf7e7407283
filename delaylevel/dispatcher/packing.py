"""The stored form of records: compact for nearly all messages, because a restart stores them all.

The target, schema, compression and ID key of a message recur. They are in a table of this process,
and its ID follows from the number that identifies it, unless the application gave the ID. Without
further fields, the stored form is a few bytes and the payload. Any other record is marshalled as it
is. The stored form is never read by another process.
"""

from __future__ import annotations

import hashlib
import marshal
import threading
from collections.abc import Mapping
from functools import lru_cache
from struct import Struct
from typing import Any, NamedTuple

from delaylevel.errors import InvalidInputError
from delaylevel.model.envelope import DUE, ID, TARGET

#: The format in which short ASCII strings are copied as they are.
_MARSHAL_VERSION = 4
#: Number of kinds from which the records of others are marshalled.
_MOST_KINDS = 1 << 14
# First byte of a stored form; that of a marshalled tuple is another one.
PLAIN, _EXTENDED = 1, 2
#: Tag, kind, number of the ID, due time.
_HEAD = Struct("<BHQq")
#: The same, and the size of the marshalled fields that follow.
_EXTENDED_HEAD = Struct("<BHQqI")
_ENTRY_MASK, _BATCH_MASK = (1 << 25) - 1, (1 << 10) - 1
_NUMBER_MASK = (1 << 63) - 1


def with_key(number: int, key: str) -> int:
    """Return the number of an ID together with a partition key: the key moves it.

    So one ID on several keys is several numbers, and those of one key stay as close together as
    without it. Two messages of different keys share a number as rarely as two random IDs.
    """
    return (number + _offset(key)) & _NUMBER_MASK if key else number


# Cached for keys that recur.
@lru_cache(maxsize=1 << 16)
def _offset(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1


class StoredKind(NamedTuple):
    """Values that the records of many messages have in common; ``id_key`` is their ID key."""

    target: str
    schema: str
    compression: str
    id_key: str

    @property
    def source(self) -> str:
        """Topic in the IDs of the messages; empty if their IDs do not follow from the numbers."""
        return self.id_key.partition("\n")[2]


class PackedRecord(NamedTuple):
    """The fields of a plain tuple that stands for a record, and has its stored form.

    No other record has as many.

    Attributes:
        id_key, id: identity among copies.
        due_ms: due time, ms since the epoch.
        stored: the stored form, which `unpacked` reads.
        size: size of the payload, in bytes.
        properties: the application's properties.
    """

    id_key: str
    id: int
    due_ms: int
    stored: bytes
    size: int
    properties: Mapping[str, str]


PACKED_FIELDS = len(PackedRecord._fields)
STORED = PackedRecord._fields.index("stored")


class _KindTable:
    """The kinds of this process; their numbers never change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[StoredKind, int] = {}
        self.kinds: list[tuple[StoredKind, str]] = []  # with their sources

    def number(self, kind: StoredKind) -> int | None:
        """Return the number of a kind; None if there are too many."""
        number = self._numbers.get(kind)
        if number is not None:
            return number
        with self._lock:
            if kind not in self._numbers and len(self.kinds) < _MOST_KINDS:
                self.kinds.append((kind, kind.source))
                self._numbers[kind] = len(self.kinds) - 1
            return self._numbers.get(kind)


_TABLE = _KindTable()
#: Function that returns the number of a kind in this process; None if there are too many kinds.
kind_number = _TABLE.number
#: Function that returns what comes before the payload of a message that has nothing else, from
#: ``PLAIN``, the number of its kind (which has a source), the number of its ID, and its due time.
pack_head = _HEAD.pack


def packed_extended(
    kind: int, number: int, due_ms: int, value: bytes | None, fields: tuple[Any, ...]
) -> bytes:
    """Return the stored form of a message with further fields.

    Args:
        kind: number of its kind.
        number: number of its ID without its key, below 2**63.
        fields: the ID if the application gave it, otherwise None; key, ordering key, event time,
            the application's properties, and the time at which it expires or 0.
    """
    more = marshal.dumps((value is None, *fields), _MARSHAL_VERSION)
    return _EXTENDED_HEAD.pack(_EXTENDED, kind, number, due_ms, len(more)) + more + (value or b"")


def packed(record: tuple[Any, ...]) -> bytes:
    """Return the stored form of any record.

    Raises:
        InvalidInputError: the record has values that cannot be marshalled.
    """
    if len(record) == PACKED_FIELDS:
        stored: bytes = record[STORED]
        return stored
    try:
        return marshal.dumps(tuple(record), _MARSHAL_VERSION)
    except ValueError as error:
        raise InvalidInputError(f"a record cannot be stored: {error}") from None


def unpacked(stored: bytes) -> tuple[Any, ...]:
    """Return the record that a stored form stands for, as a plain tuple."""
    tag = stored[0]
    if tag == PLAIN:
        _, kind, number, due_ms = _HEAD.unpack_from(stored)
        (target, schema, compression, id_key), source = _TABLE.kinds[kind]
        name = _position_id(source, number)
        properties = {DUE: str(due_ms), TARGET: target, ID: name}
        value = stored[_HEAD.size :]
        return (
            *(id_key, number, due_ms, target, schema, 0, name, "", "", 0, properties),
            *(value, compression, 0),
        )
    if tag != _EXTENDED:
        record: tuple[Any, ...] = marshal.loads(stored)
        return record
    _, kind, number, due_ms, size = _EXTENDED_HEAD.unpack_from(stored)
    start = _EXTENDED_HEAD.size
    is_null, name, key, ordering_key, event_ms, properties, expires_ms = marshal.loads(
        stored[start : start + size]
    )
    (target, schema, compression, id_key), source = _TABLE.kinds[kind]
    if name is None:
        name = _position_id(source, number)
    properties[DUE], properties[TARGET], properties[ID] = str(due_ms), target, name
    payload = None if is_null else stored[start + size :]
    return (
        *(
            id_key,
            with_key(number, key),
            due_ms,
            target,
            schema,
            0,
            name,
            key,
            ordering_key,
            event_ms,
            properties,
        ),
        *(payload, compression, expires_ms),
    )


def _position_id(source: str, number: int) -> str:
    """Return the ID of the message at a position of a topic, which has this number."""
    entry, batch = number >> 10 & _ENTRY_MASK, (number & _BATCH_MASK) - 1
    return f"{source}:{number >> 35}:{entry}:{batch}"


def as_plain(record: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a record as a plain tuple that is not packed."""
    return unpacked(record[STORED]) if len(record) == PACKED_FIELDS else tuple(record)
