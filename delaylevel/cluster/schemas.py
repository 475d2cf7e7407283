"""Schemas of payloads that travel through topics without a schema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pulsar.schema import BytesSchema, Schema

from delaylevel.model.envelope import SchemaRef
from delaylevel.model.topic_name import TopicName

from .client_parts.cores import set_schema_info, type_named
from .port import SchemaVersion, TopicAdmin

_UNTYPED = ("BYTES", "NONE", "AUTO_PUBLISH", "AUTO_CONSUME")


def bytes_schema() -> Schema:
    """Return the schema of plain bytes."""
    return BytesSchema()


def reference_to(schema: Schema) -> SchemaRef | None:
    """Return the reference to a client-side schema for the envelope; None for plain bytes."""
    info = schema.schema_info()
    if _type_name(info) in _UNTYPED:
        return None
    return SchemaRef.of(_type_name(info), canonical(info.schema()))


def canonical(definition: str) -> str:
    """Return the canonical form of a definition: JSON without white space and with sorted keys.

    The registry keeps the first of several equivalent Avro definitions.
    """
    try:
        value = json.loads(definition)
    except ValueError:
        return definition
    if not value:
        return ""  # clients write "null" or nothing for a primitive type
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def essentials(definition: str) -> str:
    """Return the canonical form without notes (``doc``, ``aliases``), which the registry ignores.

    The registry takes definitions that differ only in these for one version.
    """
    try:
        value = json.loads(definition)
    except ValueError:
        return definition
    return json.dumps(_without_notes(value), sort_keys=True, separators=(",", ":"))


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
    for form in (canonical, essentials):
        own = form(definition)
        for stored in versions:
            if stored.type == schema_type and form(stored.definition) == own:
                return SchemaRef.of(stored.type, canonical(stored.definition))
    return None


def find(admin: TopicAdmin, target: TopicName, reference: SchemaRef) -> EncodedSchema | None:
    """Return the schema of a business topic that an envelope refers to.

    It is for a producer of encoded payloads. None if the registry lacks it.
    """
    for stored in admin.schemas(target):
        if SchemaRef.of(stored.type, canonical(stored.definition)) == reference:
            return EncodedSchema(stored.type, stored.definition)
    return None


class EncodedSchema(Schema):
    """Schema of payloads that are encoded already; it declares the type and passes bytes through.

    Args:
        definition: the registry's own text, so that the broker finds the same version.
    """

    def __init__(self, schema_type: str, definition: str) -> None:
        super().__init__(bytes, type_named(schema_type), _parsed(definition), schema_type)
        set_schema_info(self, schema_type, definition)

    def encode(self, obj: bytes) -> bytes:
        """Return the payload unchanged."""
        return obj

    def decode(self, data: bytes) -> bytes:
        """Return the payload unchanged."""
        return data


def _parsed(definition: str) -> Any:
    try:
        return json.loads(definition)
    except ValueError:
        return None  # a primitive type


def _type_name(info: Any) -> str:
    return str(info.schema_type()).rpartition(".")[2]
