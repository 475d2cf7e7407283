"""The rules of order, checked on everything that the in-memory Pulsar stores or acknowledges.

A hop acknowledges a message of a member topic only when nobody needs it any more:

- of a level or held topic: when a copy was stored elsewhere, or later in the same topic;
- of a window topic: when the journal, as stored, says that the message was released;
- of a journal: when the records that remain say the same about every message that is pending.

An outcome is stored only after its decision: the journal, as stored, says that the message is
cancelled, or was released. A listener that keeps its IDs in a topic acknowledges a message that it
has handled only after the ID is stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from delaylevel.consumer.handled_ids import LISTENER, SUFFIX, decode_ids, key_of
from delaylevel.consumer.listener import Listener, TopicIdStore
from delaylevel.consumer.message import ReceivedMessage
from delaylevel.dispatcher.journal.records import pack_message
from delaylevel.dispatcher.journal.state import JournalState
from delaylevel.dispatcher.journal.topic import counting
from delaylevel.dispatcher.record import identity
from delaylevel.errors import EnvelopeError
from delaylevel.model.due_time import expires_at_ms
from delaylevel.model.envelope import DUE, KIND, Envelope
from delaylevel.model.level_topic import (
    SUBSCRIPTION,
    FinalWindow,
    LevelTopicDescription,
    Member,
    MissingTarget,
    Role,
)
from delaylevel.model.outcome import Outcome, OutcomeStatus
from delaylevel.model.position import Position
from delaylevel.model.topic_name import TopicName

from .broker import Broker
from .partition import Entry, Event, StoredMessage


class _Handled(NamedTuple):
    """An ID that must be stored before its message is acknowledged."""

    topic: TopicName  # of the stored IDs
    key: int


class StrictRules:
    """A watcher of a broker that records what is stored or acknowledged too early."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._members: dict[TopicName, tuple[LevelTopicDescription, Member]] = {}
        self._changes = -1
        self._last: dict[int, Position] = {}  # where the last copy of a message was stored
        self._handled: dict[tuple[TopicName, str, Position], _Handled] = {}
        self.violations: list[str] = []  # a sentence for each
        broker.watchers.append(self)

    def __call__(self, event: Event) -> None:
        """Check an event."""
        if event.subscription is None:
            self._stored(event)
            return
        if self._handled:
            self._check_handled(event, event.subscription)
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

    def expect_id(self, listener: Listener, message: ReceivedMessage) -> None:
        """Expect the ID of a message that was handled to be stored when it is acknowledged."""
        deduplication = listener.deduplication
        if deduplication is None or not isinstance(deduplication.store, TopicIdStore):
            return
        topic = TopicName.parse(f"{listener.business_topic}-{listener.subscription}-{SUFFIX}")
        by, at = deduplication.by, message.message_id
        key = key_of(message.identity if by is None else by(message))
        position = Position(at.ledger_id(), at.entry_id(), at.batch_index())
        place = (TopicName.parse(message.raw.topic_name()), listener.subscription, position)
        self._handled[place] = _Handled(topic, key)

    def _check_handled(self, event: Event, subscription: str) -> None:
        for entry in event.entries:
            for position in entry.positions():
                handled = self._handled.pop((event.topic, subscription, position), None)
                if handled is not None and not self._has_id(handled):
                    self._violated(
                        event.topic, entry, "the ID of the handled message is not stored"
                    )

    def _has_id(self, handled: _Handled) -> bool:
        return any(
            handled.key in decode_ids(message.value or b"")
            for partition in self._broker.existing_partitions(handled.topic)
            for entry in partition.entries
            for message in entry.messages
            if LISTENER in message.properties
        )

    def _stored(self, event: Event) -> None:
        for entry in event.entries:
            for message in entry.messages:
                self._last[_trace(message)] = entry.position
        found = self._member(event.topic.without_partition)
        if found is not None and found[1].role is Role.OUTCOMES:
            self._check_outcomes(found[0], event)

    def _check_outcomes(self, description: LevelTopicDescription, event: Event) -> None:
        journals = [
            self._journal(description, index) for index in range(description.window_partitions)
        ]
        for entry in event.entries:
            for message in entry.messages:
                try:
                    outcome = Outcome.read(message.properties)
                except EnvelopeError:
                    continue  # a record of a test
                if not any(_says(journal, outcome) for journal in journals):
                    why = f"the stored journal does not say {outcome.status.value!r} of its message"
                    self._violated(event.topic, entry, why, "stored")

    def _check_hop(
        self, description: LevelTopicDescription, topic: TopicName, entry: Entry
    ) -> None:
        for message in entry.messages:
            if self._may_be_dropped(description, message):
                continue
            if self._last.get(_trace(message), entry.position) == entry.position:
                self._violated(topic, entry, "is stored nowhere else")

    def _may_be_dropped(self, description: LevelTopicDescription, message: StoredMessage) -> bool:
        """Return True if a message has expired, or if those of its target are dropped."""
        try:
            envelope = Envelope.read(message.properties)
        except EnvelopeError:
            return False  # it becomes a dead letter
        at_ms = expires_at_ms(description, envelope.due_ms, envelope.expires_ms)
        if 0 < at_ms <= self._broker.clock.now_ms():
            return True
        target = TopicName.parse(envelope.target)
        return description.on_missing_target is MissingTarget.DROP and not any(
            self._broker.existing_partitions(target)
        )

    def _check_window(self, description: LevelTopicDescription, event: Event) -> None:
        index = event.topic.partition_index or 0
        state = self._journal(description, index)
        for entry in event.entries:
            if not state.is_released(_packed([entry])).all():
                self._violated(event.topic, entry, "is not released by the stored journal")

    def _check_journal(self, description: LevelTopicDescription, event: Event) -> None:
        index = event.topic.partition_index or 0
        window = self._broker.partitions.get(description.window_topic.partition(index))
        if window is None or SUBSCRIPTION not in window.subscriptions:
            return
        packed = _packed(window.unacknowledged(SUBSCRIPTION))
        before = self._journal(description, index, event.entries)
        after = self._journal(description, index)
        forgotten = before.is_released(packed) & ~after.is_released(packed)
        if forgotten.any() or before.open_intents.keys() - after.open_intents.keys():
            self._violated(event.topic, event.entries[-1], "says something that no snapshot keeps")

    def _journal(
        self, description: LevelTopicDescription, index: int, more: tuple[Entry, ...] = ()
    ) -> JournalState:
        """Return what the journal of a window partition says, with further entries before it."""
        partition = self._broker.partitions.get(description.journal_topic.partition(index))
        entries = [*more, *(partition.unacknowledged(SUBSCRIPTION) if partition else ())]
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
            self._members = {
                member.topic: (description, member)
                for description in self._broker.level_topics()
                for member in description.members()
            }
        return self._members.get(topic)

    def _violated(
        self, topic: TopicName, entry: Entry, why: str, done: str = "acknowledged"
    ) -> None:
        body = entry.messages[0].value if entry.messages else None
        self.violations.append(
            f"entry {entry.ledger}:{entry.entry} of {topic} ({body!r:.60}) was {done}, but {why}"
        )


def _packed(entries: Iterable[Entry]) -> npt.NDArray[np.int64]:
    positions = (position for entry in entries for position in entry.positions())
    return np.fromiter(map(pack_message, positions), dtype=np.int64)


def _says(journal: JournalState, outcome: Outcome) -> bool:
    """Return True if a journal says that a message is cancelled or was released, as an outcome."""
    if outcome.status is OutcomeStatus.CANCELLED:
        return journal.cancelled.contains(outcome.id, outcome.target, outcome.key)
    if outcome.status is OutcomeStatus.TOO_LATE:
        id_key, number = identity(outcome.id, outcome.target, outcome.key)
        return journal.memory.is_duplicate(number, id_key)
    return True


def _trace(message: StoredMessage) -> int:
    """Return a number for what every hop keeps of a message: enough to find its copies."""
    get = message.properties.get
    # A hop writes the number again, without the zeros in front of it.
    return hash((message.value, message.key, get(DUE, "").lstrip("0"), get(KIND)))
