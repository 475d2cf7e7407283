"""The receipt of a scheduled message, its cancellation, and the outcome: pure values.

A cancellation has the due time, the target, the ID and the key of its message. It takes the way of
a message of that due time through the levels, but always ends in the window topic, in the partition
of its message, where the dispatcher decides.
"""

from __future__ import annotations

import base64
import binascii
import enum
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from delaylevel.errors import EnvelopeError, InvalidInputError

from .due_time import LATEST_DUE_MS
from .envelope import CANCEL, DUE, ID, PREFIX, REASON, TARGET, Envelope
from .position import Position
from .topic_name import TopicName

#: The payload of a cancellation. It is not empty, because the Python client loses empty payloads
#: that it compresses with ZLib.
PAYLOAD = b"cancel"


def cancellation(due_ms: int, target: str, message_id: str) -> Envelope:
    """Return the envelope of a cancellation."""
    return Envelope(due_ms, target, message_id, kind=CANCEL)


# Properties of a record in the outcomes topic, besides those of the envelope.
OUTCOME = PREFIX + "outcome"
DECIDED = PREFIX + "decided"
RELEASED = PREFIX + "released"
KEY = PREFIX + "key"

# The prefix names the version of the form. A later form gets another one.
_PREFIX = "dl1."
_CHECKSUM_BYTES = 4
_AGAIN = "copy the whole text that schedule() returned, or give message_id= and deliver_at="


class OutcomeStatus(str, enum.Enum):
    """The status of a cancellation."""

    ACCEPTED = "accepted"  # stored; the dispatcher has not decided yet, or it is not known
    CANCELLED = "cancelled"  # the message will never be released
    TOO_LATE = "too late"  # the message has been released
    UNKNOWN = "unknown"  # no such message arrived by its due time and some time after it

    def __str__(self) -> str:
        return self.value


