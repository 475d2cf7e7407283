"""Reader of the in-memory Pulsar, below the Python code of pulsar.Reader."""

from __future__ import annotations

from typing import Any

import pulsar

from delaylevel.model.position import Position
from delaylevel.model.topic_name import TopicName

from .broker import Broker
from .core import Core
from .log import NO_POSITION, Entry
from .message import NOTHING_TO_RECEIVE, Received


class ReaderCore(Core):
    """Core of a reader that starts at the message ID ``start``."""

    def __init__(self, broker: Broker, topic: str, start: Any, options: dict[str, Any]) -> None:
        super().__init__(broker, [topic], options)
        self._inclusive = bool(options["start_message_id_inclusive"])
        self.name: str = options["reader_name"] or broker.new_name("reader")
        for name in self._partitions:
            partition = broker.partition(name)
            broker.check_consumer_schema(partition, options["schema"])
            partition.consumers.append(self)
        self._next: dict[TopicName, Position] = {}
        self._start_at(start)

    def reconnect(self) -> None:
        """Connect again; this recreates deleted partitions."""
        for name in self._partitions:
            partition = self._broker.partition(name)
            if self not in partition.consumers:
                partition.consumers.append(self)

    def read_next(self, timeout_millis: int | None = None) -> Received:
        """Return the next message.

        Raises:
            pulsar.Timeout: no message is available now.
        """
        self._check_open()
        with self._broker.lock:
            for name in self._partitions:
                found = self._find(name)
                if found is not None:
                    entry, index, number = found
                    self._next[name] = entry.message_position(index).next
                    return Received(name, entry, index, 0, number)
        raise pulsar.Timeout(NOTHING_TO_RECEIVE)

    def has_message_available(self) -> bool:
        """Return whether there is an unread message."""
        self._check_open()
        with self._broker.lock:
            return any(self._find(name) is not None for name in self._partitions)

    def seek(self, target: Any) -> None:
        """Move to a message ID or a publish time, ms since the epoch."""
        self._check_open()
        self._start_at(target)

    def disconnect(self) -> None:
        for name in self._partitions:
            partition = self._broker.partitions.get(name)
            if partition is not None and self in partition.consumers:
                partition.consumers.remove(self)

    def _start_at(self, start: Any) -> None:
        for name in self._partitions:
            self._next[name] = self._position(name, start)

    def _position(self, name: TopicName, start: Any) -> Position:
        log = self._broker.partition(name).log
        if isinstance(start, int):
            number = log.first_published_at(start)
            at_end = Position(log.ledgers[-1][0], log.ledgers[-1][1])
            return log.entries[number].position if number < len(log) else at_end
        position = Position(start.ledger_id(), start.entry_id(), start.batch_index())
        if position.ledger == pulsar.MessageId.latest.ledger_id():
            if not log.entries:
                return NO_POSITION
            last = log.entries[-1].last_position
            return last if self._inclusive else last.next
        if self._inclusive:
            return position
        number = log.first_at(position)
        batch = number < len(log) and log.entries[number].batched
        # A position without batch index comes before all messages of a batch, as in Pulsar.
        return position if batch and position.batch < 0 else position.next

    def _find(self, name: TopicName) -> tuple[Entry, int, int] | None:
        log = self._broker.partition(name).log
        start = self._next[name]
        for number in range(log.first_at(start), len(log)):
            if number in log.erased:
                continue
            entry = log.entries[number]
            for index in range(len(entry.messages)):
                if entry.message_position(index) >= start:
                    return entry, index, number
        return None
