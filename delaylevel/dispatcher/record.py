"""A message of the window topic, as the window keeps it: what is published, and who it is.

A record is a plain tuple of values that can be marshalled, because the window may write it to
disk. `WindowMessage` names its fields; its first two identify the message for the window's memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

from delaylevel.errors import EnvelopeError
from delaylevel.model import envelope as env
from delaylevel.model.envelope import Envelope, SchemaRef
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.message import ParkedMessage
from delaylevel.mover import hop

_LEDGER_LIMIT, _ENTRY_LIMIT, _BATCH_LIMIT = 1 << 28, 1 << 25, 1 << 10


class WindowMessage(NamedTuple):
    """What becomes of one message of the window topic.

    Attributes:
        id_key, id: its identity in the window's memory; an empty key is never a duplicate.
        due_ms: when it is to be published.
        target: the business topic's full name; empty for a dead letter.
        schema: ``TYPE:digest`` of its payload, or empty.
        attempt: how often its target has refused it so far.
        message_id: its ``delaylevel.id``.
        key, ordering_key, event_ms, value: as they were sent.
        properties: all that it is published with.
    """

    id_key: str
    id: int
    due_ms: int
    target: str
    schema: str
    attempt: int
    message_id: str
    key: str
    ordering_key: str
    event_ms: int
    properties: dict[str, str]
    value: bytes | None

    @property
    def schema_ref(self) -> SchemaRef | None:
        """What the payload was encoded with."""
        return SchemaRef.parse(self.schema) if self.schema else None

    def held_properties(self, reason: str) -> dict[str, str]:
        """Return the properties with which it waits in the held topic, after one more refusal."""
        return self._set_aside(self.attempt + 1, reason)

    def abandoned_properties(self) -> dict[str, str]:
        """Return the properties of a dead letter whose target does not exist."""
        return self._set_aside(self.attempt, f"target {self.target} does not exist")

    def _set_aside(self, attempt: int, reason: str) -> dict[str, str]:
        envelope = Envelope(self.due_ms, self.target, self.message_id, self.schema_ref, attempt)
        application = env.application_properties(self.properties)
        return {**envelope.parked_properties(application), env.REASON: reason}


def identity(message_id: str, target: str, attempt: int) -> tuple[str, int]:
    """Return the key and the number under which a message's id is remembered.

    An id that is a position keeps it, exactly and compactly. Of any other id the number is 63 bits
    of its BLAKE2b hash: that two of ten million ids share one is less likely than 1 in 100,000.
    A message that was refused and comes back is not its own copy: the attempt is part of the key.
    """
    suffix = f"\n{attempt}" if attempt else ""
    parts = message_id.rsplit(":", 3)
    if len(parts) == 4:
        source, ledger_text, entry_text, batch_text = parts
        try:
            ledger, entry, batch = int(ledger_text), int(entry_text), int(batch_text)
        except ValueError:
            pass
        else:
            if (
                0 <= ledger < _LEDGER_LIMIT
                and 0 <= entry < _ENTRY_LIMIT
                and -1 <= batch < _BATCH_LIMIT - 1
            ):
                # One higher, so that an unbatched entry (-1) and a batch's first message differ.
                number = ledger << 35 | entry << 10 | (batch + 1)
                return f"{target}\n{source}{suffix}", number
    digest = hashlib.blake2b(message_id.encode(), digest_size=8).digest()
    return f"{target}\n{suffix}", int.from_bytes(digest, "big") >> 1


def recorder(
    description: Callable[[], LevelTopicDescription], topic: str
) -> Callable[[ParkedMessage], WindowMessage]:
    """Return what turns messages of one window partition into records.

    A message that cannot be understood, or names a target that the level topic does not allow,
    becomes a dead letter that is due at once.

    Args:
        description: returns the level topic as it is now.
        topic: the full name of the window partition.
    """

    def record(message: ParkedMessage) -> WindowMessage:
        try:
            envelope = hop.open_envelope(description(), topic, message)
        except EnvelopeError as error:
            properties = hop.dead_letter_properties(message, topic, error.reason)
            return WindowMessage(
                "", 0, 0, "", "", 0, "", message.key, message.ordering_key, message.event_ms,
                properties, message.value,
            )  # fmt: skip
        assert envelope.id is not None
        id_key, number = identity(envelope.id, envelope.target, envelope.attempt)
        return WindowMessage(
            id_key,
            number,
            envelope.due_ms,
            envelope.target,
            "" if envelope.schema is None else str(envelope.schema),
            envelope.attempt,
            envelope.id,
            message.key,
            message.ordering_key,
            message.event_ms,
            hop.delivered_properties(message, envelope),
            message.value,
        )

    return record
