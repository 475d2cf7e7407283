"""A partition: ledgers of entries, and subscriptions with their acknowledgements."""

from __future__ import annotations

import heapq
import zlib
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import _pulsar
import pulsar
from pulsar import ConsumerType

from delaylevel.model.clock import earliest
from delaylevel.model.position import Position
from delaylevel.model.topic_name import TopicName

NO_POSITION = Position(-1, -1)
ENTRIES_PER_LEDGER = 50_000  # the default of a real broker


@dataclass(frozen=True)
class StoredMessage:
    """A message as its producer sent it."""

    built: _pulsar.Message = field(compare=False, repr=False)
    value: bytes | None  # None for a null value
    properties: Mapping[str, str]
    key: str  # empty without one, as the ordering key
    ordering_key: str
    producer: str
    schema_version: int | None  # None for plain bytes


@dataclass(frozen=True)
class Entry:
    """An entry of a ledger."""

    ledger: int
    entry: int
    messages: tuple[StoredMessage, ...]
    batched: bool  # True for a batch, even of one message
    publish_ms: int  # by the producer's clock; of a batch, that of its first message
    stored_ms: int
    deliver_at_ms: int | None  # for Shared and Key_Shared subscriptions

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

    def positions(self) -> list[Position]:
        """Return the positions of all messages, in order."""
        return [self.message_position(index) for index in range(len(self.messages))]


def message_id(
    position: Position, batch_size: int = 0, partition: int = -1, topic: str = ""
) -> _pulsar.MessageId:
    """Return a message ID of Pulsar's client, including the batch size."""
    # The constructor does not accept a batch size, so encode the ID (`MessageIdData` in Pulsar's
    # protocol) and let the client decode it.
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


_DELAYING_TYPES = (ConsumerType.Shared, ConsumerType.KeyShared)


class Link(Protocol):
    """Connection of a producer, consumer or reader to one partition."""

    @property
    def name(self) -> str: ...
    def reconnect(self) -> None: ...
    def disconnect(self) -> None: ...


class Subscriber(Link, Protocol):
    """Connection of a consumer."""

    properties: dict[str, str]
    queue: deque[Any]  # of messages that the application has not received yet


Watcher = Callable[["Event"], None]


class Partition:
    """A partition, or a topic that is not partitioned, with its clients."""

    def __init__(
        self, name: TopicName, new_ledgers: Iterator[int], watchers: list[Watcher]
    ) -> None:
        self.name = name
        self._new_ledgers = new_ledgers  # their IDs ascend in the whole cluster
        self._watchers = watchers
        self.ledgers: list[list[int]] = [[next(new_ledgers), 0]]
        self.entries: list[Entry] = []
        self.messages = self.size_bytes = 0
        # Numbers of the entries that no subscription needs any more. Nobody can read them.
        self.erased: set[int] = set()
        self.subscriptions: dict[str, Subscription] = {}
        self.producers: dict[str, Link] = {}
        self.consumers: list[Link] = []
        self.exclusive = False  # the producer has exclusive access
        self.terminated = False

    def store(
        self,
        messages: tuple[StoredMessage, ...],
        *,
        batched: bool,
        publish_ms: int,
        stored_ms: int,
        deliver_at_ms: int | None,
    ) -> Entry:
        """Store an entry and return it."""
        if self.terminated:
            raise pulsar.TopicTerminated("Pulsar error: TopicTerminated")
        if self.ledgers[-1][1] >= ENTRIES_PER_LEDGER:
            self.ledgers.append([next(self._new_ledgers), 0])
        ledger = self.ledgers[-1]
        entry = Entry(ledger[0], ledger[1], messages, batched, publish_ms, stored_ms, deliver_at_ms)
        ledger[1] += 1
        self.entries.append(entry)
        self.messages += len(messages)
        self.size_bytes += sum(len(message.value or b"") for message in messages)
        for subscription in self.subscriptions.values():
            subscription.entry_stored(len(self.entries) - 1)
        self._notify((entry,), None)
        return entry

    def first_at(self, position: Position) -> int:
        """Return the number of the first entry at or after the entry of a position."""
        place = position.ledger, position.entry
        return bisect_left(self.entries, place, key=attrgetter("ledger", "entry"))

    def find(self, position: Position) -> int | None:
        """Return the number of the entry at a position, or None."""
        number = self.first_at(position)
        if number < len(self.entries) and self.entries[number].position == position.entry_start:
            return number
        return None

    def first_published_at(self, publish_ms: int) -> int:
        """Return the number of the first entry published at or after a time, ms."""
        # Like the broker, use a binary search, which is only exact if publish times ascend.
        return bisect_left(self.entries, publish_ms, key=attrgetter("publish_ms"))

    def last_position(self) -> Position | None:
        """Return the position of the last message; None without one."""
        return self.entries[-1].last_position if self.entries else None

    def subscribe(self, name: str, *, earliest: bool) -> Subscription:
        """Return a subscription; create it if it does not exist."""
        if name not in self.subscriptions:
            start = 0 if earliest else len(self.entries)
            self.subscriptions[name] = Subscription(self, name, start)
        return self.subscriptions[name]

    def unacknowledged(self, subscription: str) -> list[Entry]:
        """Return the entries that a subscription has not acknowledged; none without it."""
        found = self.subscriptions.get(subscription)
        return [self.entries[number] for number in found.unacknowledged()] if found else []

    def acknowledged(self, subscription: str, numbers: Collection[int]) -> None:
        """Erase what no subscription needs any more, as a broker may do at any time."""
        others = self.subscriptions.values()
        # A reader that relies on acknowledged entries works on a broker only by chance.
        self.erased.update(
            number for number in numbers if all(each.is_acknowledged(number) for each in others)
        )
        self._notify(tuple(self.entries[number] for number in numbers), subscription)

    def _notify(self, entries: tuple[Entry, ...], subscription: str | None) -> None:
        event = Event(self.name, entries, subscription)
        for watch in tuple(self._watchers):
            watch(event)


