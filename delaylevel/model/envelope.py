"""The envelope: what a parked message says of itself in its ``delaylevel.*`` properties."""

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

# Longer ids cost more than the messages they identify, at every hop.
LONGEST_ID = 512


@dataclass(frozen=True, slots=True)
class SchemaRef:
    """Which schema of the business topic a payload was encoded with.

    Attributes:
        type: Pulsar's name of the schema type: ``AVRO``, ``JSON``, ``STRING`` …
        digest: the first 16 hexadecimal digits of the SHA-256 of the definition.
    """

    type: str
    digest: str

    @classmethod
    def of(cls, schema_type: str, definition: str) -> SchemaRef:
        """Return the reference to a schema with this definition (UTF-8)."""
        return cls(schema_type, hashlib.sha256(definition.encode()).hexdigest()[:16])

    @classmethod
    def parse(cls, text: str) -> SchemaRef:
        """Read ``TYPE:digest``; raises EnvelopeError for anything else."""
        schema_type, separator, digest = text.partition(":")
        if not (schema_type and separator and digest):
            raise EnvelopeError(f"{SCHEMA} is {text!r}, not TYPE:digest")
        return cls(schema_type, digest)

    def __str__(self) -> str:
        return f"{self.type}:{self.digest}"


class Envelope(NamedTuple):
    """When a parked message is due, where it goes, and who it is.

    Attributes:
        due_ms: milliseconds since the epoch, UTC.
        target: the full name of the business topic.
        id: the stable identity; None until the first hop has added it.
        schema: what the payload was encoded with; None for plain bytes.
        attempt: how often the target has refused it; above 0 only in the held topic, and where
            it goes from there.
    """

    due_ms: int
    target: str
    id: str | None = None
    schema: SchemaRef | None = None
    attempt: int = 0

    @classmethod
    def read(cls, properties: Mapping[str, str]) -> Envelope:
        """Read the envelope out of a parked message's properties.

        Raises:
            EnvelopeError: it is missing or damaged; ``reason`` says how, for the dead letter.
        """
        due = _due_ms(properties)
        target = properties.get(TARGET)
        if target is None:
            raise EnvelopeError(f"{TARGET} is missing: not a parked message")
        try:
            full = _full_name(target)
        except InvalidInputError as error:
            raise EnvelopeError(f"{TARGET}: {error}") from error
        schema = properties.get(SCHEMA)
        return cls(
            due,
            full,
            _identity(properties),
            SchemaRef.parse(schema) if schema is not None else None,
            _integer(ATTEMPT, properties[ATTEMPT]) if ATTEMPT in properties else 0,
        )

    def identified(self, fallback_id: str) -> Envelope:
        """Return the envelope with an id: its own, or the given one where it has none yet."""
        if self.id is not None:
            return self
        return Envelope(self.due_ms, self.target, fallback_id, self.schema, self.attempt)

    def held_again(self) -> Envelope:
        """Return the envelope after one more refusal by the target."""
        return self._replace(attempt=self.attempt + 1)

    def parked_properties(self, application: Mapping[str, str]) -> dict[str, str]:
        """Return all properties of the message while it is parked."""
        properties = dict(application)
        properties[DUE] = str(self.due_ms)
        properties[TARGET] = self.target
        if self.id is not None:
            properties[ID] = self.id
        if self.schema is not None:
            properties[SCHEMA] = str(self.schema)
        if self.attempt:
            properties[ATTEMPT] = str(self.attempt)
        return properties

    def parked_again_properties(self, properties: Mapping[str, str]) -> dict[str, str]:
        """Return all properties of a message that goes on into another topic of the family.

        Args:
            properties: all that it has in the topic that it comes from.
        """
        if self.attempt or self.id is None:
            return self.parked_properties(application_properties(properties))
        return {**properties, ID: self.id}

    def delivered_properties(self, application: Mapping[str, str]) -> dict[str, str]:
        """Return all properties of the business message: the application's, id and due time."""
        properties = dict(application)
        properties[DUE] = str(self.due_ms)
        if self.id is not None:
            properties[ID] = self.id
        return properties


def due_of(properties: Mapping[str, str]) -> int | None:
    """Return when a parked message is due, ms since the epoch, or None if that is unreadable.

    For readers that only look. A mover reads the whole :class:`Envelope`, whose error says what
    is wrong.
    """
    try:
        return _due_ms(properties)
    except EnvelopeError:
        return None


def application_properties(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the properties without ours.

    A consumer that sends a received message on with its properties sends a new message: its old
    id and due time must not stick to it.
    """
    return {key: value for key, value in properties.items() if not key.startswith(PREFIX)}


def check_id(value: str) -> str:
    """Return an application's own message id, if it can be one.

    Raises:
        InvalidInputError: it is not a string, empty, or longer than 512 characters.
    """
    if not isinstance(value, str):
        raise InvalidInputError(f"a message id is a string, not {type(value).__name__}: {value!r}")
    if not 0 < len(value) <= LONGEST_ID:
        raise InvalidInputError(
            f"a message id has 1 to {LONGEST_ID} characters, not {len(value)}: {value[:40]!r}"
        )
    return value


# A level topic has few targets, and every message names one of them.
@functools.lru_cache(maxsize=4096)
def _full_name(topic: str) -> str:
    return TopicName.parse(topic).full


def _due_ms(properties: Mapping[str, str]) -> int:
    due = _integer(DUE, properties.get(DUE))
    if due > LATEST_DUE_MS:
        raise EnvelopeError(f"{DUE} is {due}, beyond the year 9999")
    return due


def _identity(properties: Mapping[str, str]) -> str | None:
    value = properties.get(ID)
    if value == "":
        raise EnvelopeError(f"{ID} is empty: different messages would be taken for one")
    return value


def _integer(name: str, text: str | None) -> int:
    if text is None:
        raise EnvelopeError(f"{name} is missing: not a parked message")
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise EnvelopeError(f"{name} is {text[:40]!r}, not a whole number")
    return int(text)
