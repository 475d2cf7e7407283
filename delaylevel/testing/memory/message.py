"""A received message of the in-memory Pulsar, below pulsar.Message's own surface."""

from __future__ import annotations

import _pulsar

from delaylevel.model.topic_name import TopicName

from .log import Entry, message_id

NOTHING_COMES = (
    "Pulsar error: TimeOut: there is nothing to receive now, and no call of the in-memory Pulsar "
    "waits: advance its clock"
)


class Received:
    """What ``pulsar.Message`` reads from: one message as it was stored."""

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
        """Return whether it is a null value."""
        return self._stored.value is None

    def length(self) -> int:
        """Return the payload's length."""
        return len(self.data())

    def properties(self) -> dict[str, str]:
        """Return its properties."""
        return dict(self._stored.properties)

    def partition_key(self) -> str:
        """Return its key."""
        return self._stored.key

    def ordering_key(self) -> str:
        """Return its ordering key."""
        return self._stored.ordering_key

    def publish_timestamp(self) -> int:
        """Return when its producer says that it was published."""
        return self._entry.publish_ms

    def event_timestamp(self) -> int:
        """Return its event time."""
        return self._stored.event_ms

    def message_id(self) -> _pulsar.MessageId:
        """Return its id."""
        index = self._topic.partition_index
        position = self._entry.message_position(self._index)
        partition = -1 if index is None else index
        return message_id(position, self._entry.batch_size, partition, self._topic.full)

    def topic_name(self) -> str:
        """Return the partition it comes from."""
        return self._topic.full

    def redelivery_count(self) -> int:
        """Return how often it was redelivered."""
        return self._redeliveries

    def int_schema_version(self) -> int:
        """Return its schema's version; -1 for none."""
        version = self._stored.schema_version
        return -1 if version is None else version

    def schema_version(self) -> str:
        """Return its schema's version, as eight bytes in a string; empty for none."""
        version = self._stored.schema_version
        return "" if version is None else version.to_bytes(8, "big").decode("latin-1")

    def producer_name(self) -> str:
        """Return its producer's name."""
        return self._stored.producer

    def encryption_context(self) -> None:
        """Return None: nothing is encrypted here."""
