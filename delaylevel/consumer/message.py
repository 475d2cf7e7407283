"""Messages as a handler receives them."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from delaylevel.model import envelope as env
from delaylevel.model import retries
from delaylevel.model.clock import instant
from delaylevel.model.message import properties_of, text_of
from delaylevel.model.position import Position, stable_id
from delaylevel.model.topic_name import TopicName

_UNKNOWN: Any = object()


class ReceivedMessage:
    """A message of the business topic, or the retried copy of one.

    Attributes:
        raw: the message of the Pulsar client.
        topic: full name of the business topic, without a partition; also of a retried copy.
        subscription: name of the subscription that received it.
        received_ms: time of receipt by the listener, ms since the epoch.
    """

    # A listener creates one for each message, so everything that costs time is read on demand.
    __slots__ = ("_decoded", "_properties", "raw", "received_ms", "subscription", "topic")

    def __init__(self, raw: Any, topic: str, subscription: str, received_ms: int) -> None:
        self.raw = raw
        self.topic = topic
        self.subscription = subscription
        self.received_ms = received_ms
        self._properties: dict[str, str] | None = None
        self._decoded = _UNKNOWN

    @property
    def value(self) -> Any:
        """The content, decoded by the listener's schema; None for a null value."""
        if self._decoded is _UNKNOWN:
            self._decoded = None if self.raw.has_null_value() else self.raw.value()
        return self._decoded

    @property
    def data(self) -> bytes:
        """The payload as it was stored; empty for a null value."""
        payload: bytes = self.raw.data()
        return payload

    @property
    def all_properties(self) -> dict[str, str]:
        """All properties, those of this package included."""
        if self._properties is None:
            self._properties = properties_of(self.raw)
        return self._properties

    @property
    def retry_properties(self) -> dict[str, str]:
        """All properties if this is a copy from the retry topic; otherwise none."""
        # An application may forward a copy with its properties to another topic, or to its own,
        # where it is a new message.
        properties = self.all_properties
        if properties.get(retries.REAL_SUBSCRIPTION) != self.subscription:
            return {}
        if properties.get(retries.REAL_TOPIC) != self.topic:
            return {}
        found = TopicName.parse(self.raw.topic_name()).without_partition
        return properties if found == retries.retry_topic(self.topic, self.subscription) else {}

    def retry_number(self, name: str) -> int | None:
        """Return a number among the properties of a retried copy; None if there is none."""
        text = self.retry_properties.get(name, "")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None

    @property
    def properties(self) -> dict[str, str]:
        """The application's properties."""
        return retries.without_retries(env.application_properties(self.all_properties))

    @property
    def key(self) -> str:
        """The partition key; empty for none."""
        return text_of(self.raw.partition_key)

    @property
    def ordering_key(self) -> str:
        """The ordering key; empty for none."""
        return text_of(self.raw.ordering_key)

    @property
    def event_timestamp_ms(self) -> int:
        """The event time, ms since the epoch; 0 for none."""
        return int(self.raw.event_timestamp())

    @property
    def message_id(self) -> Any:
        """The client's ID of this message or copy: its position on the broker."""
        return self.raw.message_id()

    @property
    def publish_ms(self) -> int:
        """The publish time of this message or copy, ms since the epoch."""
        return int(self.raw.publish_timestamp())

    @property
    def id(self) -> str:
        """The stable ID, the same for all attempts.

        It is the ID with which a delayed message was sent or stored first. For other messages it is
        ``topic-partition:ledger:entry:batch``, the position in the business topic. So it is for a
        message whose producer forwarded the properties of one of another topic.
        """
        found = self.retry_properties.get(retries.RETRY_ID)
        if found:
            return found
        own_id = self.all_properties.get(env.ID)
        return own_id if own_id and self._is_for_here else self.position_id

    @property
    def _is_for_here(self) -> bool:
        """True if the message was sent or released for this topic, with its own ID."""
        target = self.all_properties.get(env.TARGET, "")
        return target == self.topic or target.rpartition("-partition-")[0] == self.topic

    @property
    def identity(self) -> str:
        """ID and key, which identify the message within its topic."""
        key = self.key
        return f"{len(key)}\n{key}{self.id}"

    @property
    def first_position_id(self) -> str:
        """The position of the message before its first attempt."""
        return self.retry_properties.get(retries.ORIGIN_MESSAGE_ID) or self.position_id

    @property
    def position_id(self) -> str:
        """The position of this message or copy: ``topic-partition:ledger:entry:batch``."""
        at = self.raw.message_id()
        position = Position(at.ledger_id(), at.entry_id(), at.batch_index())
        return stable_id(self.raw.topic_name(), position)

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        return (self.retry_number(retries.FAILED_ATTEMPTS) or 0) + 1

    @property
    def first_published_ms(self) -> int:
        """The publish time of the message before its first attempt, ms since the epoch."""
        found = self.retry_number(retries.RETRY_PUBLISHED)
        return self.publish_ms if found is None else found

    @property
    def first_published(self) -> datetime:
        """The publish time of the message before its first attempt, in UTC."""
        return instant(self.first_published_ms)

    @property
    def due(self) -> datetime | None:
        """The due time of a delayed message, in UTC; None for others.

        For a retried copy it is the time for which this attempt was planned.
        """
        due_ms = env.due_of(self.all_properties)
        return None if due_ms is None else instant(due_ms)

    @property
    def lateness(self) -> timedelta | None:
        """The time from the due time to the receipt; None without a due time."""
        due_ms = env.due_of(self.all_properties)
        return None if due_ms is None else timedelta(milliseconds=self.received_ms - due_ms)

    def __repr__(self) -> str:
        return f"<ReceivedMessage {self.id} of {self.topic}, attempt {self.attempt}>"
