"""What a partition stores: ledgers of entries, each with one message or a batch of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import _pulsar

from delaylevel.model.position import Position

NOWHERE = Position(-1, -1)


@dataclass(frozen=True)
class StoredMessage:
    """One message as its producer made it.

    Attributes:
        value: the payload; None for a null value.
        properties: all of them.
        key, ordering_key: an empty string where there is none.
        event_ms: the application's event time; 0 where there is none.
        producer: the name of its producer.
        schema_version: the version it was encoded with; None for plain bytes.
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
    """One entry of a ledger.

    Attributes:
        ledger, entry: where it is.
        messages: one, or those of a batch.
        batched: whether it is a batch (of one message, too).
        publish_ms: when its producer says that it was published; for a batch, its first message.
        stored_ms: when the broker stored it.
        deliver_at_ms: until when it is held back from Shared and Key_Shared subscriptions.
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
        """Where it is."""
        return Position(self.ledger, self.entry)

    @property
    def last_position(self) -> Position:
        """Where its last message is; batch -1 where it is no batch."""
        return self.message_position(len(self.messages) - 1)

    @property
    def available_ms(self) -> int:
        """From when on a Shared subscription gets it."""
        return max(self.stored_ms, self.deliver_at_ms or 0)

    @property
    def batch_size(self) -> int:
        """How many messages the batch has; 0 where it is no batch."""
        return len(self.messages) if self.batched else 0

    def message_position(self, index: int) -> Position:
        """Return where message ``index`` is."""
        return Position(self.ledger, self.entry, index if self.batched else -1)


class Log:
    """The entries of one partition, in ledgers.

    Args:
        new_ledger: gives the id of a new ledger; ids rise through the whole cluster.
        entries_per_ledger: so many, and the next ledger is begun.
    """

    def __init__(self, new_ledger: Callable[[], int], entries_per_ledger: int) -> None:
        self._new_ledger = new_ledger
        self._entries_per_ledger = entries_per_ledger
        self.ledgers: list[list[int]] = [[new_ledger(), 0]]  # [id, how many entries]
        self.entries: list[Entry] = []
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
        self._keys.append((entry.ledger, entry.entry))
        return entry

    def __len__(self) -> int:
        return len(self.entries)

    def first_at(self, position: Position) -> int:
        """Return the number of the first entry at or behind a position's entry."""
        return bisect_left(self._keys, (position.ledger, position.entry))

    def find(self, position: Position) -> int | None:
        """Return the number of the entry at this very position, or None."""
        number = self.first_at(position)
        if number < len(self._keys) and self._keys[number] == (position.ledger, position.entry):
            return number
        return None

    def first_published_at(self, publish_ms: int) -> int:
        """Return the number of the first entry published at or after a time.

        A binary search, as the broker's: where publish times do not rise it may be off.
        """
        return bisect_left(self.entries, publish_ms, key=lambda entry: entry.publish_ms)


def message_id(
    position: Position, batch_size: int = 0, partition: int = -1, topic: str = ""
) -> _pulsar.MessageId:
    """Return Pulsar's own message id, with the batch's size in it as the client keeps it."""
    data = b"\x08" + _varint(position.ledger) + b"\x10" + _varint(position.entry)
    if partition >= 0:
        data += b"\x18" + _varint(partition)
    if position.batch >= 0:
        data += b"\x20" + _varint(position.batch)
    if batch_size:
        data += b"\x30" + _varint(batch_size)
    made = _pulsar.MessageId.deserialize(data)
    if topic:
        made.topic_name(topic)
    return made


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
