"""Messages of the window topic in the form in which the delay queue keeps them.

A record is a `WindowMessage`, a `Cancellation`, or a plain tuple that has the stored form of a
message already: that is how nearly every message is read. The first two fields identify the message
among its copies. All values can be marshalled, because the queue may write them to disk.
"""

from __future__ import annotations

import hashlib
import marshal
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from delaylevel.errors import EnvelopeError, InvalidInputError, UnknownTargetError
from delaylevel.model.due_time import NEVER_MS
from delaylevel.model.envelope import (
    CANCEL,
    COMPRESSION,
    DUE,
    DUE_DIGITS,
    EXPIRES,
    ID,
    PREFIX,
    SCHEMA,
    TARGET,
    Envelope,
    SchemaRef,
    application_properties,
    compression_of,
)
from delaylevel.model.level_topic import DELAY_ATTRIBUTE, SIZE_ATTRIBUTE, LevelTopicDescription
from delaylevel.model.message import ParkedMessage, number, parked_message
from delaylevel.model.position import EARLIEST, Position
from delaylevel.mover import hop
from delaylevel.structures.positions import (
    ENTRY_BITS,
    ENTRY_LIMIT,
    LAST_INDEX,
    LEDGER_LIMIT,
    unpack,
)
from delaylevel.structures.rows import Int64s, Rows
from delaylevel.topics.roster import DescriptionCache

#: The format in which short ASCII strings are copied as they are.
_MARSHAL_VERSION = 4
#: Number of kinds from which the records of others are marshalled.
_MOST_KINDS = 1 << 14
#: Tag, kind, number of the ID, due time.
_HEAD = Struct("<BHQq")
#: The same, and the size of the marshalled fields that follow.
_EXTENDED_HEAD = Struct("<BHQqI")
_NUMBER_MASK = (1 << 63) - 1
#: Function that returns what comes before the payload of a message that has nothing else, from
#: ``PLAIN``, the number of its kind (which has a source), the number of its ID, and its due time.
pack_head = _HEAD.pack
#: An ID from which the compact form can be restored. Other spellings of the same numbers (01, +1,
#: 1_0, digits of other scripts) are other IDs. A source is not empty, because the key would be that
#: of hashed IDs, and has no newline, because the key could be that of another attempt.
_POSITION_ID = re.compile(
    r"([^\n]+):(0|[1-9][0-9]{0,9}):(0|[1-9][0-9]{0,6}):(-1|0|[1-9][0-9]{0,3})"
)
#: Expiry of a message that never expires.
_NEVER = str(NEVER_MS)
#: Number of kinds of messages that a recorder remembers.
_MAX_KINDS = 4096
Key = TypeVar("Key")
_is_ours = re.compile(re.escape(PREFIX)).match
#: A `WindowMessage`, a `Cancellation`, or a plain tuple, see `STORED`.
MessageRecord: TypeAlias = "tuple[Any, ...]"

#: First byte of a stored form.
PLAIN, _EXTENDED, _MESSAGE, _CANCELLATION = 1, 2, 3, 4


def with_key(number: int, key: str) -> int:
    """Return the number of an ID together with a partition key: the key moves it."""
    # So one ID on several keys is several numbers, and those of one key stay as close together as
    # without it. Two messages of different keys share a number as rarely as two random IDs.
    return (number + _offset(key)) & _NUMBER_MASK if key else number


