"""Producer of the in-memory Pulsar, below the Python code of pulsar.Producer."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import _pulsar
import pulsar

from delaylevel.model.clock import duration_ms
from delaylevel.model.topic_name import TopicName
from delaylevel.producer.client_calls import Confirmation, result_of

from .broker import MAX_MESSAGE_BYTES, Broker
from .core import Core
from .partition import NO_POSITION, Entry, Partition, StoredMessage, message_id

Callback = Callable[[Any, Any], Any]
# As measured: the metadata without properties and keys, and the fields around each text.
_METADATA_BYTES = 26
_TEXT_BYTES = 3


class OutgoingMessage(NamedTuple):
    """A message to send: the result of Pulsar's own builder, and values that it hides."""

    built: Any
    sequence_id: int | None  # as given by the application; None for the next
    deliver_at_ms: int | None


class _Item(NamedTuple):
    message: StoredMessage
    sequence_id: int
    done: Callback


@dataclass
class _Entry:
    """Messages on their way to an entry, or an entry per key; they are lost if the process ends."""

    publish_ms: int
    batched: bool
    deliver_at_ms: int | None = None
    bytes: int = 0
    items: list[_Item] = field(default_factory=list)


class ProducerLink:
    """Connection of a producer to one partition, or with the index -1 to its only topic."""

    def __init__(
        self,
        broker: Broker,
        name: TopicName,
        index: int,
        options: dict[str, Any],
        producer_name: str,
    ) -> None:
        self._broker = broker
        self._topic = name
        self._index = index
        self._options = options
        self.name = producer_name
        self.properties = dict(options["properties"] or {})
        self._clock = broker.clock
        self._waiting: list[_Entry] = []  # an open batch is the last: others overtake it
        # There is no deduplication, so a producer of the same name begins again.
        self.last_sequence_id: int = options["initial_sequence_id"] or -1
        self._next_sequence = self.last_sequence_id + 1
        self.fenced = False
        self.reconnect()

    def reconnect(self) -> None:
        """Connect, again if the partition was deleted; this recreates it."""
        partition = self._broker.partition(self._topic)
        if partition.terminated:
            raise pulsar.TopicTerminated("Pulsar error: TopicTerminated")
        self._enter(partition)
        try:
            self.schema_version = self._broker.register_schema(self._topic, self._options["schema"])
        except pulsar.IncompatibleSchema:
            self.disconnect()
            raise

    def disconnect(self) -> None:
        """Disconnect from the partition; an open batch fails, as in Pulsar's client."""
        items = [item for waiting in self.forget() for item in waiting.items]
        if not self._broker.ended:
            for item in items:
                item.done(pulsar.Result.AlreadyClosed, message_id(NO_POSITION))
        partition = self._broker.partitions.get(self._topic)
        if partition is not None and partition.producers.get(self.name) is self:
            del partition.producers[self.name]
            if not partition.producers:
                partition.exclusive = False

    def forget(self) -> list[_Entry]:
        """Drop and return what is not stored yet."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._broker.timed_tasks.remove(self)
        return waiting

    @property
    def connected(self) -> bool:
        """True if the topic accepts messages from the producer."""
        partition = self._broker.partitions.get(self._topic)
        return not self.fenced and partition is not None and not partition.terminated

    def send(self, message: StoredMessage, outgoing: OutgoingMessage, done: Callback) -> None:
        """Store a message or add it to the batch; call ``done(result, id)`` once it is stored."""
        sequence_id = outgoing.sequence_id
        if sequence_id is None:  # an explicit ID does not advance the counter
            sequence_id, self._next_sequence = self._next_sequence, self._next_sequence + 1
        item = _Item(message, sequence_id, done)
        if self._entry_bytes(message) > MAX_MESSAGE_BYTES:
            done(pulsar.Result.MessageTooBig, message_id(NO_POSITION))
        elif not self._options["batching_enabled"] or outgoing.deliver_at_ms is not None:
            self._begin(_Entry(self._clock.now_ms(), False, outgoing.deliver_at_ms, items=[item]))
        else:
            self._add(item)

    def flush(self) -> None:
        """Store everything that is on its way, with the open batch."""
        self._store_all(self.forget())

    @property
    def is_filling(self) -> bool:
        """True if a batch is open."""
        return bool(self._waiting) and self._waiting[-1].batched

    def next_event_ms(self) -> int | None:
        """Return the time at which something is stored, ms since the epoch; None for never."""
        if not self._waiting:
            return None
        if not self._waiting[0].batched:
            return self._clock.now_ms()
        delay_ms = int(self._options["batching_max_publish_delay_ms"])
        return self._waiting[0].publish_ms + delay_ms

    def run_due(self) -> bool:
        """Store what is due; return whether there was any."""
        event_ms = self.next_event_ms()
        if event_ms is None or event_ms > self._clock.now_ms():
            return False
        waiting = self.forget()
        if len(waiting) > 1 and waiting[-1].batched:
            self._begin(waiting.pop())  # the batch is not due
        self._store_all(waiting)
        return True

    def _entry_bytes(self, message: StoredMessage) -> int:
        """Return about the bytes that the client counts: compressed payload, and metadata."""
        texts = [text for pair in message.properties.items() for text in pair]
        texts += filter(None, (message.key, message.ordering_key))
        metadata = _METADATA_BYTES + sum(_TEXT_BYTES + len(text.encode()) for text in texts)
        payload = message.value or b""
        compresses = self._options["compression_type"] != pulsar.CompressionType.NONE
        if len(payload) + metadata > MAX_MESSAGE_BYTES and compresses:
            payload = zlib.compress(payload, 1)
        return len(payload) + metadata

    def _begin(self, entry: _Entry) -> None:
        if not self._waiting:
            self._broker.timed_tasks.insert(0, self)  # before listeners
        self._waiting.insert(len(self._waiting) - self.is_filling, entry)

    def _add(self, item: _Item) -> None:
        options, size = self._options, len(item.message.value or b"")
        if self.is_filling:
            most_bytes = options["batching_max_allowed_size_in_bytes"]
            if self._waiting[-1].bytes + size > most_bytes:
                self.flush()
        if not self.is_filling:
            self._begin(_Entry(self._clock.now_ms(), True))
        batch = self._waiting[-1]
        batch.items.append(item)
        batch.bytes += size
        full = min(options["batching_max_messages"], options["max_pending_messages"] or 1 << 30)
        if len(batch.items) >= full:
            self.flush()

    def _store_all(self, waiting: list[_Entry]) -> None:
        # Consumers with Key_Shared get whole entries, so each has only one key.
        keyed = self._options["batching_type"] == pulsar.BatchingType.KeyBased
        for entry in waiting:
            groups: dict[str, list[_Item]] = {}
            for item in entry.items:
                key = (item.message.ordering_key or item.message.key) if keyed else ""
                groups.setdefault(key, []).append(item)
            for group in groups.values():
                self._store(group, entry)

    def _store(self, items: list[_Item], waiting: _Entry) -> None:
        try:
            if self.fenced:
                raise pulsar.ProducerFenced("Pulsar error: ResultProducerFenced")
            entry: Entry = self._broker.store(
                self._topic,
                tuple(item.message for item in items),
                batched=waiting.batched,
                publish_ms=waiting.publish_ms,
                deliver_at_ms=waiting.deliver_at_ms,
            )
        except pulsar.PulsarException as error:
            for item in items:
                item.done(result_of(error), message_id(NO_POSITION))
            return
        self.last_sequence_id = items[0].sequence_id  # of a batch, its first message, as in Pulsar
        for number, item in enumerate(items):
            position = entry.message_position(number)
            item.done(pulsar.Result.Ok, message_id(position, entry.batch_size, self._index))

    def _enter(self, partition: Partition) -> None:
        modes = pulsar.ProducerAccessMode
        mode = self._options["access_mode"]
        # The fenced ones learn it at their next message, as in a broker.
        if mode == modes.ExclusiveWithFencing:
            for other in partition.producers.values():
                if isinstance(other, ProducerLink):
                    other.fenced = True
            partition.producers.clear()
        elif partition.producers and mode != modes.Shared:
            raise pulsar.ProducerFenced("Pulsar error: ResultProducerFenced")
        elif partition.exclusive or self.name in partition.producers:
            raise pulsar.ProducerBusy("Pulsar error: ProducerBusy")
        partition.exclusive = mode != modes.Shared
        partition.producers[self.name] = self


_MESSAGE_ARGUMENTS = inspect.signature(pulsar.Producer._build_msg)


class MemoryProducer(pulsar.Producer):
    """A ``pulsar.Producer`` in memory: Pulsar's own code checks arguments and encodes payloads."""

    def _build_msg(self, *args: Any, **kwargs: Any) -> OutgoingMessage:
        built = super()._build_msg(*args, **kwargs)
        given = _MESSAGE_ARGUMENTS.bind(self, *args, **kwargs).arguments
        deliver_at = given["deliver_at"]
        if given["deliver_after"]:
            deliver_at = self._producer.clock.now_ms() + duration_ms(given["deliver_after"])
        return OutgoingMessage(built, given["sequence_id"] or None, deliver_at or None)


