"""Messages for the client: built without its checks, or checked before they wait."""

from __future__ import annotations

from typing import Any

from delaylevel.cluster.client_parts.sending import MessageBuilder, check_message
from delaylevel.cluster.schemas import bytes_schema

_BYTES = bytes_schema()


def build(
    body: bytes,
    properties: dict[str, str],
    partition_key: str | None,
    ordering_key: str | None,
    event_timestamp: int | None,
) -> Any:
    """Return a message for the client's native core, without the client's checks.

    Raises:
        TypeError: an argument has a type that the core does not accept.
    """
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


def check_types(
    body: bytes | None,
    *,
    properties: dict[str, str] | None,
    partition_key: str | None,
    ordering_key: str | None,
    event_timestamp: int | None,
    deliver_at: int | None,
) -> None:
    """Raise the client's own errors for arguments that it would refuse later."""
    keys = (partition_key, ordering_key)
    none = (None, None, False)
    check_message(_BYTES, body, properties, keys, none, event_timestamp, deliver_at)
