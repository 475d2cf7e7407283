"""Sequence ids for the messages of one source partition, in its order."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.reader import read_range
from delaylevel.errors import EnvelopeError, InvalidInputError
from delaylevel.model.delivery import Sequence, sequence_id
from delaylevel.model.envelope import Envelope
from delaylevel.model.level_topic import SUBSCRIPTION
from delaylevel.model.source_partition import SourcePartition
from delaylevel.model.topic_name import TopicName

# Limits of what is unconfirmed. The time is well below the client's send timeout.
UNCONFIRMED_MESSAGES = 10_000
UNCONFIRMED_BYTES = 32 * 1024 * 1024
CONFIRM_WITHIN_S = 10.0

#: The identity of each held message, ID, target and key, and its attempt.
HeldIds = frozenset[tuple[str | None, str, str, int]]


class Sequencer:
    """Sequence ids of messages, and the flushes that keep them safe.

    A message must not be sent after one that the client has given up after its timeout: the broker
    would store the higher sequence id, and drop the lower one when it is sent again. So everything
    that was sent is confirmed, or has failed, long before the timeout.

    Args:
        flush: function that waits for the confirmation of all that was sent; raises BrokerError.
        held_ids: function that returns the held messages of an earlier run that began with this
            number, as far as they have this compression.

    Attributes:
        last: sequence ID of the last message; 0 at the start.
    """

    def __init__(
        self,
        sequence: Sequence,
        flush: Callable[[], None],
        held_ids: Callable[[int, str | None], HeldIds],
    ) -> None:
        self._topic = sequence.topic
        self._flush = flush
        self._read_held_ids = held_ids
        self.reset()

    def reset(self) -> None:
        """Start again: the same messages may be read again."""
        self._first = self.last = 0
        self._held_ids: dict[str | None, HeldIds] = {}
        self.confirmed()

    def confirmed(self) -> None:
        """Note that everything sent so far is confirmed."""
        self._unconfirmed = self._unconfirmed_bytes = 0
        self._flush_at_s = 0.0

    def next(
        self, source: SourcePartition, ledger: int, entry: int, batch: int, length: int
    ) -> int:
        """Return the sequence id of the next message to send.

        Args:
            length: length of the payload in bytes.

        Raises:
            InvalidInputError: it is of another partition, or out of order.
            BrokerError: a message that was sent before it is not confirmed.
        """
        self._unconfirmed += 1
        self._unconfirmed_bytes += length
        if self._unconfirmed == 1:
            self._flush_at_s = time.monotonic() + CONFIRM_WITHIN_S
        elif (
            self._unconfirmed > UNCONFIRMED_MESSAGES
            or self._unconfirmed_bytes > UNCONFIRMED_BYTES
            or time.monotonic() > self._flush_at_s
        ):
            self._flush()
            self._unconfirmed, self._unconfirmed_bytes = 1, length
            self._flush_at_s = time.monotonic() + CONFIRM_WITHIN_S
        if source.topic != self._topic:
            raise InvalidInputError(f"a message of {source.topic} among those of {self._topic}")
        number = sequence_id(ledger, entry, batch)
        if number <= self.last:
            raise InvalidInputError(
                f"{source.topic}: {ledger}:{entry}:{batch} comes after a later position, or twice. "
                "Effectively-once needs the rows of a partition once each and in their order"
            )
        self.last = number
        if not self._first:
            self._first = number
            self._held_ids[None] = self._read_held_ids(number, None)
        return number

    def was_held(self, envelope: Envelope, key: str) -> bool:
        """Return whether an earlier run of the same batch has held the message with this key."""
        compression = envelope.compression
        found = self._held_ids.get(compression)
        if found is None:
            # Messages of each compression have a producer, and so sequence ids, of their own.
            found = self._held_ids[compression] = self._read_held_ids(self._first, compression)
        return (envelope.id, envelope.target, key, envelope.attempt + 1) in found


def held_ids(client: Any, admin: TopicAdmin, topic: TopicName) -> HeldIds:
    """Read the identity and attempt of each pending message in a partition of the held topic."""
    last = admin.last_message_id(topic)
    if last is None:
        return frozenset()
    start = admin.mark_delete_position(topic, SUBSCRIPTION).next_entry
    messages = read_range(client, topic.full, start, last.next_entry)
    found: set[tuple[str | None, str, str, int]] = set()
    for message in messages:
        # A message that cannot be read becomes a dead letter when its turn comes.
        with contextlib.suppress(EnvelopeError):
            envelope = Envelope.read(message.properties)
            found.add((envelope.id, envelope.target, message.key, envelope.attempt))
    return frozenset(found)
