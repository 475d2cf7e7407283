"""A message before it is sent, and the checks of its arguments and of its size in later hops.

The plain client's own code checks the arguments, without a broker. So the same mistakes raise the
same exceptions as with the plain client.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

from delaylevel.cluster.client_parts.cores import MessageBuilder, check_message
from delaylevel.errors import MessageTooLargeError
from delaylevel.model import envelope as env
from delaylevel.model.level_topic import LONGEST_NAME, LevelTopicDescription
from delaylevel.model.retries import REAL_SUBSCRIPTION

from .client_calls import as_client_error


class Message(NamedTuple):
    """A message as an application gives it to ``send``, whose arguments the attributes are."""

    content: Any = None
    properties: Mapping[str, str] | None = None
    partition_key: str | None = None
    ordering_key: str | None = None
    sequence_id: int | None = None
    replication_clusters: list[str] | None = None
    disable_replication: bool | None = False
    event_timestamp: int | None = None
    deliver_at: int | datetime | None = None
    deliver_after: timedelta | None = None
    message_id: str | None = None
    expires_at: int | datetime | None = None
    expires_after: timedelta | None = None
    replaces: str | None = None  # the ID of the message that this one replaces

    @property
    def not_parkable(self) -> dict[str, Any]:
        """The options that have no meaning in a level topic."""
        return {
            "sequence_id": self.sequence_id,
            "replication_clusters": self.replication_clusters,
            "disable_replication": self.disable_replication,
        }


def build(
    body: bytes,
    properties: dict[str, str],
    partition_key: str | None,
    ordering_key: str | None,
    event_timestamp: int | None,
) -> Any:
    """Return a message for the client's native core; raise TypeError as the core does."""
    builder = MessageBuilder()
    builder.content(body)
    builder.properties(properties)
    if partition_key:
        builder.partition_key(partition_key)
    if ordering_key:
        builder.ordering_key(ordering_key)
    if event_timestamp is not None:
        # The core takes numbers of other classes, too; the client does not.
        if type(event_timestamp) is not int:
            raise TypeError("event_timestamp must be an int")
        if event_timestamp:
            builder.event_timestamp(event_timestamp)
    return builder.build()


#: ``maxMessageSize`` of a broker with default settings, in bytes. The client learns the broker's
#: own limit when it connects, but does not tell Python.
DEFAULT_MAX_MESSAGE_SIZE = 5 * 1024 * 1024
#: Brokers with less are refused: what hops add would be most of a message.
SMALLEST_MAX_MESSAGE_SIZE = 16 * 1024

#: Bytes that one key, property name or value needs in addition to its text: tags and lengths of
# the client's encoding (protobuf).
FRAMING = 16
# What compression can add to a payload that it cannot compress: LZ4 adds the most, 1 byte in 255.
_INCOMPRESSIBLE = 255
# The part of the reserve for what a listener adds to a copy for a further attempt: the name of the
# subscription several times, names of topics, IDs, positions and counters.
_RETRY = 2048 + 3 * LONGEST_NAME


class SizeLimit:
    """The largest size of a message that is parked in one level topic.

    A level topic's message is published again at each hop, with more properties and perhaps without
    compression. It may be held, become a dead letter, be rescheduled or retried by a listener, and
    each adds more. The client writes the properties of a batched message into the payload, to which
    the broker's limit applies. So the limit is for the uncompressed payload, keys and the
    application's properties together, less the level topic's reserve for everything else.
    """

    def __init__(
        self, description: LevelTopicDescription, max_message_size: int = DEFAULT_MAX_MESSAGE_SIZE
    ) -> None:
        self.reserve = description.reserve + max_message_size // _INCOMPRESSIBLE
        self._max_message_size = max_message_size
        self.bytes = max_message_size - self.reserve

    def check(
        self,
        body: bytes | None,
        properties: Mapping[str, str] | None,
        partition_key: str | None,
        ordering_key: str | None,
    ) -> None:
        """Raise an error if a message is too large to be parked."""
        size = len(body or b"")
        for key in (partition_key, ordering_key):
            if key:
                size += _bytes(key) + FRAMING
        for name, value in (properties or {}).items():
            if not name.startswith(env.PREFIX):
                size += _bytes(name) + _bytes(value) + 2 * FRAMING
        if properties and REAL_SUBSCRIPTION in properties:
            size -= _RETRY  # a listener's copy
        if size <= self.bytes:
            return
        error = MessageTooLargeError(
            f"the message has {size:,} bytes, uncompressed, with keys and properties, and a parked "
            f"message at most {self.bytes:,}: the broker's limit is {self._max_message_size:,} "
            f"bytes (MessageTooBig), and hops add up to {self.reserve:,}. Send a reference to the "
            "payload; or, if the broker's maxMessageSize is higher, give the producer "
            "max_message_size. The message was not sent",
            size=size,
            limit=self.bytes,
        )
        raise as_client_error(error)


def _bytes(text: str) -> int:
    # The client refuses anything but text later, with an error of its own.
    if not isinstance(text, str):
        return 0
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def check_arguments(schema: Any, message: Message) -> None:
    """Raise the exception of ``pulsar.Producer.send`` for arguments of a wrong type."""
    # The plain client builds a whole message. This is left out for the usual types. Times are left
    # out, too: ours may also be datetimes.
    properties, time_ms = message.properties, message.event_timestamp
    usual = (
        (properties is None or type(properties) is dict)
        and all(type(k) is str and type(v) is str for k, v in (properties or {}).items())
        and (message.partition_key is None or type(message.partition_key) is str)
        and (message.ordering_key is None or type(message.ordering_key) is str)
        and (time_ms is None or (type(time_ms) is int and time_ms >= 0))
        and message.sequence_id is None
        and message.replication_clusters is None
        and message.disable_replication is False
    )
    if not usual:
        check_message(
            schema,
            message.content,
            properties,
            (message.partition_key, message.ordering_key),
            tuple(message.not_parkable.values()),
            time_ms,
        )


def check_encoded(schema: Any, content: Any) -> bytes | None:
    """Return the encoded payload; for a wrong one, raise what ``pulsar.Producer.send`` raises."""
    if content is None:
        return None
    body = schema.encode(content)
    if not isinstance(body, bytes):
        encoded = SimpleNamespace(encode=lambda _: body)
        check_message(encoded, content, None, (None, None), (None, None, False), None)
    return body  # type: ignore[no-any-return]
