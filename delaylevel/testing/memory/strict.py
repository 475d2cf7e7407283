"""The rules of acknowledging, checked on every acknowledgement of the in-memory Pulsar.

A hop acknowledges a message of a member topic only when nobody needs it any more:

- of a level or held topic: when a copy was stored elsewhere, or later in the same topic;
- of a window topic: when the journal, as stored, says that the message was released;
- of a journal: when the records that remain say the same about every message that is pending.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from delaylevel.dispatcher.journal.fencing import counting
from delaylevel.dispatcher.journal.records import pack_message
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.model.envelope import DUE, EXPIRES, KIND, TARGET
from delaylevel.model.level_topic import (
    SUBSCRIPTION,
    FinalWindow,
    LevelTopicDescription,
    Member,
    MissingTarget,
    Role,
)
from delaylevel.model.topic_name import TopicName

from .broker import Broker, Event, Partition
from .log import Entry, StoredMessage


class _Place(NamedTuple):
    ledger: int
    entry: int


class StrictRules:
    """A watcher of a broker that records each acknowledgement that loses something.

    Attributes:
        violations: a sentence for each.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._members: dict[TopicName, tuple[LevelTopicDescription, Member]] = {}
        self._changes = -1
        self._last: dict[int, _Place] = {}  # where the last copy of a message was stored
        self.violations: list[str] = []
        broker.watchers.append(self)

    def __call__(self, event: Event) -> None:
        """Check an event."""
        if event.subscription is None:
            self._stored(event)
            return
        found = self._member(event.topic.without_partition)
        if found is None or event.subscription != SUBSCRIPTION:
            return
        description, member = found
        if member.role in (Role.LEVEL, Role.HELD):
            for entry in event.entries:
                self._check_hop(description, event.topic, entry)
        elif description.final_window is FinalWindow.TRACKER:
            if member.role is Role.WINDOW:
                self._check_window(description, event)
            elif member.role is Role.JOURNAL:
                self._check_journal(description, event)

    def _stored(self, event: Event) -> None:
        for entry in event.entries:
            for message in entry.messages:
                self._last[_trace(message)] = _Place(entry.ledger, entry.entry)

    def _check_hop(
        self, description: LevelTopicDescription, topic: TopicName, entry: Entry
    ) -> None:
        own = _Place(entry.ledger, entry.entry)
        for message in entry.messages:
            if self._may_be_dropped(description, message):
                continue
            if self._last.get(_trace(message), own) == own:
                self._violated(topic, entry, "is stored nowhere else")

    def _may_be_dropped(self, description: LevelTopicDescription, message: StoredMessage) -> bool:
        """Return True if a message has expired, or if those of its target are dropped."""
        get, now_ms = message.properties.get, self._broker.clock.now_ms()
        expires, due = get(EXPIRES, ""), get(DUE, "")
        default_ms = description.expire_after_ms
        if expires.isdigit():
            at_ms = int(expires)
        else:
            at_ms = int(due) + default_ms if default_ms and due.isdigit() else 0
        if 0 < at_ms <= now_ms:
            return True
        target = TopicName.parse(get(TARGET, "")) if TARGET in message.properties else None
        return (
            description.on_missing_target is MissingTarget.DROP
            and target is not None
            and not any(self._broker.existing_partitions(target))
        )

    def _check_window(self, description: LevelTopicDescription, event: Event) -> None:
        index = event.topic.partition_index or 0
        state = self._journal(description, index, ())
        for entry in event.entries:
            packed = [pack_message(entry.message_position(n)) for n in range(len(entry.messages))]
            if not state.is_released(np.array(packed, dtype=np.int64)).all():
                self._violated(event.topic, entry, "is not released by the stored journal")

    def _check_journal(self, description: LevelTopicDescription, event: Event) -> None:
        index = event.topic.partition_index or 0
        window = self._broker.partitions.get(description.window_topic.partition(index))
        if window is None or SUBSCRIPTION not in window.subscriptions:
            return
        packed = np.array(
            [
                pack_message(entry.message_position(n))
                for entry in _unacknowledged(window)
                for n in range(len(entry.messages))
            ],
            dtype=np.int64,
        )
        before = self._journal(description, index, event.entries)
        after = self._journal(description, index, ())
        forgotten = before.is_released(packed) & ~after.is_released(packed)
        if forgotten.any() or before.open_intents.keys() - after.open_intents.keys():
            self._violated(event.topic, event.entries[-1], "says something that no snapshot keeps")

    def _journal(
        self, description: LevelTopicDescription, index: int, acknowledged: tuple[Entry, ...]
    ) -> JournalState:
        partition = self._broker.partitions.get(description.journal_topic.partition(index))
        entries = list(acknowledged)
        if partition is not None and SUBSCRIPTION in partition.subscriptions:
            entries += _unacknowledged(partition)
        return JournalState.read(
            counting(
                (message.value or b"", entry.position)
                for entry in entries
                for message in entry.messages
            )
        )

    def _member(self, topic: TopicName) -> tuple[LevelTopicDescription, Member] | None:
        if self._changes != self._broker.changes:
            self._changes = self._broker.changes
            self._members = {}
            for name, metadata in self._broker.partitioned.items():
                description = LevelTopicDescription.from_properties(name.full, metadata.properties)
                if description is not None:
                    for member in description.members():
                        self._members[member.topic] = (description, member)
        return self._members.get(topic)

    def _violated(self, topic: TopicName, entry: Entry, why: str) -> None:
        body = entry.messages[0].value if entry.messages else None
        self.violations.append(
            f"entry {entry.ledger}:{entry.entry} of {topic} ({body!r:.60}) was acknowledged, but "
            f"{why}"
        )


def _trace(message: StoredMessage) -> int:
    """Return a number for what every hop keeps of a message: enough to find its copies."""
    get = message.properties.get
    return hash((message.value, message.key, get(DUE), get(KIND)))


def _unacknowledged(partition: Partition) -> list[Entry]:
    numbers = partition.subscriptions[SUBSCRIPTION].unacknowledged()
    return [partition.log.entries[number] for number in numbers]
