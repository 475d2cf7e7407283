"""Schemas of payloads that travel through topics without a schema."""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from typing import Any

from pulsar.schema import Schema

from delaylevel.model.envelope import SchemaRef
from delaylevel.model.topic_name import TopicName

from .client_parts.cores import set_schema_info, type_named
from .port import SchemaVersion, TopicAdmin

_UNTYPED = ("BYTES", "NONE", "AUTO_PUBLISH", "AUTO_CONSUME")


def reference_to(schema: Schema) -> SchemaRef | None:
    """Return the envelope's reference to a schema of the client; None for plain bytes."""
    info = schema.schema_info()
    if _type_name(info) in _UNTYPED:
        return None
    # Right if the registry has the client's own text: see `registered_reference`.
    return SchemaRef.of(_type_name(info), info.schema())


def is_same(one: str, other: str) -> bool:
    """Return True if the registry takes two definitions for one version of a schema."""
    # It compares them as JSON, without notes (``doc``, ``aliases``), and keeps the first text.
    return one == other or _without_notes(_value(one)) == _without_notes(_value(other))


def _value(definition: str) -> Any:
    try:
        # Clients write "null" or nothing for a primitive type.
        return json.loads(definition) or None
    except ValueError:
        return definition or None


def _without_notes(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_notes(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: item if name == "default" else _without_notes(item)
        for name, item in value.items()
        if name not in ("doc", "aliases")
    }


def registered_reference(
    versions: Sequence[SchemaVersion], schema_type: str, definition: str
) -> SchemaRef | None:
    """Return the reference to the registered version that a client's schema has there."""
    for matches in (operator.eq, is_same):  # the text itself comes before notes
        for stored in versions:
            if stored.type == schema_type and matches(stored.definition, definition):
                return SchemaRef.of(stored.type, stored.definition)
    return None


def find(admin: TopicAdmin, target: TopicName, reference: SchemaRef) -> EncodedSchema | None:
    """Return the schema of a business topic that an envelope refers to, if the registry has it."""
    for stored in admin.schemas(target):
        if SchemaRef.of(stored.type, stored.definition) == reference:
            return EncodedSchema(stored.type, stored.definition)
    return None


class EncodedSchema(Schema):
    """Schema of payloads that are encoded already; it passes bytes through."""

    def __init__(self, schema_type: str, definition: str) -> None:
        super().__init__(bytes, type_named(schema_type), None, schema_type)
        # The registry's own text, so that the broker finds the same version.
        set_schema_info(self, schema_type, definition)

    def encode(self, obj: bytes) -> bytes:
        """Return the payload unchanged."""
        return obj

    def decode(self, data: bytes) -> bytes:
        """Return the payload unchanged."""
        return data


def _type_name(info: Any) -> str:
    return str(info.schema_type()).rpartition(".")[2]