class ProducerCore(Core):
    """Core of a producer."""

    def __init__(self, broker: Broker, topic: str, options: dict[str, Any]) -> None:
        super().__init__(broker, [topic], options)
        self.clock = broker.clock
        self._name: str = options["producer_name"] or broker.new_name("memory")
        self._current = -1  # index of the link in round-robin routing
        single = [name.full for name in self._partitions] == [self._topic]
        self._connect(
            ProducerLink(broker, name, -1 if single else index, options, self._name)
            for index, name in enumerate(self._partitions)
        )

    def producer_name(self) -> str:
        return self._name

    def last_sequence_id(self) -> int:
        return int(max(link.last_sequence_id for link in self._links))

    def is_connected(self) -> bool:
        return not self._closed and all(link.connected for link in self._links)

    def send(self, outgoing: OutgoingMessage) -> _pulsar.MessageId:
        """Store the open batch and a message; raise the client's exception on failure."""
        confirmation = Confirmation()
        with self._broker.lock:
            link = self._publish(outgoing, confirmation)
            if link is not None:
                link.flush()
        self._broker.run_due_tasks()
        return confirmation.message_id()

    def send_async(self, outgoing: OutgoingMessage, callback: Callback | None) -> None:
        """Store a message or add it to the batch; call the callback once it is stored."""
        if callback is not None and not callable(callback):
            raise TypeError("send_async(): incompatible function arguments.")
        with self._broker.lock:
            self._publish(outgoing, callback or (lambda result, stored: None))
        self._broker.run_due_tasks()

    def flush(self) -> None:
        self._check_open()
        with self._broker.lock:
            for link in self._links:
                link.flush()
        self._broker.run_due_tasks()

    def _publish(self, outgoing: OutgoingMessage, callback: Callback) -> ProducerLink | None:
        if self._closed:
            callback(pulsar.Result.AlreadyClosed, message_id(NO_POSITION))
            return None
        link: ProducerLink = self._links[self._choose(outgoing)]
        built = outgoing.built
        stored = StoredMessage(
            built,
            None if built.has_null_value() else built.data(),
            dict(built.properties()),
            built.partition_key(),
            built.ordering_key(),
            self._name,
            link.schema_version,
        )
        link.send(stored, outgoing, callback)
        return link

    def _choose(self, outgoing: OutgoingMessage) -> int:
        count = len(self._links)
        if count == 1:
            return 0
        router = self._options["message_router"]
        if router is not None:
            return int(router(pulsar.Message._wrap(outgoing.built), count))
        key = outgoing.built.partition_key()
        if key:
            return zlib.crc32(key.encode()) % count
        if self._options["message_routing_mode"] == pulsar.PartitionsRoutingMode.UseSinglePartition:
            return zlib.crc32(self._name.encode()) % count
        filling = self._current >= 0 and self._links[self._current].is_filling
        if not filling:  # as in Pulsar, fill a batch before moving on to the next partition
            self._current = (self._current + 1) % count
        return self._current
