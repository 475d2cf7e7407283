"""A producer of the in-memory Pulsar, below pulsar.Producer's own surface."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import _pulsar
import pulsar

from delaylevel.clock import Clock, duration_ms
from delaylevel.testing._broker import LARGEST_MESSAGE, Broker, Partition
from delaylevel.testing._log import NOWHERE, Entry, StoredMessage, message_id
from delaylevel.topicname import TopicName

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


class Producer(pulsar.Producer):
    """A ``pulsar.Producer`` whose messages stay in memory.

    Arguments are checked, and payloads encoded, by Pulsar's own code.
    """

    _clock: Clock

    def _build_msg(
        self,
        content: Any,
        properties: Any,
        partition_key: Any,
        ordering_key: Any,
        sequence_id: Any,
        replication_clusters: Any,
        disable_replication: Any,
        event_timestamp: Any,
        deliver_at: int | None,
        deliver_after: timedelta | None,
    ) -> Outgoing:
        built = super()._build_msg(
            content,
            properties,
            partition_key,
            ordering_key,
            sequence_id,
            replication_clusters,
            disable_replication,
            event_timestamp,
            deliver_at,
            deliver_after,
        )
        if deliver_after:
            deliver_at = self._clock.now_ms() + duration_ms(deliver_after)
        return Outgoing(built, sequence_id or None, deliver_at or None)


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


class ProducerCore:
    """What ``pulsar.Producer`` calls: routes messages to partitions and counts them.

    Args:
        broker: the broker.
        topic: as the application names it.
        options: every argument of ``create_producer``, by name.
        clock: what the client's machine says.
    """

    def __init__(self, broker: Broker, topic: str, options: dict[str, Any], clock: Clock) -> None:
        self._broker = broker
        names = broker.partition_names(topic)
        self._topic = TopicName.parse(topic).full
        self._name: str = options["producer_name"] or broker.new_name("memory")
        self._router = options["message_router"]
        self._mode = options["message_routing_mode"]
        self._turn = -1
        self._closed = False
        single = len(names) == 1 and names[0].full == self._topic
        self._links: list[ProducerLink] = []
        try:
            for index, name in enumerate(names):
                number = -1 if single else index
                link = ProducerLink(broker, name, number, options, self._name, clock)
                self._links.append(link)
        except pulsar.PulsarException:
            for link in self._links:
                link.disconnect()
            raise

    def topic(self) -> str:
        """Return the full name of the topic."""
        return self._topic

    def producer_name(self) -> str:
        """Return the producer's name."""
        return self._name

    def last_sequence_id(self) -> int:
        """Return the last sequence id that was stored, the greatest of all partitions."""
        return max(link.last_sequence_id for link in self._links)

    def is_connected(self) -> bool:
        """Return whether all partitions take messages."""
        return not self._closed and all(link.connected for link in self._links)

    def send(self, out: Outgoing) -> _pulsar.MessageId:
        """Store a message, and what waits before it in the batch; raises what went wrong."""
        outcomes: list[tuple[Any, Any]] = []
        with self._broker.lock:
            link = self._publish(out, lambda result, stored: outcomes.append((result, stored)))
            if link is not None:
                link.flush()
        self._broker.settle()
        result, stored = outcomes[0]
        if result != pulsar.Result.Ok:
            raise _error(result)
        return stored

    def send_async(self, out: Outgoing, callback: Callback | None) -> None:
        """Store a message, or add it to the batch; the callback is called once it is stored."""
        with self._broker.lock:
            self._publish(out, callback or _ignore)
        self._broker.settle()

    def flush(self) -> None:
        """Store what waits in batches."""
        self._check_open()
        with self._broker.lock:
            for link in self._links:
                link.flush()
        self._broker.settle()

    def close(self) -> None:
        """Disconnect. What still waits in a batch is not sent: flush first."""
        self._check_open()
        self.shut()

    def shut(self) -> None:
        """Disconnect, if that is not done yet."""
        if self._closed:
            return
        self._closed = True
        with self._broker.lock:
            for link in self._links:
                link.disconnect()

    def _check_open(self) -> None:
        if self._closed or not self.is_connected():
            raise pulsar.AlreadyClosed("Pulsar error: AlreadyClosed")

    def _publish(self, out: Outgoing, callback: Callback) -> ProducerLink | None:
        if self._closed:
            callback(pulsar.Result.AlreadyClosed, message_id(NOWHERE))
            return None
        link = self._links[self._choose(out)]
        built = out.built
        stored = StoredMessage(
            None if built.has_null_value() else built.data(),
            dict(built.properties()),
            built.partition_key(),
            built.ordering_key(),
            built.event_timestamp(),
            self._name,
            link.schema_version,
        )
        link.send(stored, out, callback)
        return link

    def _choose(self, out: Outgoing) -> int:
        count = len(self._links)
        if count == 1:
            return 0
        if self._router is not None:
            return int(self._router(pulsar.Message._wrap(out.built), count))
        key = out.built.partition_key()
        if key:
            return zlib.crc32(key.encode()) % count
        if self._mode == pulsar.PartitionsRoutingMode.UseSinglePartition:
            return zlib.crc32(self._name.encode()) % count
        filling = self._turn >= 0 and self._links[self._turn].next_event_ms() is not None
        if not filling:  # a batch is filled before the next partition has its turn
            self._turn = (self._turn + 1) % count
        return self._turn


def _ignore(result: Any, stored: Any) -> None:
    """Serve as the callback where the application gave none."""


def _error(result: Any) -> Exception:
    name = str(result).rpartition(".")[2]
    kind = getattr(pulsar, name, pulsar.PulsarException)
    error: Exception = kind(f"Pulsar error: {name}")
    return error
