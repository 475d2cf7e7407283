"""Cores of producers and clients, producers opened without threads, schemas, and checks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import _pulsar
import pulsar

from . import CREATE_PRODUCER, PRODUCER

#: ID of a message that was not stored, as the client passes it to a callback.
_NOT_STORED = (-1, -1, -1, 0)

#: Builder of messages for the core of a producer.
MessageBuilder: Any = _pulsar.MessageBuilder


def producer_core(producer: Any) -> Any | None:
    """Return the core of the client's own producer; None for any other."""
    return producer._producer if type(producer) is PRODUCER else None


def calls_back_later(producer: Any) -> bool:
    """Return True for a producer whose callbacks may come after its flush, False in memory."""
    return type(producer) is PRODUCER


def closing_core(producer: Any) -> Any | None:
    """Return the core with which the client's own producer is closed without waiting, or None."""
    core = producer_core(producer)
    return core if type(core) is _pulsar.Producer else None


def not_stored() -> Any:
    """Return the ID that a callback gets for a message that was not stored."""
    return _pulsar.MessageId(*_NOT_STORED)


def schema_of(producer: Any) -> Any:
    """Return the schema of a producer."""
    return producer._schema


def client_core(client: Any) -> Any | None:
    """Return the core of a client, or what is there in its place; None without one."""
    return getattr(client, "_client", None)


def has_core(client: Any) -> bool:
    """Return True for a client with the C++ core, whose calls may wait for the broker."""
    return type(client_core(client)) is _pulsar.Client


def service_url(owner: Any) -> str | None:
    """Return the address of a client, or of the client of a producer; None if it is not known."""
    info = getattr(client_core(owner), "get_service_info", None)
    return None if info is None else str(info().service_url)


class NativeOpening:
    """One call of ``create_producer`` that was checked, and is made without waiting.

    Args:
        client: a client with the C++ core.
        topic, settings: the arguments of ``create_producer``.
    """

    def __init__(self, client: Any, topic: str, settings: dict[str, Any]) -> None:
        self._core = client._client
        self._arguments: tuple[Any, ...] = ()
        # The client's Python code takes this object for the client and for its core.
        self._client = self
        self._producer: Any = CREATE_PRODUCER(self, topic, **settings)

    def create_producer(self, *arguments: Any) -> None:
        """Keep what the client's Python code gives to the core."""
        self._arguments = arguments

    def start(self, done: Callable[[Any, Any], None]) -> None:
        """Open the producer; ``done`` gets the client's result and the producer."""
        producer, core = self._producer, self._core

        def opened(result: Any, native: Any) -> None:
            if result == pulsar.Result.Ok:
                producer._producer, producer._client = native, core
            done(result, producer)

        core.create_producer_async(*self._arguments, opened)


def type_named(name: str) -> Any:
    """Return the client's schema type of a name, e.g. ``AVRO``."""
    return getattr(type(pulsar.schema.BytesSchema().schema_info().schema_type()), name)


def set_schema_info(schema: Any, name: str, definition: str) -> None:
    """Let a schema declare the text of a definition, byte for byte."""
    schema._schema_info = _pulsar.SchemaInfo(type_named(name), name, definition)


def check_create_producer(topic: Any, options: dict[str, Any]) -> None:
    """Raise the exception of ``Client.create_producer`` for arguments of a wrong type."""
    native = SimpleNamespace(create_producer=lambda *_: None)
    CREATE_PRODUCER(SimpleNamespace(_client=native), topic, **options)


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
    owner = SimpleNamespace(_schema=schema)
    times = (event_timestamp, deliver_at, None)
    PRODUCER._build_msg(owner, content, properties, *keys, *not_parkable, *times)
