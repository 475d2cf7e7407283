"""Received message of the in-memory Pulsar, below the Python code of pulsar.Message."""

from __future__ import annotations

import _pulsar

from delaylevel.model.topic_name import TopicName

from .log import Entry, message_id

NOTHING_TO_RECEIVE = (
    "Pulsar error: TimeOut: no message is available now, and no call of the in-memory Pulsar "
    "waits: advance its clock"
)


class Received:
    """Replacement of the C++ message below ``pulsar.Message``; ``number`` is the entry's number."""

    def __init__(
        self, topic: TopicName, entry: Entry, index: int, redeliveries: int, number: int
    ) -> None:
        self._topic = topic
        self._entry = entry
        self._index = index
        self._stored = entry.messages[index]
        self._redeliveries = redeliveries
        self.number = number

    def data(self) -> bytes:
        """Return the payload; empty for a null value."""
        return self._stored.value or b""

    def has_null_value(self) -> bool:
        """Return whether the message has a null value."""
        return self._stored.value is None

    def length(self) -> int:
        """Return the length of the payload, in bytes."""
        return len(self.data())

    def properties(self) -> dict[str, str]:
        """Return the properties."""
        return dict(self._stored.properties)

    def partition_key(self) -> str:
        """Return the partition key."""
        return self._stored.key

    def ordering_key(self) -> str:
        """Return the ordering key."""
        return self._stored.ordering_key

    def publish_timestamp(self) -> int:
        """Return the publish time by the producer's clock, ms since the epoch."""
        return self._entry.publish_ms

    def event_timestamp(self) -> int:
        """Return the event time, ms since the epoch."""
        return self._stored.event_ms

    def message_id(self) -> _pulsar.MessageId:
        """Return the message ID."""
        index = self._topic.partition_index
        position = self._entry.message_position(self._index)
        partition = -1 if index is None else index
        return message_id(position, self._entry.batch_size, partition, self._topic.full)

    def topic_name(self) -> str:
        """Return the full name of the partition."""
        return self._topic.full

    def redelivery_count(self) -> int:
        """Return the number of redeliveries."""
        return self._redeliveries

    def int_schema_version(self) -> int:
        """Return the schema version; -1 without a schema."""
        version = self._stored.schema_version
        return -1 if version is None else version

    def schema_version(self) -> str:
        """Return the schema version as eight bytes in a string; empty without a schema."""
        version = self._stored.schema_version
        return "" if version is None else version.to_bytes(8, "big").decode("latin-1")

    def producer_name(self) -> str:
        """Return the name of the producer."""
        return self._stored.producer

    def encryption_context(self) -> None:
        """Return None: encryption is not supported."""
