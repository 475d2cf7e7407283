"""The envelope: the ``delaylevel.*`` properties of a parked message."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from delaylevel.errors import EnvelopeError, InvalidInputError

from .due_time import LATEST_DUE_MS
from .topic_name import TopicName

PREFIX = "delaylevel."
DUE = PREFIX + "due"
TARGET = PREFIX + "target"
ID = PREFIX + "id"
SCHEMA = PREFIX + "schema"
ATTEMPT = PREFIX + "attempt"
REASON = PREFIX + "reason"
SOURCE = PREFIX + "source"
COMPRESSION = PREFIX + "compression"
# The kind of a parked record that is not an ordinary message; those do not have the property.
KIND = PREFIX + "kind"
# The time from which a message is not released any more, ms since the epoch.
EXPIRES = PREFIX + "expires"
# The ID of the message that this one was sent to replace, for information.
REPLACES = PREFIX + "replaces"
# The mark of a message that is encrypted or has fields that are not UTF-8: its value is the reason.
# The bytes of these fields are in properties of their own, in base64 (see message.py).
UNREADABLE = PREFIX + "unreadable"

#: The kind of a cancellation (see outcome.py).
CANCEL = "cancel"
#: The kinds of control records that this version knows.
KINDS = frozenset((CANCEL,))

# The type of a schema of keys and values. With separated encoding, its keys are bytes.
KEY_VALUE = "KEY_VALUE"
# The types of schemas that a hop can declare. KEY_VALUE is not among them: opening a producer with
# it ends in a timeout, because the broker never answers. The Python client lacks others, e.g. DATE.
_NUMBERS = ("INT8", "INT16", "INT32", "INT64", "FLOAT", "DOUBLE")
SCHEMA_TYPES = frozenset(("STRING", *_NUMBERS, "JSON", "AVRO", "PROTOBUF", "PROTOBUF_NATIVE"))

#: The client's names of compression types, as :data:`COMPRESSION` carries them.
COMPRESSIONS = frozenset(("LZ4", "ZLib", "ZSTD", "SNAPPY"))

#: Number of digits of every due time from 2001 to 2286, in ms.
DUE_DIGITS = 13

# Longer IDs would cost more at every hop than the messages that they identify.
LONGEST_ID = 512

#: Longest text of a reason, in bytes: producers leave room for it in every parked message.
LONGEST_REASON = 1024


@dataclass(frozen=True, slots=True)
class SchemaRef:
    """A reference to the schema of the business topic that encoded a payload."""

    type: str  # Pulsar's name of the schema type: ``AVRO``, ``JSON``, ``STRING`` …
    digest: str  # the first 16 hexadecimal digits of the SHA-256 of the definition

    @classmethod
    def of(cls, schema_type: str, definition: str) -> SchemaRef:
        """Return the reference to a schema with this definition (UTF-8)."""
        return cls(schema_type, hashlib.sha256(definition.encode()).hexdigest()[:16])

    @classmethod
    def parse(cls, text: str) -> SchemaRef:
        """Parse ``TYPE:digest``; raise EnvelopeError for a schema that no hop can write."""
        schema_type, separator, digest = text.partition(":")
        if not (schema_type and separator and digest):
            raise EnvelopeError(f"{SCHEMA} is {text!r}, not TYPE:digest")
        if schema_type not in SCHEMA_TYPES:
            raise EnvelopeError(
                f"{SCHEMA} is {schema_type[:40]}: the Python client cannot declare it"
            )
        return cls(schema_type, digest)

    def __str__(self) -> str:
        return f"{self.type}:{self.digest}"


class Envelope(NamedTuple):
    """The due time, target and identity of a parked message; a cancellation has its message's."""

    due_ms: int
    target: str  # full name of the business topic
    id: str | None = None  # the stable identity; None until the first hop adds it
    schema: SchemaRef | None = None  # None for plain bytes
    attempt: int = 0  # number of times that the target refused the message; 0 until it is held
    # The one of its producer. It may fit through the broker only if every hop compresses it, too.
    compression: str | None = None
    kind: str | None = None  # one of `KINDS`; None for an ordinary message
    expires_ms: int = 0  # time from which it is not released any more, ms since the epoch; 0: never
    replaces: str | None = None  # the ID of the message that it was sent to replace

    @classmethod
    def read(cls, properties: Mapping[str, str], fallback_id: str | None = None) -> Envelope:
        """Read the envelope from the properties of a parked message, or raise EnvelopeError."""
        if UNREADABLE in properties:
            raise EnvelopeError(properties[UNREADABLE])
        kind = properties.get(KIND)
        if kind is not None and kind not in KINDS:
            raise EnvelopeError(
                f"{KIND} is {kind[:40]!r}: this version does not know this kind of record"
            )
        due = _due_ms(properties)
        get = properties.get
        target, schema, attempt, compression = _recurring(
            get(TARGET), get(SCHEMA), get(ATTEMPT), get(COMPRESSION)
        )
        if kind is not None and ID not in properties:
            raise EnvelopeError(f"{ID} is missing: a record of kind {kind!r} names its message")
        own_id = get(ID, fallback_id)
        if own_id == "":
            raise EnvelopeError(f"{ID} is empty: different messages would be taken for one")
        return cls(
            due,
            target,
            own_id,
            schema,
            attempt,
            compression,
            kind,
            _time_ms(EXPIRES, properties[EXPIRES]) if EXPIRES in properties else 0,
            get(REPLACES) or None,
        )

    def parked_properties(self, application: Mapping[str, str]) -> dict[str, str]:
        """Return all properties of the message while it is parked."""
        properties = {**application, DUE: str(self.due_ms), TARGET: self.target}
        if self.id is not None:
            properties[ID] = self.id
        if self.schema is not None:
            properties[SCHEMA] = str(self.schema)
        if self.attempt:
            properties[ATTEMPT] = str(self.attempt)
        if self.compression is not None:
            properties[COMPRESSION] = self.compression
        if self.kind is not None:
            properties[KIND] = self.kind
        if self.expires_ms:
            properties[EXPIRES] = str(self.expires_ms)
        if self.replaces is not None:
            properties[REPLACES] = self.replaces
        return properties

    def parked_again_properties(self, properties: Mapping[str, str]) -> dict[str, str]:
        """Return all properties of a message that is parked again, in another member topic."""
        if self.attempt or self.id is None:
            return self.parked_properties(application_properties(properties))
        return {**properties, ID: self.id}

    def delivered_properties(self, application: Mapping[str, str]) -> dict[str, str]:
        """Return all properties of the business message: the application's, and ours."""
        # The target tells that the ID is that of this message. Without it, or with another one, a
        # producer has forwarded the properties of a message that it had received.
        properties = {**application, DUE: str(self.due_ms)}
        if self.id is not None:
            properties[TARGET], properties[ID] = self.target, self.id
        return properties


