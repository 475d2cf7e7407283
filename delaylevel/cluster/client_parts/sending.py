"""Cores of producers and clients, producers opened without threads, and schemas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import _pulsar
import pulsar

from .parts import CREATE_PRODUCER, PRODUCER, ClientPart, has, missing_part

#: ID of a message that was not stored, as the client passes it to a callback.
_NOT_STORED = (-1, -1, -1, 0)

#: Builder of messages for the core of a producer.
MessageBuilder: Any = getattr(_pulsar, "MessageBuilder", None)


def producer_core(producer: Any) -> Any | None:
    """Return the core of the client's own producer; None for any other, or without the part."""
    if type(producer) is not PRODUCER or not has(ClientPart.PRODUCER):
        return None
    return producer._producer


def calls_back_later(producer: Any) -> bool:
    """Return True for a producer whose callbacks may come after its flush, False in memory."""
    return type(producer) is PRODUCER


def closing_core(producer: Any) -> Any | None:
    """Return the core with which the client's own producer is closed without waiting, or None."""
    core = producer_core(producer)
    return core if type(core) is _pulsar.Producer else None


def not_stored() -> Any:
    """Return the ID that a callback gets for a message that was not stored."""
    native: Any = getattr(_pulsar, "MessageId", pulsar.MessageId)
    return native(*_NOT_STORED)


def schema_of(owner: Any, stated: Any = None) -> Any:
    """Return the schema of a producer or consumer.

    Args:
        owner: the producer or consumer.
        stated: the schema that the application has named; None if it has not.

    Raises:
        PrerequisiteError: the client does not tell, and no schema is stated.
    """
    if has(ClientPart.SCHEMA):
        return owner._schema
    if stated is None:
        raise missing_part(ClientPart.SCHEMA, "name its schema with schema=…")
    return stated


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
    """Let a schema declare the text of a definition, byte for byte, if the client allows it."""
    if has(ClientPart.SCHEMA_INFO):
        schema._schema_info = _pulsar.SchemaInfo(type_named(name), name, definition)
