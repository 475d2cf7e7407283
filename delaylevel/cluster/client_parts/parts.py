"""The private parts of the client, and the search for them."""

from __future__ import annotations

import logging
from enum import Enum
from functools import lru_cache
from importlib import metadata
from types import CodeType
from typing import Any

import _pulsar
import pulsar

from delaylevel.errors import PrerequisiteError

log = logging.getLogger(__name__)

# Bound here: an application may replace the client's classes with ours.
CLIENT = pulsar.Client
CREATE_PRODUCER = pulsar.Client.create_producer
PRODUCER = pulsar.Producer
CONSUMER = pulsar.Consumer
_READER, _MESSAGE = pulsar.Reader, pulsar.Message
_SCHEMA = pulsar.schema.Schema


class ClientPart(Enum):
    """A private part of the client: its use, and the replacement; empty if there is none."""

    PRODUCER = ("publish below the client's checks", "Producer.send_async()")
    READER = ("read below the client's wrappers", "Reader.read_next()")
    CONSUMER = ("receive below the client's wrappers", "Consumer.receive()")
    MESSAGE = ("read the fields of a received message", "the methods of Message")
    OPENING = ("open producers without threads", "Client.create_producer() in threads")
    CHECKS = ("check arguments before a message waits", "checks of our own")
    SCHEMA_INFO = ("declare a schema by its text", "Schema(), which formats the text again")
    SCHEMA = ("find the schema of a producer", "the argument schema=")
    ASYNC_OPENING = ("close a producer that nobody waits for", "a task of its own")
    ASYNC_CALLS = ("flush and close in threads", "the asynchronous calls")
    NULL_VALUES = ("tell null values from empty ones", "")
    SHARED_CORE = ("read with the connections of an asyncio client", "")
    IN_MEMORY = ("replace the broker by memory in tests", "")

    def __init__(self, use: str, instead: str) -> None:
        self.use = use
        self.instead = instead


def _refers(function: Any, *names: str) -> bool:
    """Return True if the code of a function, or of one inside it, uses all these names."""
    code = getattr(function, "__code__", None)
    return code is not None and set(names) <= _names(code)


@lru_cache(maxsize=64)
def _names(code: CodeType) -> frozenset[str]:
    inner = [_names(each) for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset().union(code.co_names, *inner)


def _has(owner: str, *names: str) -> bool:
    native = getattr(_pulsar, owner, None)
    return native is not None and all(hasattr(native, name) for name in names)


def _of(owner: type, method: str, *names: str) -> bool:
    return _refers(getattr(owner, method, None), *names)


_BUILDER = (
    *("content", "set_null_value", "properties", "partition_key", "ordering_key"),
    *("event_timestamp", "deliver_at", "sequence_id", "build"),
)


def look() -> frozenset[ClientPart]:
    """Look for every part; return those that this version of the client has."""
    client, build = _of(CLIENT, "close", "_client"), getattr(PRODUCER, "_build_msg", None)
    schema = _refers(build, "_schema", "encode") and _of(CONSUMER, "receive", "_schema")
    core = _of(PRODUCER, "flush", "_producer") and _has("Producer", "send_async", "close_async")
    consumer = _of(CONSUMER, "close", "_consumer")
    message = _of(_MESSAGE, "data", "_message") and _has(
        "Message", "int_schema_version", "length", "has_null_value"
    )
    info = _has("SchemaInfo") and _has("SchemaType")
    found = {
        ClientPart.PRODUCER: core and _has("MessageBuilder", *_BUILDER),
        ClientPart.READER: _of(_READER, "read_next", "_reader") and message,
        ClientPart.CONSUMER: consumer and _has("Consumer", "receive", "acknowledge"),
        ClientPart.MESSAGE: message,
        ClientPart.OPENING: client
        and core
        and _refers(CREATE_PRODUCER, "_client", "_producer")
        and _has("Client", "create_producer_async"),
        ClientPart.CHECKS: _refers(build, "_schema") and _refers(CREATE_PRODUCER, "_client"),
        ClientPart.SCHEMA_INFO: info and _of(_SCHEMA, "schema_info", "_schema_info"),
        ClientPart.SCHEMA: schema,
        ClientPart.ASYNC_OPENING: _has("Client", "create_producer_async_v2") and _has("Producer"),
        ClientPart.ASYNC_CALLS: core and client,
        ClientPart.NULL_VALUES: hasattr(_MESSAGE, "has_null_value"),
        ClientPart.SHARED_CORE: client and _of(CLIENT, "subscribe", "_consumers"),
        ClientPart.IN_MEMORY: client and core and consumer and message and info and schema,
    }
    return frozenset(part for part, there in found.items() if there)


_present = look()


def version() -> str:
    """Return the version of the client, or ``?``."""
    try:
        return metadata.version("pulsar-client")
    except metadata.PackageNotFoundError:
        return "?"


def missing() -> list[ClientPart]:
    """Return the parts that this version of the client lacks."""
    return [part for part in ClientPart if part not in _present]


def has(part: ClientPart) -> bool:
    """Return True if the client has a part."""
    return part in _present


def require(part: ClientPart) -> None:
    """Refuse a client without a part.

    Raises:
        PrerequisiteError: the part is missing; the text names it and the client's version.
    """
    if part not in _present:
        raise missing_part(part)


def missing_part(part: ClientPart, remedy: str = "") -> PrerequisiteError:
    """Return the error about a missing part.

    Args:
        part: the part.
        remedy: another remedy than a different version of the client.
    """
    return PrerequisiteError(
        f"pulsar-client {version()} lacks a part that delaylevel needs to {part.use} "
        f"({part.name}): {remedy or 'install a version that docs/versions.md lists as tested'}"
    )


for _part in missing():
    log.warning(
        "pulsar-client %s lacks a part with which delaylevel can %s (%s); %s",
        version(),
        _part.use,
        _part.name,
        f"it uses {_part.instead}" if _part.instead else "nothing replaces it",
    )
