"""Outcomes of messages in the client's batches: one callback for each batch.

A callback costs as much as building and sending a message: the client calls it in its own thread,
and the interpreter lock changes hands each time. The messages of a batch are one entry on the
broker, stored or refused as a whole. So only the first message of each entry gets a callback, and
its outcome is that of all of them.

`EntryOutcomes` predicts the entry of each message by the client's own rules. A prediction is not
trusted: the ID of the first message contains its index in the entry, and the number of messages
there. If these are not as predicted, the outcome is unknown. If that happens repeatedly, every
message of the process gets a callback.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from delaylevel.model.message import Payload, batch_size

log = logging.getLogger(__name__)

#: The reason for messages that are not in the entry in which they should be.
UNPROVEN = "Unproven"

#: Number of predictions that were wrong, and a number from which there are no more of them.
_mistakes = 0
_MOST_MISTAKES = 10


class EntryLimits(NamedTuple):
    """Number of messages, and bytes of their payloads, at which the client ends its batches."""

    messages: int
    size: int


class EntryOutcome(dict[Any, Any]):
    """The outcome of one entry: empty until the client has called back; its key is the result.

    Attributes:
        count: number of messages that share it.
    """

    __slots__ = ("count",)
    count: int
    __hash__ = object.__hash__  # type: ignore[assignment]

    def is_proven(self, message_id: Any) -> bool:
        """Return True if the entry of a stored message has exactly the messages that share it."""
        global _mistakes
        if self.count == 1:
            return True
        found = batch_size(message_id)
        if message_id.batch_index() == 0 and found == self.count:
            return True
        _mistakes += 1
        log.warning("the client has put %d messages into an entry, not %d", found, self.count)
        return False


class EntryOutcomes:
    """The entries that a producer fills at present, by the key that their messages share.

    Args:
        limits: limits of the client's batches, which end at nothing else but these and a flush;
            None if each message has an outcome of its own.
    """

    def __init__(self, limits: EntryLimits | None = None) -> None:
        self._limits = limits
        self._entries: dict[str, EntryOutcome] = {}
        self._messages = self._size = 0

    def next(self, payload: Payload) -> tuple[EntryOutcome, Callable[[Any, Any], Any] | None]:
        """Return the outcome of the next message that is sent, and its callback if it has one."""
        limits = self._limits
        if limits is None or _mistakes >= _MOST_MISTAKES:
            return self.alone()
        length = len(payload.value or b"")
        # The client's rules: BatchMessageKeyBasedContainer.cc, getKey, ...
        key = payload.ordering_key or payload.key
        outcome = self._entries.get(key)
        # ... and BatchMessageContainerBase.h, hasEnoughSpace and isFull. An entry that is not full
        # and has a result has failed, with all others.
        if outcome or (self._messages and self._size + length > limits.size):
            self.end()
            outcome = None
        self._messages += 1
        self._size += length
        callback = None
        if outcome is None:
            outcome, callback = self.alone()
            self._entries[key] = outcome
        else:
            outcome.count += 1
        if self._messages >= limits.messages or self._size >= limits.size:
            self.end()
        return outcome, callback

    def alone(self) -> tuple[EntryOutcome, Callable[[Any, Any], Any]]:
        """Return the outcome of a message that is sent outside of batches, and its callback."""
        outcome = EntryOutcome()
        outcome.count = 1
        # A dict's own setdefault keeps the result, and runs no Python code in the client's thread.
        return outcome, outcome.setdefault

    def end(self) -> None:
        """End all entries, as a flush does."""
        if self._messages:
            self._entries = {}
            self._messages = self._size = 0
