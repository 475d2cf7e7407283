"""Rules of the schema registry for its default compatibility, FULL."""

from __future__ import annotations

import json
from typing import Any

from delaylevel.cluster.port import SchemaVersion
from delaylevel.cluster.schemas import canonical

RECORD_TYPES = ("AVRO", "JSON")
UNTYPED = ("BYTES", "NONE", "AUTO_PUBLISH", "AUTO_CONSUME")


def type_and_definition(schema: Any) -> tuple[str, str]:
    """Return the type and the definition of a ``pulsar.schema.Schema``."""
    info = schema.schema_info()
    return str(info.schema_type()).rpartition(".")[2], info.schema()


def version_of(known: list[SchemaVersion], schema_type: str, definition: str) -> int | None:
    """Return the version of a registered schema; None if the schema is new."""
    for stored in known:
        if stored.type == schema_type and canonical(stored.definition) == canonical(definition):
            return stored.version
    return None


def is_compatible(known: list[SchemaVersion], schema_type: str, definition: str) -> bool:
    """Return whether a new schema is compatible with the last one, in both directions.

    Record types may gain and lose fields with a default value; all other fields must keep their
    types. Avro's type promotions are not supported.
    """
    if not known:
        return True
    last = known[-1]
    if last.type != schema_type:
        return False
    if schema_type not in RECORD_TYPES:
        return canonical(last.definition) == canonical(definition)
    old, new = _fields(last.definition), _fields(definition)
    for name in old.keys() | new.keys():
        if name in old and name in new:
            if old[name].get("type") != new[name].get("type"):
                return False
        elif "default" not in (old.get(name) or new[name]):
            return False
    return True


def _fields(definition: str) -> dict[str, dict[str, Any]]:
    return {field["name"]: field for field in json.loads(definition).get("fields", ())}
