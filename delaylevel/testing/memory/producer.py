"""A producer of the in-memory Pulsar, below pulsar.Producer's own surface."""

from __future__ import annotations

import zlib
from datetime import timedelta
from typing import Any

import _pulsar
import pulsar

from delaylevel.model.clock import Clock, duration_ms
from delaylevel.model.topic_name import TopicName

from .broker import Broker
from .link import Callback, Outgoing, ProducerLink
from .log import NOWHERE, StoredMessage, message_id


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