def due_of(properties: Mapping[str, str]) -> int | None:
    """Return the due time of a parked message, ms since the epoch; None if it is unreadable."""
    if KIND in properties:
        return None  # a control record is never delivered
    try:
        return _due_ms(properties)
    except EnvelopeError:
        return None


def is_control(properties: Mapping[str, str]) -> bool:
    """Return True for a control record of a known kind; one of another kind cannot be read."""
    return properties.get(KIND) in KINDS


def compression_of(properties: Mapping[str, str]) -> str | None:
    """Return the compression of a parked message's producer; None without a known one."""
    name = properties.get(COMPRESSION)
    return name if name in COMPRESSIONS else None


def application_properties(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the properties without ``delaylevel.*``."""
    # A consumer that forwards a received message with its properties sends a new message, which
    # must not keep the old ID and due time.
    return {key: value for key, value in properties.items() if not key.startswith(PREFIX)}


def bounded_reason(reason: str) -> str:
    """Return a reason that is no longer than what producers have reserved for it."""
    return reason.encode()[:LONGEST_REASON].decode(errors="ignore")


def check_id(value: str) -> str:
    """Return an application's own message ID; refuse one that is empty or too long."""
    if not (isinstance(value, str) and 0 < len(value) <= LONGEST_ID):
        raise InvalidInputError(
            f"a message ID is a text of 1 to {LONGEST_ID} characters, not {repr(value)[:40]}"
        )
    return value


# Cached: nearly every message has the same values as one before it.
@functools.lru_cache(maxsize=4096)
def _recurring(
    target: str | None, schema: str | None, attempt: str | None, compression: str | None
) -> tuple[str, SchemaRef | None, int, str | None]:
    """Return the full name of the target, schema, attempt and compression of these properties."""
    if target is None:
        raise EnvelopeError(f"{TARGET} is missing: not a parked message")
    try:
        full = TopicName.parse(target).full
    except InvalidInputError as error:
        raise EnvelopeError(f"{TARGET}: {error}") from error
    return (
        full,
        SchemaRef.parse(schema) if schema is not None else None,
        _integer(ATTEMPT, attempt) if attempt is not None else 0,
        compression if compression in COMPRESSIONS else None,
    )


def _due_ms(properties: Mapping[str, str]) -> int:
    text = properties.get(DUE)
    if text is not None and len(text) == DUE_DIGITS and text.isascii() and text.isdigit():
        return int(text)  # nearly every message, at every hop
    return _time_ms(DUE, text)


def _time_ms(name: str, text: str | None) -> int:
    time_ms = _integer(name, text)
    if time_ms > LATEST_DUE_MS:
        raise EnvelopeError(f"{name} is {time_ms}, beyond the year 9999")
    return time_ms


def _integer(name: str, text: str | None) -> int:
    if text is None:
        raise EnvelopeError(f"{name} is missing: not a parked message")
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise EnvelopeError(f"{name} is {text[:40]!r}, not a whole number")
    return int(text)