class Event(NamedTuple):
    """A change of what is stored, in the one order of the whole Pulsar."""

    topic: TopicName  # the partition, or the topic that is not partitioned
    entries: tuple[Entry, ...]
    subscription: str | None  # that has acknowledged them; None if they were stored


class Subscription:
    """State of one subscription; entries have their numbers in the partition, from 0."""

    def __init__(self, partition: Partition, name: str, start: int) -> None:
        self._partition = partition
        self._entries = partition.entries
        self._name = name
        self.kind = ConsumerType.Exclusive
        self.consumers: list[Subscriber] = []
        self.mark = start  # all entries before it are acknowledged
        self._acknowledged: set[int] = set()  # entries after the mark
        self._holders: dict[int, Subscriber] = {}  # consumers of delivered entries
        self._redeliveries: Counter[int] = Counter()
        self._rewind_at_ms: int | None = None
        self._ready: list[tuple[int, int]] = []  # heap of (time from which available, number)
        self._rebuild_ready()

    # -- consumers

    def connect(self, consumer: Subscriber, kind: ConsumerType) -> None:
        """Add a consumer."""
        if self.consumers and (kind != self.kind or kind == ConsumerType.Exclusive):
            raise pulsar.ConsumerBusy("Pulsar error: ConsumerBusy")
        # As in a broker, type and counts are those of the present consumers.
        if not self.consumers:
            self.kind = kind
            self._redeliveries.clear()
            self._rebuild_ready()  # the type decides whether delivery times count
        self.consumers.append(consumer)

    def disconnect(self, consumer: Subscriber) -> None:
        """Remove a consumer; its unacknowledged entries become available again."""
        self.consumers.remove(consumer)
        self._release([n for n, holder in self._holders.items() if holder is consumer])

    # -- delivery

    def entry_stored(self, number: int) -> None:
        """Make a new entry available."""
        heapq.heappush(self._ready, (self._available_ms(number), number))

    def next_for(self, consumer: Subscriber, now_ms: int) -> tuple[int, int] | None:
        """Return the next entry for a consumer and its redelivery count, or None."""
        if self._rewind_at_ms is not None and self._rewind_at_ms <= now_ms:
            self.redeliver_all()
        if self.kind == ConsumerType.Failover and consumer is not self.consumers[0]:
            return None
        others: list[tuple[int, int]] = []  # for other consumers, by their keys
        found: int | None = None
        while found is None and self._ready and self._ready[0][0] <= now_ms:
            item = heapq.heappop(self._ready)
            number = item[1]
            # What was acknowledged or delivered meanwhile stays in the heap until now.
            if self.is_acknowledged(number) or number in self._holders:
                continue
            if self.kind == ConsumerType.KeyShared and self._owner(number) is not consumer:
                others.append(item)
            else:
                found = number
        for item in others:
            heapq.heappush(self._ready, item)
        if found is None:
            return None
        self._holders[found] = consumer
        return found, self._redeliveries[found]

    def redeliver(self, number: int, at_ms: int) -> None:
        """Deliver an entry again at a time, ms; for types that keep the order, all entries."""
        # The order would be lost if a single entry came again, after its successors.
        if self.kind not in _DELAYING_TYPES:
            self._rewind_at_ms = min(at_ms, self._rewind_at_ms or at_ms)
            return
        if self._holders.pop(number, None) is not None:
            self._redeliveries[number] += 1
            heapq.heappush(self._ready, (at_ms, number))

    def redeliver_all(self, consumer: Subscriber | None = None) -> None:
        """Deliver the unacknowledged entries of one consumer, or of all, again at once."""
        self._rewind_at_ms = None
        consumers = self.consumers if consumer is None else [consumer]
        numbers = [number for number, holder in self._holders.items() if holder in consumers]
        if self.kind in _DELAYING_TYPES:
            self._redeliveries.update(numbers)
        for holder in consumers:
            holder.queue.clear()
        self._release(numbers)

    def next_event_ms(self) -> int | None:
        """Return the time from which an entry may be available, ms; None for never."""
        return earliest((self._ready[0][0] if self._ready else None, self._rewind_at_ms))

    # -- acknowledgement

    def acknowledge(self, numbers: Iterable[int]) -> None:
        """Acknowledge entries."""
        added = [number for number in numbers if not self.is_acknowledged(number)]
        self._acknowledged.update(added)
        for number in added:
            self._holders.pop(number, None)
        while self.mark in self._acknowledged:
            self._acknowledged.remove(self.mark)
            self.mark += 1
        if added:
            self._partition.acknowledged(self._name, added)

    def acknowledge_before(self, number: int) -> None:
        """Acknowledge every entry before this one."""
        self.acknowledge(range(self.mark, number))

    def is_acknowledged(self, number: int) -> bool:
        """Return whether an entry is acknowledged."""
        return number < self.mark or number in self._acknowledged

    def seek(self, number: int) -> None:
        """Acknowledge all entries before this one, and no others."""
        for consumer in self.consumers:
            consumer.queue.clear()
        skipped = [each for each in range(self.mark, number) if each not in self._acknowledged]
        self.mark = number
        self._acknowledged.clear()
        self._holders.clear()
        self._rewind_at_ms = None
        self._rebuild_ready()
        # Last: the process under test may end with this event, and a broker seeks as a whole.
        if skipped:
            self._partition.acknowledged(self._name, skipped)

    @property
    def mark_delete_position(self) -> Position:
        """Position up to which everything is acknowledged."""
        if self.mark:
            return self._entries[self.mark - 1].position
        return Position(self._partition.ledgers[0][0], -1)

    @property
    def backlog(self) -> int:
        """Number of unacknowledged entries."""
        return len(self._entries) - self.mark - len(self._acknowledged)

    def unacknowledged(self) -> list[int]:
        """Return the numbers of all unacknowledged entries, in order."""
        return [n for n in range(self.mark, len(self._entries)) if n not in self._acknowledged]

    # -- internals

    def _rebuild_ready(self) -> None:
        self._ready = [(self._available_ms(n), n) for n in self.unacknowledged()]
        heapq.heapify(self._ready)

    def _release(self, numbers: list[int]) -> None:
        for number in numbers:
            del self._holders[number]
            self.entry_stored(number)

    def _available_ms(self, number: int) -> int:
        # With the same time for all, the heap keeps the order of the numbers.
        return self._entries[number].available_ms if self.kind in _DELAYING_TYPES else 0

    def _owner(self, number: int) -> Subscriber:
        message = self._entries[number].messages[0]
        # Not the broker's hash: tests need that a key stays with one consumer, not with which.
        key = message.ordering_key or message.key
        return self.consumers[zlib.crc32(key.encode()) % len(self.consumers)]
