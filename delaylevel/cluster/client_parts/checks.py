"""The checks that the client's own code makes of arguments, run without a broker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from .parts import CREATE_PRODUCER, PRODUCER, ClientPart, has


def check_create_producer(topic: Any, options: dict[str, Any]) -> None:
    """Raise the exception of ``Client.create_producer`` for arguments of a wrong type."""
    if has(ClientPart.CHECKS):
        native = SimpleNamespace(create_producer=lambda *_: None)
        CREATE_PRODUCER(SimpleNamespace(_client=native), topic, **options)
    else:
        _check_types(("topic", topic, str))


def check_message(
    schema: Any,
    content: Any,
    properties: Any,
    keys: tuple[Any, Any],
    not_parkable: tuple[Any, Any, Any],
    event_timestamp: Any,
    deliver_at: Any = None,
) -> None:
    """Raise the exception of ``Producer.send`` for arguments of a wrong type.

    Args:
        schema: object with the method ``encode``.
        content, properties: as the application gave them.
        keys: partition key and ordering key.
        not_parkable: sequence ID, replication clusters and the flag to disable replication.
        event_timestamp, deliver_at: times, ms since the epoch.
    """
    if has(ClientPart.CHECKS):
        owner = SimpleNamespace(_schema=schema)
        times = (event_timestamp, deliver_at, None)
        PRODUCER._build_msg(owner, content, properties, *keys, *not_parkable, *times)
        return
    if content is not None:
        _check_types(("data", schema.encode(content), bytes))
    _check_types(
        ("properties", properties, dict),
        ("partition_key", keys[0], str),
        ("ordering_key", keys[1], str),
        ("sequence_id", not_parkable[0], int),
        ("replication_clusters", not_parkable[1], list),
        ("disable_replication", not_parkable[2], bool),
        ("event_timestamp", event_timestamp, int),
        ("deliver_at", deliver_at, int),
    )
    for text in (properties or {}).items():
        if not all(isinstance(each, str) for each in text):
            raise TypeError(f"names and values of properties must be str, not {text!r}")


def _check_types(*arguments: tuple[str, Any, type]) -> None:
    for name, value, kind in arguments:
        if value is not None and not isinstance(value, kind):
            raise ValueError(
                f"Argument {name} is expected to be of type '{kind.__name__}' and not "
                f"'{type(value).__name__}'"
            )
