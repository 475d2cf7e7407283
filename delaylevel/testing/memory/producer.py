"""Producer of the in-memory Pulsar, below the Python code of pulsar.Producer."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable
from typing import Any

import _pulsar
import pulsar

from delaylevel.model.clock import Clock, duration_ms

from .broker import Broker
from .core import Core, connect_all
from .link import Callback, OutgoingMessage, ProducerLink
from .log import NO_POSITION, StoredMessage, message_id

_MESSAGE_ARGUMENTS = inspect.signature(pulsar.Producer._build_msg)


class MemoryProducer(pulsar.Producer):
    """A ``pulsar.Producer`` that keeps messages in memory.

    Pulsar's own code checks arguments and encodes payloads.
    """

    _clock: Clock

    def _build_msg(self, *args: Any, **kwargs: Any) -> OutgoingMessage:
        built = super()._build_msg(*args, **kwargs)
        given = _MESSAGE_ARGUMENTS.bind(self, *args, **kwargs).arguments
        deliver_at = given["deliver_at"]
        if given["deliver_after"]:
            deliver_at = self._clock.now_ms() + duration_ms(given["deliver_after"])
        return OutgoingMessage(built, given["sequence_id"] or None, deliver_at or None)


class ProducerCore(Core):
    """Core of a producer; ``clock`` is the clock of the client's machine."""

    def __init__(self, broker: Broker, topic: str, options: dict[str, Any], clock: Clock) -> None:
        super().__init__(broker, [topic], options)
        self._name: str = options["producer_name"] or broker.new_name("memory")
        self._current = -1  # index of the link in round-robin routing
        single = [name.full for name in self._partitions] == [self._topic]
        self._links = connect_all(
            ProducerLink(broker, name, -1 if single else index, options, self._name, clock)
            for index, name in enumerate(self._partitions)
        )

    def producer_name(self) -> str:
        return self._name

    def last_sequence_id(self) -> int:
        """Return the greatest sequence ID that was stored in any partition."""
        return max(link.last_sequence_id for link in self._links)

    def is_connected(self) -> bool:
        """Return whether all partitions accept messages."""
        return not self._closed and all(link.connected for link in self._links)

    def send(self, outgoing: OutgoingMessage) -> _pulsar.MessageId:
        """Store the open batch and a message; raise the client's exception on failure."""
        outcomes: list[tuple[Any, Any]] = []
        with self._broker.lock:
            link = self._publish(outgoing, lambda result, stored: outcomes.append((result, stored)))
            if link is not None:
                link.flush()
        self._broker.run_due_tasks()
        result, stored = outcomes[0]
        if result != pulsar.Result.Ok:
            raise _error(result)
        return stored

    def send_async(self, outgoing: OutgoingMessage, callback: Callback | None) -> None:
        """Store a message or add it to the batch; call the callback once it is stored."""
        if callback is not None and not callable(callback):
            raise TypeError("send_async(): incompatible function arguments.")
        with self._broker.lock:
            self._publish(outgoing, callback or (lambda result, stored: None))
        self._broker.run_due_tasks()

    def flush(self) -> None:
        """Store the open batches."""
        self._check_open()
        with self._broker.lock:
            for link in self._links:
                link.flush()
        self._broker.run_due_tasks()

    def flush_async(self, callback: Callable[[Any], None]) -> None:
        """Store the open batches; call the callback with the result."""
        if self._closed:
            callback(pulsar.Result.AlreadyClosed)
            return
        self.flush()
        callback(pulsar.Result.Ok)

    def kill(self) -> None:
        with self._broker.lock:
            for link in self._links:
                link.forget()
        super().kill()

    def disconnect(self) -> None:
        for link in self._links:
            link.disconnect()

    def _publish(self, outgoing: OutgoingMessage, callback: Callback) -> ProducerLink | None:
        if self._closed:
            callback(pulsar.Result.AlreadyClosed, message_id(NO_POSITION))
            return None
        link = self._links[self._choose(outgoing)]
        built = outgoing.built
        stored = StoredMessage(
            None if built.has_null_value() else built.data(),
            dict(built.properties()),
            built.partition_key(),
            built.ordering_key(),
            built.event_timestamp(),
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


def _error(result: Any) -> Exception:
    name = str(result).rpartition(".")[2]
    error: Exception = getattr(pulsar, name, pulsar.PulsarException)(f"Pulsar error: {name}")
    return error
