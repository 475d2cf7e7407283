"""Cancelled messages, which are stored but not pending any more.

A message is cancelled if the journal of its window partition says so. It counts as cancelled from
the moment at which its cancellation is stored, too, if that names its ID, due time and key as they
are: the dispatcher will find it. Held messages cannot be cancelled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delaylevel.errors import EnvelopeError
from delaylevel.model.envelope import ATTEMPT, CANCEL, ID, KIND, TARGET, Envelope
from delaylevel.model.level_topic import LevelTopicDescription, Role
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import Position, SourcePartition, stable_id

from .distribution import Messages, Observation

if TYPE_CHECKING:
    from .released import JournalView


def is_cancellation(properties: Mapping[str, str]) -> bool:
    """Return True for the properties of a cancellation, which is not a message."""
    return properties.get(KIND) == CANCEL


def cancelled_due_ms(properties: Mapping[str, str]) -> int | None:
    """Return the due time of the message that a cancellation names; None if it is unreadable."""
    try:
        return Envelope.read(properties).due_ms
    except EnvelopeError:
        return None


@dataclass(frozen=True)
class CancelledMessages:
    """The cancelled messages of a level topic.

    Attributes:
        journals: the journals of window partitions that have cancelled messages, by their numbers.
        parked: names of the messages whose cancellations are stored and not decided; see `name_of`.
    """

    description: LevelTopicDescription
    journals: Mapping[int, JournalView]
    parked: Collection[int] = frozenset()

    def among(self, source: SourcePartition, messages: Messages) -> list[bool]:
        """Return which messages of a partition are cancelled, or are cancellations."""
        own = source.name.without_partition.full
        if not self.journals and not self.parked:
            return [is_cancellation(message.properties) for message in messages]
        return [self._is_cancelled(source, own, message) for message in messages]

    def _is_cancelled(
        self, source: SourcePartition, own: str, message: Observation | ParkedMessage
    ) -> bool:
        properties = message.properties
        if is_cancellation(properties):
            return True
        target = properties.get(TARGET) or own
        own_id = properties.get(ID)
        if not own_id:
            at = Position(message.ledger, message.entry, message.batch)
            own_id = stable_id(source.topic, at)
        attempt = properties.get(ATTEMPT, "0")
        key = message.key or ""
        name = name_of(target, own_id, message.due_ms, key)
        if attempt == "0" and source.role is not Role.HELD and name in self.parked:
            return True
        if not self.journals or not attempt.isdecimal():
            return False
        if source.role is Role.WINDOW:
            partition = source.partition
        else:
            partition = self.description.window_partition(key, own_id)
        journal = self.journals.get(partition)
        return journal is not None and journal.is_cancelled(own_id, target, key, int(attempt))


def name_of(target: str, message_id: str, due_ms: int | None, key: str) -> int:
    """Return a number for a message, valid in this process: half a million need little memory."""
    return hash((target, message_id, due_ms, key))
