"""One subscription of one partition: what is acknowledged, and what is given to whom next."""

from __future__ import annotations

import heapq
import zlib
from collections import Counter
from typing import Protocol

import pulsar
from pulsar import ConsumerType

from delaylevel.model.position import Position

from .log import Log

_HOLDS_BACK = (ConsumerType.Shared, ConsumerType.KeyShared)


class Subscriber(Protocol):
    """A connected consumer, as its subscription sees it."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    def forget(self) -> None:
        """Drop what it was given and has not handed to the application."""
        ...

    def reconnect(self) -> None:
        """Connect again, because the subscription was deleted under it."""
        ...


class Subscription:
    """The state of one subscription. Entries are numbered from 0, as the log holds them.

    Args:
        log: the partition's.
        start: the number of the first entry that belongs to it.
    """

    def __init__(self, log: Log, start: int) -> None:
        self._log = log
        self.kind = ConsumerType.Exclusive
        self.consumers: list[Subscriber] = []
        self.mark = start  # everything before it is acknowledged
        self._acknowledged: set[int] = set()  # behind the mark
        self._holders: dict[int, Subscriber] = {}
        self._redeliveries: Counter[int] = Counter()
        self._rewind_at_ms: int | None = None
        self._ready: list[tuple[int, int]] = []  # a heap of (available from, number)
        self._fill()

    # -- consumers

    def connect(self, consumer: Subscriber, kind: ConsumerType) -> None:
        """Let a consumer in.

        Raises:
            pulsar.ConsumerBusy: another one has it, exclusively or as another type.
        """
        if self.consumers and (kind != self.kind or kind == ConsumerType.Exclusive):
            raise pulsar.ConsumerBusy("Pulsar error: ConsumerBusy")
        if not self.consumers:
            self.kind = kind
            self._redeliveries.clear()
            self._fill()
        self.consumers.append(consumer)

    def disconnect(self, consumer: Subscriber) -> None:
        """Let a consumer go; what it has not acknowledged is for others again."""
        self.consumers.remove(consumer)
        self._give_back([n for n, holder in self._holders.items() if holder is consumer])

    # -- delivery

    def stored(self, number: int) -> None:
        """Take note of a new entry."""
        heapq.heappush(self._ready, (self._available_ms(number), number))

    def next_for(self, consumer: Subscriber, now_ms: int) -> tuple[int, int] | None:
        """Return the next entry for a consumer, and how often it was redelivered; None for none."""
        if self._rewind_at_ms is not None and self._rewind_at_ms <= now_ms:
            self.redeliver_all()
        if self.kind == ConsumerType.Failover and consumer is not self.consumers[0]:
            return None
        passed: list[tuple[int, int]] = []
        found: int | None = None
        while self._ready and self._ready[0][0] <= now_ms:
            item = heapq.heappop(self._ready)
            number = item[1]
            if self.is_acknowledged(number) or number in self._holders:
                continue
            if self.kind == ConsumerType.KeyShared and self._owner(number) is not consumer:
                passed.append(item)
                continue
            found = number
            break
        for item in passed:
            heapq.heappush(self._ready, item)
        if found is None:
            return None
        self._holders[found] = consumer
        return found, self._redeliveries[found]

    def redeliver(self, number: int, at_ms: int) -> None:
        """Deliver one entry again at a time; consumers that keep the order get all again."""
        if self.kind not in _HOLDS_BACK:
            self._rewind_at_ms = min(at_ms, self._rewind_at_ms or at_ms)
            return
        if self._holders.pop(number, None) is not None:
            self._redeliveries[number] += 1
            heapq.heappush(self._ready, (at_ms, number))

    def redeliver_all(self, consumer: Subscriber | None = None) -> None:
        """Deliver again, now, what one consumer, or any, has and has not acknowledged."""
        self._rewind_at_ms = None
        numbers = [
            number
            for number, holder in self._holders.items()
            if consumer is None or holder is consumer
        ]
        if self.kind in _HOLDS_BACK:
            self._redeliveries.update(numbers)
        for holder in self.consumers:
            if consumer is None or holder is consumer:
                holder.forget()
        self._give_back(numbers)

    def next_event_ms(self) -> int | None:
        """Return from when on something may be there to deliver; None for never."""
        times = [self._ready[0][0]] if self._ready else []
        if self._rewind_at_ms is not None:
            times.append(self._rewind_at_ms)
        return min(times, default=None)

    # -- acknowledgement

    def acknowledge(self, number: int) -> None:
        """Acknowledge one entry."""
        self._holders.pop(number, None)
        if number >= self.mark:
            self._acknowledged.add(number)
        while self.mark in self._acknowledged:
            self._acknowledged.discard(self.mark)
            self.mark += 1

    def acknowledge_before(self, number: int) -> None:
        """Acknowledge every entry before this one."""
        if number <= self.mark:
            return
        self._acknowledged = {other for other in self._acknowledged if other >= number}
        self._holders = {n: holder for n, holder in self._holders.items() if n >= number}
        self.mark = number
        self.acknowledge(number - 1)

    def is_acknowledged(self, number: int) -> bool:
        """Return whether an entry is acknowledged."""
        return number < self.mark or number in self._acknowledged

    def seek(self, number: int) -> None:
        """Start again at an entry: it and what follows are unacknowledged, what is before is."""
        for consumer in self.consumers:
            consumer.forget()
        self.mark = number
        self._acknowledged.clear()
        self._holders.clear()
        self._rewind_at_ms = None
        self._fill()

    @property
    def mark_delete_position(self) -> Position:
        """The last position up to which everything is acknowledged."""
        if self.mark:
            return self._log.entries[self.mark - 1].position
        return Position(self._log.ledgers[0][0], -1)

    @property
    def backlog(self) -> int:
        """How many entries are not acknowledged."""
        return len(self._log) - self.mark - len(self._acknowledged)

    def unacknowledged(self) -> list[int]:
        """Return the numbers of all entries that are not acknowledged, in order."""
        return [n for n in range(self.mark, len(self._log)) if n not in self._acknowledged]

    # -- inside

    def _fill(self) -> None:
        self._ready = [(self._available_ms(n), n) for n in self.unacknowledged()]
        heapq.heapify(self._ready)

    def _give_back(self, numbers: list[int]) -> None:
        for number in numbers:
            del self._holders[number]
            self.stored(number)

    def _available_ms(self, number: int) -> int:
        return self._log.entries[number].available_ms if self.kind in _HOLDS_BACK else 0

    def _owner(self, number: int) -> Subscriber:
        message = self._log.entries[number].messages[0]
        key = message.ordering_key or message.key
        return self.consumers[zlib.crc32(key.encode()) % len(self.consumers)]
