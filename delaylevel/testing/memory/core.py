"""Common part of the in-memory producer, consumer and reader, and received messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import _pulsar
import pulsar

from delaylevel.model.topic_name import TopicName
from delaylevel.producer.client_calls import result_of

from .broker import Broker
from .partition import Entry, Link, message_id

NOTHING_TO_RECEIVE = (
    "Pulsar error: TimeOut: no message is available now, and no call of the in-memory Pulsar "
    "waits: advance its clock"
)


class Received:
    """Replacement of the C++ message below ``pulsar.Message``, with the same methods."""

    def __init__(self, topic: TopicName, entry: Entry, index: int, redeliveries: int = 0) -> None:
        self._topic = topic
        self._entry = entry
        self._stored = entry.messages[index]
        self._redeliveries = redeliveries
        self.position = entry.message_position(index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stored.built, name)  # the message as its producer built it

    def publish_timestamp(self) -> int:
        return self._entry.publish_ms

    def message_id(self) -> _pulsar.MessageId:
        index = self._topic.partition_index
        partition = -1 if index is None else index
        return message_id(self.position, self._entry.batch_size, partition, self._topic.full)

    def topic_name(self) -> str:
        return self._topic.full

    def redelivery_count(self) -> int:
        return self._redeliveries

    def int_schema_version(self) -> int:
        version = self._stored.schema_version
        return -1 if version is None else version

    def schema_version(self) -> str:
        """Return the schema version as eight bytes in a string; empty without a schema."""
        version = self._stored.schema_version
        return "" if version is None else version.to_bytes(8, "big").decode("latin-1")

    def producer_name(self) -> str:
        return self._stored.producer


# The calls of ``pulsar.asyncio`` whose callback gets a value with the result.
_WITH_VALUE = ("get_last_message_id", "has_message_available", "get_topic_partitions")


class Closable:
    """Replacement of a C++ object below the Python code of ``pulsar``, with the same methods."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._closed = False

    def __getattr__(self, name: str) -> Any:
        """Return the form of a call for ``pulsar.asyncio``: a callback comes last."""
        call, _, rest = name.rpartition("_async")
        if not call or rest or call.startswith("_"):
            raise AttributeError(f"the in-memory Pulsar does not support {name!r}")
        function = getattr(self, call)

        def run(*arguments: Any) -> None:
            *given, callback = arguments
            value, result = None, pulsar.Result.Ok
            try:
                value = function(*given)
            except pulsar.PulsarException as error:
                result = result_of(error)
            callback(result, value) if call in _WITH_VALUE else callback(result)

        return run

    def close(self) -> None:
        self._check_open()
        self.shutdown()

    def _check_open(self) -> None:
        if self._closed:
            raise pulsar.AlreadyClosed("Pulsar error: AlreadyClosed")


# Arguments that are refused instead of silently ignored.
_UNSUPPORTED = (
    "reader_listener",
    "dead_letter_policy",
    "unacked_messages_timeout_ms",
    "is_read_compacted",
    "batch_index_ack_enabled",
    "crypto_key_reader",
)


class Core(Closable):
    """Core of a producer, consumer or reader; ``options`` are the arguments of its creation."""

    def __init__(self, broker: Broker, topics: list[str], options: dict[str, Any]) -> None:
        super().__init__(broker)
        for name in _UNSUPPORTED:
            if options.get(name):
                raise pulsar.OperationNotSupported(
                    f"the in-memory Pulsar does not support {name}: leave it out"
                )
        self._partitions = [name for topic in topics for name in broker.partition_names(topic)]
        self._topic = TopicName.parse(topics[0]).full if len(topics) == 1 else ""
        self._options = options
        self._links: list[Any] = []

    def topic(self) -> str:
        return self._topic

    def is_connected(self) -> bool:
        return not self._closed

    def shutdown(self) -> None:
        if not self._closed:
            self._closed = True
            with self._broker.lock:
                self.disconnect()

    def disconnect(self) -> None:
        """Disconnect from all partitions."""
        for link in self._links:
            link.disconnect()

    def _connect(self, links: Iterable[Link]) -> None:
        """Create links, which connect to their partitions; if one fails, disconnect the others."""
        try:
            for link in links:
                self._links.append(link)
        except pulsar.PulsarException:
            self.disconnect()
            raise