# Cached for keys that recur.
@lru_cache(maxsize=1 << 16)
def _offset(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1


# The target, schema, compression and ID key of a message recur. They are in a table of this
# process, and its ID follows from the number that identifies it, unless the application gave the
# ID. Without further fields, the stored form is a few bytes and the payload. Any other record is
# marshalled as it is. The stored form is never read by another process.
# A plain tuple that stands for a message: to make a named one costs more. Its fields are ID key,
# number of the ID, due time, the form that `unpacked` reads, size of the payload, and properties.
STORED, _SIZE, _PROPERTIES = 3, 4, 5


# The kinds of this process: target, schema, compression, ID key, and the topic in the IDs, which is
# empty if IDs do not follow from the numbers. Their numbers never change.
_KINDS: list[tuple[str, str, str, str, str]] = []
_NUMBERS: dict[tuple[str, str, str, str], int] = {}
_ADDING = threading.Lock()


def kind_number(target: str, schema: str, compression: str, id_key: str) -> int | None:
    """Return the number of a kind in this process; None if there are too many kinds."""
    kind = target, schema, compression, id_key
    number = _NUMBERS.get(kind)
    if number is not None:
        return number
    with _ADDING:
        if kind not in _NUMBERS and len(_KINDS) < _MOST_KINDS:
            _KINDS.append((*kind, id_key.removeprefix(f"{target}\n")))
            _NUMBERS[kind] = len(_KINDS) - 1
        return _NUMBERS.get(kind)


def packed_extended(
    kind: int, number: int, due_ms: int, value: bytes | None, fields: tuple[Any, ...]
) -> bytes:
    """Return the stored form of a message with further fields; ``number`` is without its key.

    The fields are the ID if the application gave it, otherwise None; key, ordering key, event time,
    the application's properties, and the time at which it expires or 0.
    """
    more = marshal.dumps((value is None, *fields), _MARSHAL_VERSION)
    return _EXTENDED_HEAD.pack(_EXTENDED, kind, number, due_ms, len(more)) + more + (value or b"")


def packed(record: MessageRecord) -> bytes:
    """Return the stored form of a record that is not packed."""
    tag = _CANCELLATION if type(record) is Cancellation else _MESSAGE
    try:
        return bytes((tag,)) + marshal.dumps(tuple(record), _MARSHAL_VERSION)
    except ValueError as error:
        raise InvalidInputError(f"a record cannot be stored: {error}") from None


def unpacked(stored: bytes) -> WindowMessage | Cancellation:
    """Return the record that a stored form stands for."""
    tag = stored[0]
    if tag == PLAIN:
        _, kind, number, due_ms = _HEAD.unpack_from(stored)
        target, schema, compression, id_key, source = _KINDS[kind]
        name = _position_id(source, number)
        properties = {DUE: str(due_ms), TARGET: target, ID: name}
        value = stored[_HEAD.size :]
        # This is what _make does, without a call in Python for each message.
        return tuple.__new__(
            WindowMessage,
            (
                *(id_key, number, due_ms, target, schema, 0, name, "", "", 0, properties),
                *(value, compression, 0, None),
            ),
        )
    if tag != _EXTENDED:
        fields = marshal.loads(memoryview(stored)[1:])
        return Cancellation(*fields) if tag == _CANCELLATION else WindowMessage(*fields)
    _, kind, number, due_ms, size = _EXTENDED_HEAD.unpack_from(stored)
    start = _EXTENDED_HEAD.size
    is_null, name, key, ordering_key, event_ms, properties, expires_ms = marshal.loads(
        stored[start : start + size]
    )
    target, schema, compression, id_key, source = _KINDS[kind]
    if name is None:
        name = _position_id(source, number)
    properties[DUE], properties[TARGET], properties[ID] = str(due_ms), target, name
    payload = None if is_null else stored[start + size :]
    identity = id_key, with_key(number, key)
    return tuple.__new__(
        WindowMessage,
        (
            *(*identity, due_ms, target, schema, 0, name, key, ordering_key, event_ms, properties),
            *(payload, compression, expires_ms, None),
        ),
    )


def _position_id(source: str, number: int) -> str:
    """Return the ID of the message at a position of a topic, which has this number."""
    entry, batch = number >> 10 & ENTRY_LIMIT - 1, (number & LAST_INDEX) - 1
    return f"{source}:{number >> ENTRY_BITS}:{entry}:{batch}"


def as_message(record: MessageRecord) -> WindowMessage:
    """Return a record of a message that is perhaps packed."""
    return cast("WindowMessage", unpacked(record[STORED]) if type(record) is tuple else record)


class WindowMessage(NamedTuple):
    """A message of the window topic, ready to be published."""

    id_key: str  # of its identity among copies; a message with an empty key has none
    id: int
    due_ms: int
    target: str  # full name of the business topic; empty for a dead letter
    schema: str  # ``TYPE:digest`` of the payload, or empty
    attempt: int  # number of refusals by the target so far
    message_id: str  # the ``delaylevel.id``
    key: str
    ordering_key: str
    event_ms: int
    properties: dict[str, str]  # all of the published message
    value: bytes | None
    compression: str = ""  # of the message's producer, or empty
    expires_ms: int = 0  # time from which the message is not released; 0 for none
    # From its publish time in the window until it is due, if that is the attribute.
    delay_ms: int | None = None

    @property
    def envelope(self) -> Envelope:
        """The envelope with which the message was parked."""
        schema = SchemaRef.parse(self.schema) if self.schema else None
        return Envelope(
            self.due_ms,
            self.target,
            self.message_id,
            schema,
            self.attempt,
            self.compression or None,
            expires_ms=self.expires_ms,
        )


class Cancellation(NamedTuple):
    """A cancellation of the window topic; all values are those of the message."""

    id_key: str
    id: int
    due_ms: int
    target: str
    message_id: str
    key: str
    kind: str = CANCEL


def identity(message_id: str, target: str, key: str, attempt: int = 0) -> tuple[str, int]:
    """Return the key and the number under which a message is remembered."""
    # Its ID, target and partition key identify it. An ID that is spelled as the product spells
    # positions is packed into the number without loss. For any other ID, the number is 63 bits of
    # its BLAKE2b hash: the probability that two of ten million IDs share a number is below 1 in
    # 100,000. The attempt is part of the key, because a message that was refused and comes back is
    # not a copy of itself.
    id_key, number = _id_number(message_id, target, attempt)
    return id_key, with_key(number, key)


def _id_number(message_id: str, target: str, attempt: int = 0) -> tuple[str, int]:
    """Return the key and the number of an ID without the partition key of its message."""
    suffix = f"\n{attempt}" if attempt else ""
    match = _POSITION_ID.fullmatch(message_id)
    if match:
        source = match[1]
        ledger, entry, batch = int(match[2]), int(match[3]), int(match[4])
        if ledger < LEDGER_LIMIT and entry < ENTRY_LIMIT and batch < LAST_INDEX:
            # Plus 1, so that an unbatched entry (-1) and the first message of a batch differ.
            return _id_key(target, source, suffix), ledger << ENTRY_BITS | entry << 10 | (batch + 1)
    digest = hashlib.blake2b(message_id.encode(), digest_size=8).digest()
    return _id_key(target, "", suffix), int.from_bytes(digest, "big") >> 1


# Cached, so that the keys of most messages are one object, which is compared by its address.
@lru_cache(maxsize=4096)
def _id_key(target: str, source: str, suffix: str) -> str:
    return f"{target}\n{source}{suffix}"


def _is_time(text: str) -> bool:
    """Return True if a time is spelled as nearly every one is."""
    return len(text) == DUE_DIGITS and text.isdecimal() and text.isascii() and text[0] != "0"


# Target, schema, compression and ID key of messages whose first position is in this window
# partition, and the numbers of their kinds by ID key.
_Checked: TypeAlias = "tuple[str, str, str, str, dict[str, int]]"


class Recorder:
    """Conversion of the messages of one window partition into records.

    A message that cannot be understood, or whose target the level topic does not have, becomes a
    dead letter that is due at once.

    Most messages have the target, schema and compression of an earlier one. These were checked with
    the first message of their kind, and are taken from a table.

    Args:
        last_stored: function that returns the position of the last message in the partition.
    """

    def __init__(
        self,
        descriptions: DescriptionCache,
        topic: str,
        last_stored: Callable[[], Position | None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.descriptions = descriptions
        with_delay = descriptions.latest().attribute == DELAY_ATTRIBUTE
        # Function that returns the record of a message of the client's core by its position (batch
        # is -1 for an unbatched entry), or None as a call does. It is nearly always packed, unless
        # it has the delay.
        self.packed = self._with_delay if with_delay else self._packed
        self._topic = topic
        self._source = topic.removeprefix("persistent://")
        # By target, schema and compression as they are spelled.
        self._kinds: dict[tuple[str | None, str | None, str | None], _Checked] = {}
        self._known: LevelTopicDescription | None = None  # the description behind the kinds
        self._last_stored = last_stored
        self._now_s = now_s
        self._undecided = EARLIEST
        # All messages before this position are known to be stored at this monotonic time.
        self._stored = EARLIEST
        self._stored_s = float("-inf")

    def _with_delay(
        self, message: Any, ledger: int, entry: int, batch: int
    ) -> MessageRecord | None:
        """Return the record of a message with its delay, not packed; see `packed`."""
        found = self._packed(message, ledger, entry, batch)
        if found is None or type(found) is Cancellation:
            return found
        found = as_message(found)
        return found._replace(delay_ms=found.due_ms - message.publish_timestamp())

    def _packed(self, message: Any, ledger: int, entry: int, batch: int) -> MessageRecord | None:
        # This runs for every message, and a restart reads all pending ones: no further calls.
        try:
            properties = message.properties()
            key, ordering_key = message.partition_key(), message.ordering_key()
        except UnicodeDecodeError:
            return self._record_checked(message, ledger, entry, batch)
        due, target = properties.pop(DUE, ""), properties.pop(TARGET, None)
        own_id = schema = compression = expires = None
        if properties:
            own_id, expires = properties.pop(ID, None), properties.pop(EXPIRES, None)
            schema, compression = properties.pop(SCHEMA, None), properties.pop(COMPRESSION, None)
        if self._known is not self.descriptions.latest():
            self._known = self.descriptions.latest()
            self._kinds = {}
        kind = self._kinds.get((target, schema, compression))
        if (
            kind is None
            or len(due) != DUE_DIGITS
            or not (due.isdecimal() and due.isascii())
            or due[0] == "0"
            or (expires is not None and expires != _NEVER and not _is_time(expires))
            or (properties and any(map(_is_ours, properties)))
            or (batch < 0 and message.encryption_context() is not None)
        ):
            return self._record_checked(message, ledger, entry, batch)
        (target, schema, compression, id_key, numbers), name = kind, None
        if own_id is None:
            number = ledger << ENTRY_BITS | entry << 10 | (batch + 1)
            if ledger >= LEDGER_LIMIT or entry >= ENTRY_LIMIT or batch >= LAST_INDEX:
                own_id = f"{self._source}:{ledger}:{entry}:{batch}"
        elif not own_id:
            return self._record_checked(message, ledger, entry, batch)
        if own_id:
            id_key, number = _id_number(own_id, target)
        stored_kind = numbers.get(id_key)
        if stored_kind is None:
            stored_kind = kind_number(target, schema, compression, id_key)
            if stored_kind is None:
                return self._record_checked(message, ledger, entry, batch)
            numbers[id_key] = stored_kind
        # An ID that follows from the number and the kind's source is not stored.
        if own_id and not _KINDS[stored_kind][-1]:
            name = own_id
        due_ms, event_ms, value = int(due), message.event_timestamp(), message.data()
        if value and not (properties or key or ordering_key or event_ms or name or expires):
            stored = pack_head(PLAIN, stored_kind, number, due_ms) + value
        else:
            fields = name, key, ordering_key, event_ms, properties, int(expires) if expires else 0
            payload = None if not value and message.has_null_value() else value
            stored = packed_extended(stored_kind, number, due_ms, payload, fields)
        number = with_key(number, key) if key else number
        return id_key, number, due_ms, stored, len(value), properties

    def _record_checked(
        self, message: Any, ledger: int, entry: int, batch: int
    ) -> WindowMessage | Cancellation | None:
        """Check a message, and remember its kind; arguments and result as for `packed`."""
        parked = parked_message(message, ledger, entry, batch)
        found = self(parked)
        if isinstance(found, WindowMessage) and found.target:
            properties = parked.properties
            spelled = properties[TARGET], properties.get(SCHEMA), properties.get(COMPRESSION)
            if len(self._kinds) >= _MAX_KINDS:
                self._kinds = {}
            id_key = _id_key(found.target, self._source, "")
            self._kinds[spelled] = found.target, found.schema, found.compression, id_key, {}
        return found

    def __call__(self, message: ParkedMessage) -> WindowMessage | Cancellation | None:
        """Return the record of a message; None if :meth:`refresh` has to be called first."""
        # A flood of messages with unknown targets needs few reads: one read decides about
        # everything that was stored before it.
        try:
            try:
                envelope = hop.open_envelope(self.descriptions.latest(), self._topic, message)
            except UnknownTargetError:
                stored_s = self._stored_s if message.position < self._stored else self._now_s()
                description = self.descriptions.read_since(stored_s)
                if description is None:
                    self._undecided = message.position
                    return None
                envelope = hop.open_envelope(description, self._topic, message)
        except EnvelopeError as error:
            return self._dead_letter(message, error.reason)
        assert envelope.id is not None
        if envelope.kind == CANCEL:
            id_key, number = identity(envelope.id, envelope.target, message.key)
            named = envelope.due_ms, envelope.target, envelope.id, message.key
            return Cancellation(id_key, number, *named)
        id_key, number = identity(envelope.id, envelope.target, message.key, envelope.attempt)
        return WindowMessage(
            id_key,
            number,
            envelope.due_ms,
            envelope.target,
            "" if envelope.schema is None else str(envelope.schema),
            envelope.attempt,
            envelope.id,
            message.key,
            message.ordering_key,
            message.event_ms,
            envelope.delivered_properties(application_properties(message.properties)),
            message.value,
            envelope.compression or "",
            envelope.expires_ms,
        )

    def refresh(self) -> None:
        """Read the description again, for messages with a target that it does not have."""
        last = self._last_stored()
        stored_s = self._now_s()
        self.descriptions.refresh(stored_s)
        self._stored = max(self._undecided.next, EARLIEST if last is None else last.next_entry)
        self._stored_s = stored_s

    def _dead_letter(self, message: ParkedMessage, reason: str) -> WindowMessage:
        properties = hop.dead_letter_properties(message, self._topic, reason)
        return WindowMessage(
            "", 0, 0, "", "", 0, "", message.key, message.ordering_key, message.event_ms,
            properties, message.value, compression_of(message.properties) or "",
        )  # fmt: skip


@dataclass(eq=False)
class Batch:
    """Messages outside the segments, in the order of the topic or that of (due time, position)."""

    due_ms: Int64s
    positions: Int64s  # packed
    records: Sequence[MessageRecord]  # those of a batch that was read may be packed
    number: int = -1  # of a batch that is launched

    def __len__(self) -> int:
        """Return the number of messages."""
        return len(self.records)

    @classmethod
    def join(cls, parts: Sequence[Batch]) -> Batch:
        """Return successive messages as one batch."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            np.concatenate([part.due_ms for part in parts]),
            np.concatenate([part.positions for part in parts]),
            [record for part in parts for record in part.records],
        )

    def by(self, keys: Iterable[Key]) -> Iterator[tuple[Key, Batch]]:
        """Yield the parts of a batch that is not launched, each with the key of its messages."""
        groups: dict[Key, list[int]] = {}
        for index, key in enumerate(keys):
            groups.setdefault(key, []).append(index)
        parts = [self] if len(groups) == 1 else self.divide(groups.values())
        yield from zip(groups, parts, strict=True)

    def divide(self, parts: Iterable[Sequence[int]]) -> list[Batch]:
        """Return parts of a batch that is not launched; each has ascending indices."""
        divided = []
        for part in parts:
            index = np.asarray(part, dtype=np.int64)
            records = [self.records[each] for each in part]
            divided.append(Batch(self.due_ms[index], self.positions[index], records))
        return divided

    @property
    def rows(self) -> Rows:
        """The due times, ledger IDs and entry IDs, shape (3, n)."""
        rows: Rows = np.array([self.due_ms, *unpack(self.positions)], dtype=np.int64)
        return rows

    @property
    def has_cancellations(self) -> bool:
        """True if some of the records are cancellations."""
        return Cancellation in map(type, self.records)

    @property
    def messages(self) -> list[WindowMessage]:
        """The records of a batch that is due: no cancellations, and none is packed; shape (n,)."""
        return cast("list[WindowMessage]", self.records)


# Every message has one number: the size of its payload, its delay in the window (from its publish
# time there until it is due), or one of its properties. It is NaN without a number.
def attributes(name: str, records: Sequence[Any]) -> npt.NDArray[np.float64]:
    """Return the attribute of each record, shape (n,), by its name in the level topic."""
    found: list[float | None]
    if name == SIZE_ATTRIBUTE:
        found = [
            record[_SIZE]
            if type(record) is tuple
            else None
            if type(record) is Cancellation
            else len(record.value or b"")
            for record in records
        ]
    elif name == DELAY_ATTRIBUTE:
        found = [getattr(record, "delay_ms", None) for record in records]
    else:
        found = [
            None if type(record) is Cancellation else number(_properties(record).get(name))
            for record in records
        ]
    return np.array(found, dtype=np.float64)  # None becomes NaN


def _properties(record: Any) -> Mapping[str, str]:
    properties: Mapping[str, str]
    properties = record[_PROPERTIES] if type(record) is tuple else record.properties
    return properties
