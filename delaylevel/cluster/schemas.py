"""Payload schemas on their way through topics that have none of their own."""

from __future__ import annotations

import json
from typing import Any, Protocol

import _pulsar
from pulsar.schema import BytesSchema, Schema

from delaylevel.model.envelope import SchemaRef
from delaylevel.model.topic_name import TopicName

_UNTYPED = ("BYTES", "NONE", "AUTO_PUBLISH", "AUTO_CONSUME")


class StoredSchema(Protocol):
    """One version of a topic's schema, as the registry returns it."""

    @property
    def type(self) -> str:
        """``AVRO``, ``JSON``, ``STRING`` …"""
        ...

    @property
    def definition(self) -> str:
        """The definition, as text."""
        ...


class SchemaRegistry(Protocol):
    """The part of the admin interface that knows a topic's schemas."""

    def schemas(self, topic: TopicName) -> list[Any]:
        """Return every version of the topic's schema, oldest first; empty if it has none."""
        ...


def bytes_schema() -> Schema:
    """Return the schema of plain bytes."""
    return BytesSchema()


def reference_to(schema: Schema) -> SchemaRef | None:
    """Return what names this client-side schema in an envelope; None for plain bytes."""
    info = schema.schema_info()
    if _type_name(info) in _UNTYPED:
        return None
    return SchemaRef.of(_type_name(info), canonical(info.schema()))


def canonical(definition: str) -> str:
    """Return a definition in one spelling: JSON without white space and with sorted keys.

    The registry keeps the first of several spellings of one Avro definition.
    """
    try:
        value = json.loads(definition)
    except ValueError:
        return definition
    if not value:
        return ""  # the clients write "null" or nothing for a primitive type
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def find(registry: SchemaRegistry, target: TopicName, reference: SchemaRef) -> EncodedSchema | None:
    """Look a schema up in the business topic's registry.

    Args:
        registry: the admin interface.
        target: the business topic.
        reference: what the envelope says.

    Returns:
        A schema for a producer of already encoded payloads; None if the registry lacks it.
    """
    for stored in registry.schemas(target):
        if SchemaRef.of(stored.type, canonical(stored.definition)) == reference:
            return EncodedSchema(stored.type, stored.definition)
    return None


class EncodedSchema(Schema):
    """A schema whose payloads are encoded already: it declares the type and passes bytes through.

    Args:
        schema_type: Pulsar's name of the type, e.g. ``AVRO``.
        definition: the definition as the registry has it, so that the same version is found.
    """

    def __init__(self, schema_type: str, definition: str) -> None:
        super().__init__(bytes, getattr(_pulsar.SchemaType, schema_type), None, schema_type)
        self._schema_info = _pulsar.SchemaInfo(
            getattr(_pulsar.SchemaType, schema_type), schema_type, definition
        )

    def encode(self, obj: bytes) -> bytes:
        """Return the payload as it is."""
        return obj

    def decode(self, data: bytes) -> bytes:
        """Return the payload as it is."""
        return data


def _type_name(info: Any) -> str:
    return str(info.schema_type()).rpartition(".")[2]
