"""A producer's connection to one partition: batches, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pulsar

from delaylevel.model.clock import Clock
from delaylevel.model.topic_name import TopicName

from .broker import LARGEST_MESSAGE, Broker, Partition
from .log import NOWHERE, Entry, StoredMessage, message_id

Callback = Callable[[Any, Any], Any]


class Outgoing(NamedTuple):
    """A message on its way: what Pulsar's own builder made, and what that does not show again.

    Attributes:
        built: the ``_pulsar.Message``.
        sequence_id: the application's own; None for the next.
        deliver_at_ms: as given, or computed from a delay; None for none.
    """

    built: Any
    sequence_id: int | None
    deliver_at_ms: int | None


@dataclass
class _Batch:
    """Messages that wait to become one entry (one for each key with key-based batching)."""

    since_ms: int = 0
    bytes: int = 0
    items: list[tuple[StoredMessage, int, Callback]] = field(default_factory=list)


class ProducerLink:
    """The connection to one partition.

    Args:
        broker: the broker.
        name: the partition.
        index: its number in a partitioned topic; -1 where the producer is for it alone.
        options: every argument of ``create_producer``, by name.
        producer_name: the producer's name.
        clock: what the client's machine says.
    """

    def __init__(
        self,
        broker: Broker,
        name: TopicName,
        index: int,
        options: dict[str, Any],
        producer_name: str,
        clock: Clock,
    ) -> None:
        self._broker = broker
        self._topic = name
        self._index = index
        self._options = options
        self.name = producer_name
        self._clock = clock
        self._batch = _Batch()
        self.last_sequence_id: int = options["initial_sequence_id"] or -1
        self._next_sequence = self.last_sequence_id + 1
        self.fenced = False
        self._connect()

    def reconnect(self) -> None:
        """Connect again: the partition is made anew."""
        self._connect()

    def disconnect(self) -> None:
        """Leave the partition; a batch that still waits fails, as it does in Pulsar's client."""
        waiting = self._take_batch()
        for _, _, callback in waiting.items:
            callback(pulsar.Result.AlreadyClosed, message_id(NOWHERE))
        partition = self._broker.partitions.get(self._topic)
        if partition is not None and partition.producers.get(self.name) is self:
            del partition.producers[self.name]
            if not partition.producers:
                partition.exclusive = False

    @property
    def connected(self) -> bool:
        """Whether the topic takes messages from it."""
        partition = self._broker.partitions.get(self._topic)
        return not self.fenced and partition is not None and not partition.terminated

    def send(self, message: StoredMessage, out: Outgoing, done: Callback) -> None:
        """Store a message, or put it into the batch; ``done(result, id)`` is called once stored."""
        sequence_id = out.sequence_id
        if sequence_id is None:  # one that the application gives does not count
            sequence_id, self._next_sequence = self._next_sequence, self._next_sequence + 1
        size = len(message.value or b"")
        if size > LARGEST_MESSAGE:
            done(pulsar.Result.MessageTooBig, message_id(NOWHERE))
        elif not self._options["batching_enabled"] or out.deliver_at_ms is not None:
            self._store([(message, sequence_id, done)], self._clock.now_ms(), out.deliver_at_ms)
        else:
            self._add(message, size, sequence_id, done)

    def flush(self) -> None:
        """Store what waits in the batch."""
        waiting = self._take_batch()
        groups: dict[str, list[tuple[StoredMessage, int, Callback]]] = {}
        keyed = self._options["batching_type"] == pulsar.BatchingType.KeyBased
        for item in waiting.items:
            key = (item[0].ordering_key or item[0].key) if keyed else ""
            groups.setdefault(key, []).append(item)
        for group in groups.values():
            self._store(group, waiting.since_ms, None, batched=True)

    def next_event_ms(self) -> int | None:
        """Return when the batch has waited long enough; None for an empty one."""
        if not self._batch.items:
            return None
        return self._batch.since_ms + int(self._options["batching_max_publish_delay_ms"])

    def tick(self) -> bool:
        """Store a batch that has waited long enough."""
        event_ms = self.next_event_ms()
        if event_ms is None or event_ms > self._clock.now_ms():
            return False
        self.flush()
        return True

    def _take_batch(self) -> _Batch:
        waiting, self._batch = self._batch, _Batch()
        if waiting.items:
            self._broker.ticking.remove(self)
        return waiting

    def _add(self, message: StoredMessage, size: int, sequence_id: int, done: Callback) -> None:
        batch, options = self._batch, self._options
        if batch.items and batch.bytes + size > options["batching_max_allowed_size_in_bytes"]:
            self.flush()
            batch = self._batch
        if not batch.items:
            batch.since_ms = self._clock.now_ms()
            self._broker.ticking.append(self)
        batch.items.append((message, sequence_id, done))
        batch.bytes += size
        full = min(options["batching_max_messages"], options["max_pending_messages"] or 1 << 30)
        if len(batch.items) >= full:
            self.flush()

    def _store(
        self,
        items: list[tuple[StoredMessage, int, Callback]],
        publish_ms: int,
        deliver_at_ms: int | None,
        batched: bool = False,
    ) -> None:
        try:
            if self.fenced:
                raise pulsar.ProducerFenced("Pulsar error: ResultProducerFenced")
            entry: Entry = self._broker.store(
                self._topic,
                tuple(message for message, _, _ in items),
                batched=batched,
                publish_ms=publish_ms,
                deliver_at_ms=deliver_at_ms,
            )
        except pulsar.PulsarException as error:
            result = getattr(pulsar.Result, type(error).__name__)
            for _, _, done in items:
                done(result, message_id(NOWHERE))
            return
        self.last_sequence_id = items[0][1]  # a batch is known by its first message
        for number, (_, _, done) in enumerate(items):
            position = entry.message_position(number)
            done(pulsar.Result.Ok, message_id(position, entry.batch_size, self._index))

    def _connect(self) -> None:
        partition = self._broker.partition(self._topic)
        if partition.terminated:
            raise pulsar.TopicTerminated("Pulsar error: TopicTerminated")
        schema = self._options["schema"].schema_info()
        kind = str(schema.schema_type()).rpartition(".")[2]
        self._enter(partition)
        try:
            self.schema_version = self._broker.register_schema(self._topic, kind, schema.schema())
        except pulsar.IncompatibleSchema:
            self.disconnect()
            raise

    def _enter(self, partition: Partition) -> None:
        modes = pulsar.ProducerAccessMode
        mode = self._options["access_mode"]
        if mode == modes.ExclusiveWithFencing:
            for other in partition.producers.values():
                if isinstance(other, ProducerLink):
                    other.fenced = True
            partition.producers.clear()
        elif partition.producers and mode == modes.WaitForExclusive:
            raise pulsar.OperationNotSupported("no call of the in-memory Pulsar waits")
        elif partition.producers and mode == modes.Exclusive:
            raise pulsar.ProducerFenced("Pulsar error: ResultProducerFenced")
        elif partition.exclusive or self.name in partition.producers:
            raise pulsar.ProducerBusy("Pulsar error: ProducerBusy")
        partition.exclusive = mode != modes.Shared
        partition.producers[self.name] = self
