"""A message that was given to a producer."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import repeat
from typing import Generic, TypeVar

from delaylevel.model.message import Payload

from .entry_outcomes import EntryOutcome

Item = TypeVar("Item")

_NOT_SENT = EntryOutcome()


@dataclass(slots=True, eq=False)
class Sent(Generic[Item]):
    """A message given to a producer.

    Attributes:
        item: the value that identifies it for the caller.
        outcome: outcome of its entry, once it was passed to the client.
        sent_s: time at which the producer got it, by the monotonic clock.
        maybe_stored: True if an earlier producer may have stored it; without sequence IDs only.
        answered_s: time of its answer, by the monotonic clock; 0 if it is not known.
    """

    item: Item
    payload: Payload
    properties: dict[str, str]
    deliver_at_ms: int | None
    number: int
    size: int
    sent_s: float
    # Python 3.10 refuses any dict as a default. This factory runs no Python code for a message.
    outcome: EntryOutcome = field(default_factory=repeat(_NOT_SENT).__next__)
    maybe_stored: bool = False
    answered_s: float = 0.0

    def exceeds(self, limit: int) -> bool:
        """Return True if a topic with this limit for an entry, in bytes, may refuse the message."""
        properties = sum(len(key) + len(value) for key, value in self.properties.items())
        keys = len(self.payload.key) + len(self.payload.ordering_key)
        # Metadata takes some bytes for each field, and a character up to four.
        metadata = 4 * (properties + keys) + 16 * len(self.properties) + 256
        return self.size + metadata > limit


class _NoPayload:
    """The payload of a message that is not sent."""

    value = None
    key = ordering_key = ""
    event_ms = 0
    properties: dict[str, str] = {}  # noqa: RUF012


NO_PAYLOAD = _NoPayload()
