"""The messages of a window topic that its dispatchers have released."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from delaylevel.dispatcher.journal.records import pack_message
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.dispatcher.journal.topic import counting
from delaylevel.dispatcher.record import identity
from delaylevel.model.envelope import Envelope
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription
from delaylevel.model.position import Position

from .broker import Broker


class ReleasedMessages:
    """The released messages of one window partition, as its journal says.

    Args:
        partition: index of the window partition.
        sent: packed positions of further messages.
    """

    def __init__(
        self,
        broker: Broker,
        description: LevelTopicDescription,
        partition: int,
        sent: Collection[int] = (),
    ) -> None:
        self._sent = sent
        journal = broker.partitions.get(description.journal_topic.partition(partition))
        entries: list[tuple[bytes, Position]] = []
        if journal is not None and SUBSCRIPTION in journal.subscriptions:
            for number in journal.subscriptions[SUBSCRIPTION].unacknowledged():
                entry = journal.log.entries[number]
                entries += [(each.value or b"", entry.position) for each in entry.messages]
        self._state = JournalState.read(counting(entries))

    def contains(self, position: Position, envelope: Envelope, key: str) -> bool:
        """Return True if a message was released, or if it is a copy of one that was.

        Args:
            position: position of the message in the window partition.
            key: its partition key; empty for none.
        """
        packed = pack_message(position)
        if packed in self._sent or self._state.is_released(np.array([packed]))[0]:
            return True
        if envelope.id is None:  # its position is its ID, so it has no copies
            return False
        id_key, number = identity(envelope.id, envelope.target, key, envelope.attempt)
        return self._state.memory.is_duplicate(number, id_key)
