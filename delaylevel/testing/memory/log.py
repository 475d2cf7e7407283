"""Storage of a partition: ledgers of entries, each with one message or a batch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import _pulsar

from delaylevel.model.position import Position

NO_POSITION = Position(-1, -1)


@dataclass(frozen=True)
class StoredMessage:
    """A message as its producer sent it.

    Attributes:
        value: the payload; None for a null value.
        properties: all properties.
        key, ordering_key: the keys; empty without one.
        event_ms: the application's event time, ms since the epoch; 0 without one.
        producer: name of its producer.
        schema_version: version of its schema; None for plain bytes.
    """

    value: bytes | None
    properties: Mapping[str, str]
    key: str
    ordering_key: str
    event_ms: int
    producer: str
    schema_version: int | None


@dataclass(frozen=True)
class Entry:
    """An entry of a ledger; all times are ms since the epoch.

    Attributes:
        ledger, entry: its position.
        messages: one message, or those of a batch.
        batched: True for a batch, even of one message.
        publish_ms: publish time by the producer's clock; of a batch, that of its first message.
        stored_ms: time at which the broker stored it.
        deliver_at_ms: delivery time for Shared and Key_Shared subscriptions, or None.
    """

    ledger: int
    entry: int
    messages: tuple[StoredMessage, ...]
    batched: bool
    publish_ms: int
    stored_ms: int
    deliver_at_ms: int | None

    @property
    def position(self) -> Position:
        """Position of the entry."""
        return Position(self.ledger, self.entry)

    @property
    def last_position(self) -> Position:
        """Position of its last message; batch -1 if it is not a batch."""
        return self.message_position(len(self.messages) - 1)

    @property
    def available_ms(self) -> int:
        """Time from which a Shared subscription receives it."""
        return max(self.stored_ms, self.deliver_at_ms or 0)

    @property
    def batch_size(self) -> int:
        """Number of messages of a batch; 0 if it is not a batch."""
        return len(self.messages) if self.batched else 0

    def message_position(self, index: int) -> Position:
        """Return the position of message ``index``."""
        return Position(self.ledger, self.entry, index if self.batched else -1)


class Log:
    """The entries of one partition, in ledgers.

    Args:
        new_ledger: function that returns the ID of a new ledger; IDs ascend in the whole cluster.
        entries_per_ledger: maximum number of entries of a ledger.

    Attributes:
        ledgers: ID and number of entries of each ledger.
        messages, size_bytes: number of messages, and bytes of their payloads.
        erased: numbers of the entries that no subscription needs any more. Nobody can read them.
    """

    def __init__(self, new_ledger: Callable[[], int], entries_per_ledger: int) -> None:
        self._new_ledger = new_ledger
        self._entries_per_ledger = entries_per_ledger
        self.ledgers: list[list[int]] = [[new_ledger(), 0]]
        self.entries: list[Entry] = []
        self.messages = self.size_bytes = 0
        self.erased: set[int] = set()
        self._keys: list[tuple[int, int]] = []

    def append(
        self,
        messages: tuple[StoredMessage, ...],
        *,
        batched: bool,
        publish_ms: int,
        stored_ms: int,
        deliver_at_ms: int | None,
    ) -> Entry:
        """Store an entry and return it."""
        if self.ledgers[-1][1] >= self._entries_per_ledger:
            self.ledgers.append([self._new_ledger(), 0])
        ledger = self.ledgers[-1]
        entry = Entry(ledger[0], ledger[1], messages, batched, publish_ms, stored_ms, deliver_at_ms)
        ledger[1] += 1
        self.entries.append(entry)
        self.messages += len(messages)
        self.size_bytes += sum(len(message.value or b"") for message in messages)
        self._keys.append((entry.ledger, entry.entry))
        return entry

    def __len__(self) -> int:
        return len(self.entries)

    def first_at(self, position: Position) -> int:
        """Return the number of the first entry at or after the entry of a position."""
        return bisect_left(self._keys, (position.ledger, position.entry))

    def find(self, position: Position) -> int | None:
        """Return the number of the entry at a position, or None."""
        number = self.first_at(position)
        if number < len(self._keys) and self._keys[number] == (position.ledger, position.entry):
            return number
        return None

    def first_published_at(self, publish_ms: int) -> int:
        """Return the number of the first entry published at or after a time, ms.

        Like the broker, use a binary search, which is only exact if publish times ascend.
        """
        return bisect_left(self.entries, publish_ms, key=lambda entry: entry.publish_ms)


def message_id(
    position: Position, batch_size: int = 0, partition: int = -1, topic: str = ""
) -> _pulsar.MessageId:
    """Return a message ID of Pulsar's client, including the batch size.

    The constructor does not accept a batch size, so encode the ID (``MessageIdData`` in Pulsar's
    protocol) and let the client decode it.
    """
    data = b"\x08" + _varint(position.ledger) + b"\x10" + _varint(position.entry)
    if partition >= 0:
        data += b"\x18" + _varint(partition)
    if position.batch >= 0:
        data += b"\x20" + _varint(position.batch)
    if batch_size:
        data += b"\x30" + _varint(batch_size)
    decoded = _pulsar.MessageId.deserialize(data)
    if topic:
        decoded.topic_name(topic)
    return decoded


def _varint(value: int) -> bytes:
    """Return the protobuf encoding of an integer; negative values as 64-bit two's complement."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
