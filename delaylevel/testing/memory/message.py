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
    """Replacement of the C++ message below ``pulsar.Message``, with the same methods.

    ``number`` is the number of the entry in its log.
    """

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
        return self._stored.value or b""

    def has_null_value(self) -> bool:
        return self._stored.value is None

    def length(self) -> int:
        return len(self.data())

    def properties(self) -> dict[str, str]:
        return dict(self._stored.properties)

    def partition_key(self) -> str:
        return self._stored.key

    def ordering_key(self) -> str:
        return self._stored.ordering_key

    def publish_timestamp(self) -> int:
        return self._entry.publish_ms

    def event_timestamp(self) -> int:
        return self._stored.event_ms

    def message_id(self) -> _pulsar.MessageId:
        index = self._topic.partition_index
        position = self._entry.message_position(self._index)
        partition = -1 if index is None else index
        return message_id(position, self._entry.batch_size, partition, self._topic.full)

    def topic_name(self) -> str:
        return self._topic.full

    def redelivery_count(self) -> int:
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
        return self._stored.producer

    def encryption_context(self) -> None:
        """Return None: encryption is not supported."""