class CancelledName(NamedTuple):
    """The message that a cancellation names; all but the due time are the same for its copies."""

    id: str
    target: str
    key: str
    due_ms: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one cancellation.

    Attributes:
        status: the status. All but ACCEPTED are final.
        id: ID of the message.
        target: full name of its business topic.
        due_ms: due time of the message as the cancellation gave it, ms since the epoch.
        decided_ms: time of the dispatcher's decision, ms; None if it is not known.
        released_ms: time of the message's release, ms; None if it was not released, or if the
            time is not known.
        reason: explanation for people; empty for none.
        key: partition key of the message as the cancellation gave it; empty for none.
    """

    status: OutcomeStatus
    id: str
    target: str
    due_ms: int
    decided_ms: int | None = None
    released_ms: int | None = None
    reason: str = ""
    key: str = ""

    @property
    def final(self) -> bool:
        """True if the dispatcher has decided."""
        return self.status is not OutcomeStatus.ACCEPTED

    @property
    def name(self) -> CancelledName:
        """The message as its cancellation named it."""
        return CancelledName(self.id, self.target, self.key, self.due_ms)

    def properties(self) -> dict[str, str]:
        """Return the properties of the record in the outcomes topic; its key is the ID."""
        if not self.final or self.decided_ms is None:
            raise InvalidInputError(
                f"the cancellation of {self.id!r} is {self.status} without a time of decision: "
                "only decided outcomes are stored in the outcomes topic"
            )
        properties = {
            ID: self.id,
            TARGET: self.target,
            OUTCOME: self.status.value,
            DUE: str(self.due_ms),
            DECIDED: str(self.decided_ms),
            RELEASED: "" if self.released_ms is None else str(self.released_ms),
            REASON: self.reason,
            KEY: self.key,
        }
        return {name: text for name, text in properties.items() if text}

    def payload(self) -> bytes:
        """Return the payload of the record: its properties as JSON, without their prefix."""
        value: dict[str, str | int] = {}
        for name, text in self.properties().items():
            value[name[len(PREFIX) :]] = int(text) if name in (DUE, DECIDED, RELEASED) else text
        return json.dumps(value, separators=(",", ":")).encode()

    @classmethod
    def read(cls, properties: Mapping[str, str]) -> Outcome:
        """Read the properties of a record; raise EnvelopeError if one is missing or damaged."""
        try:
            status = OutcomeStatus(properties[OUTCOME])
            outcome = cls(
                status,
                properties[ID],
                TopicName.parse(properties[TARGET]).full,
                _ms(properties[DUE]),
                _ms(properties[DECIDED]),
                _ms(properties[RELEASED]) if RELEASED in properties else None,
                properties.get(REASON, ""),
                properties.get(KEY, ""),
            )
        except KeyError as error:
            raise EnvelopeError(f"{error.args[0]} is missing: not an outcome") from error
        except ValueError as error:
            raise EnvelopeError(f"an outcome is damaged: {error}") from error
        if not (outcome.id and outcome.final):
            raise EnvelopeError(f"an outcome is damaged: {OUTCOME} is {status}, {ID} {outcome.id}")
        return outcome


@dataclass(frozen=True, slots=True)
class Receipt:
    """The receipt of a scheduled message: all that its cancellation needs.

    ``str(receipt)`` is a text to store or to send; :meth:`parse` reads it.

    Attributes:
        id: ID of the message.
        due_ms: its due time, ms since the epoch, UTC.
        target: full name of its business topic.
        level_topic: full name of the level topic.
        key: its partition key; empty for none.
        stored_at: the place that stored it, ``tenant/namespace/partition:ledger:entry``; empty if
            it is not known. The contents can be read back there.
        sent_directly: True if the message was due when it was sent: it went straight to its
            business topic, and nothing can cancel it.
        replaced: after ``schedule(…, replace=True)``, the outcomes of the cancellations of what
            waited under the ID; the text of the receipt does not have them.
    """

    id: str
    due_ms: int
    target: str
    level_topic: str
    key: str = ""
    stored_at: str = ""
    sent_directly: bool = False
    replaced: tuple[Outcome, ...] = field(default=(), compare=False)

    @property
    def name(self) -> CancelledName:
        """The message as its cancellation names it."""
        return CancelledName(self.id, self.target, self.key, self.due_ms)

    @property
    def place(self) -> tuple[str, Position] | None:
        """Full name of the partition that stored the message, and its entry; None if unknown."""
        if not self.stored_at:
            return None
        topic, *numbers = self.stored_at.rsplit(":", 2)
        return TopicName.parse(topic).full, Position.parse(":".join(numbers))

    def __str__(self) -> str:
        value = {
            "due": self.due_ms,
            "target": self.target,
            "topic": self.level_topic,
            "id": self.id,
            "key": self.key,
            "at": self.stored_at,
            "direct": self.sent_directly,
        }
        given = {name: item for name, item in value.items() if item}
        text = json.dumps(given, sort_keys=True, separators=(",", ":")).encode()
        data = text + zlib.crc32(text).to_bytes(_CHECKSUM_BYTES, "big")
        return _PREFIX + base64.urlsafe_b64encode(data).rstrip(b"=").decode()

    @classmethod
    def parse(cls, text: str) -> Receipt:
        """Parse the text of a receipt; white space around it is ignored.

        Raises:
            InvalidInputError: it is not the text of a receipt of this version, or it is damaged.
        """
        if not isinstance(text, str):
            raise InvalidInputError(
                f"a receipt is a Receipt or its text, not {type(text).__name__}: {_AGAIN}"
            )
        stripped = text.strip()
        if not stripped.startswith(_PREFIX):
            raise InvalidInputError(
                f"{_short(text)} is not a receipt of this version: it does not begin with "
                f"{_PREFIX!r}; {_AGAIN}"
            )
        try:
            return cls._from_json(_checked(stripped[len(_PREFIX) :]))
        except (ValueError, KeyError, RecursionError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise InvalidInputError(
                f"the receipt {_short(text)} is damaged ({why}): {_AGAIN}"
            ) from error

    @classmethod
    def _from_json(cls, data: bytes) -> Receipt:
        value = json.loads(data)
        if not isinstance(value, dict):  # the checksum proves no author
            raise ValueError("it is not a JSON object")
        own_id, due_ms = value["id"], value["due"]
        stored_at, key = value.get("at", ""), value.get("key", "")
        names = own_id, key, stored_at, value["target"], value["topic"]
        if not all(isinstance(name, str) for name in names):
            raise ValueError("a name in it is not a text")
        if not own_id:
            raise ValueError("it has no ID")
        if type(due_ms) is not int or not 0 < due_ms <= LATEST_DUE_MS:
            raise ValueError(f"its due time is {due_ms!r}")
        target, topic = (TopicName.parse(value[name]).full for name in ("target", "topic"))
        return cls(own_id, due_ms, target, topic, key, stored_at, value.get("direct") is True)


@dataclass(frozen=True, slots=True)
class Rescheduled:
    """The result of a reschedule.

    Attributes:
        receipt: the receipt of the new message, which is stored.
        outcome: the outcome of the old message's cancellation. If it is CANCELLED, only the new
            message will be delivered. If it is TOO_LATE, the old one was delivered and the new one
            will be.
    """

    receipt: Receipt
    outcome: Outcome


def place_of(partition_topic: str, ledger: int, entry: int) -> str:
    """Return ``topic:ledger:entry`` for the place that stored a message."""
    return f"{partition_topic.removeprefix('persistent://')}:{ledger}:{entry}"


def _checked(text: str) -> bytes:
    """Return the bytes of a receipt's text without their checksum."""
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("it is cut off, or has other characters") from error
    body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "big") != checksum:
        raise ValueError("it is cut off or changed: its checksum is wrong")
    return body


def _ms(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ValueError(f"{text[:40]!r} is not a time in ms")
    return int(text)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "…")
