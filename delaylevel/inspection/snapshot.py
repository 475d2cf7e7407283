"""The pending messages of a level topic at one moment: ranges to read, and the window's view."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any, Protocol

from delaylevel.cluster.port import LedgerInfo, TopicAdmin
from delaylevel.cluster.reader import RECEIVER_QUEUE_SIZE, messages_in_range
from delaylevel.errors import InvalidInputError
from delaylevel.model.envelope import TARGET, due_of, is_control
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Role
from delaylevel.model.message import RawMessage, properties_of, text_of
from delaylevel.model.position import Position, SourcePartition
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.scan import ALWAYS, PendingRange, Window, pending_ranges

from .cancelled import CancelledMessages, cancelled_due_ms, is_cancellation
from .distribution import Observation
from .live import LiveDispatchers
from .window import BrokerWindow, LiveWindow, Messages, TrackerWindow, WindowView


class CountingAdmin(TopicAdmin, Protocol):
    """A cluster that counts messages and entries."""

    def contents(self, partition: TopicName) -> tuple[list[LedgerInfo], int]:
        """Return a partition's ledgers, and its entries since the broker opened it."""

    def messages_in(self, topic: TopicName) -> Mapping[TopicName, int]:
        """Return the number of messages of each partition since the broker opened it.

        A topic without partitions is its only one. The result is empty if there is no topic.
        """


@dataclass(frozen=True)
class PendingSnapshot:
    """The pending messages of a level topic at one moment.

    The ranges contain all pending messages, and maybe others. ``target`` is the full name of the
    only business topic to include, or None for all. ``cancelled`` are the messages to leave out, or
    None if messages of the level topic cannot be cancelled.
    """

    client: Any
    admin: CountingAdmin
    description: LevelTopicDescription
    target: str | None
    window: WindowView
    ranges: Sequence[PendingRange]
    cancelled: CancelledMessages | None = None

    def at_id(self, message_id: str) -> PendingSnapshot:
        """Return a snapshot of only the position that an ID names; empty if it names none."""
        topic, _, rest = message_id.partition(":")
        try:
            at = Position.parse(rest)
        except InvalidInputError:
            return replace(self, ranges=[])
        ranges = [
            replace(item, start=at, end=at.next)
            for item in self.ranges
            if item.source.topic == f"persistent://{topic}" and item.start <= at < item.end
        ]
        return replace(self, ranges=ranges)

    def read(
        self, item: PendingRange, start: Position | None = None, queue: int = RECEIVER_QUEUE_SIZE
    ) -> Generator[RawMessage, None, None]:
        """Yield the messages of a range, or those from a position in it on.

        The client prefetches ``queue`` messages.
        """
        start = item.start if start is None else start
        return messages_in_range(self.client, item.source.topic, start, item.end, queue=queue)

    def pending(self, source: SourcePartition, messages: Messages) -> list[bool]:
        """Return which messages of a partition are pending."""
        found = self._stored(source, messages)
        if self.cancelled is None:
            return found
        cancelled = self.cancelled.among(source, messages)
        return [here and not gone for here, gone in zip(found, cancelled, strict=True)]

    def _stored(self, source: SourcePartition, messages: Messages) -> list[bool]:
        """Return which messages and cancellations of a partition are not done with."""
        if source.role is Role.WINDOW:
            return self.window.pending(source, messages)
        return [True] * len(messages)

    def cancellations(
        self, source: SourcePartition, found: Sequence[RawMessage]
    ) -> list[Observation]:
        """Return the pending cancellations among the messages of a partition."""
        if self.cancelled is None:
            return []
        chosen = [one for one in found if is_cancellation(properties_of(one[0]))]
        return self.cancelling(source, [observe(one, own_topic(source)) for one in chosen])

    def cancelling(
        self, source: SourcePartition, found: Sequence[Observation]
    ) -> list[Observation]:
        """Return the observed cancellations that are pending, for the requested target."""
        if self.cancelled is None or source.role is Role.HELD:
            return []
        chosen = [
            one for one in found if one.due_ms is not None and is_cancellation(one.properties)
        ]
        pending = compress(chosen, self._stored(source, chosen)) if chosen else ()
        return [one for one in pending if self.target in (None, one.target)]

    def select(self, source: SourcePartition, found: Sequence[Observation]) -> list[Observation]:
        """Return the observed messages that are pending, and are for the requested target."""
        pending = compress(found, self.pending(source, found))
        messages = (one for one in pending if not is_control(one.properties))
        return [one for one in messages if self.target in (None, one.target)]

    def exact(self, source: SourcePartition) -> bool:
        """Return True if it is certain which messages of a partition are pending."""
        return source.role is not Role.WINDOW or self.window.exact(source)


def take_snapshot(
    client: Any,
    admin: CountingAdmin,
    description: LevelTopicDescription,
    now_ms: int,
    *,
    target: str | None,
    slack_ms: int,
    due: Window = ALWAYS,
    most_journal_records: int | None = None,
    live: LiveDispatchers | None = None,
) -> PendingSnapshot:
    """Find the ranges of all pending messages that are due in a window.

    ``most_journal_records`` is as for ``TrackerWindow``. ``live`` are the dispatchers to ask, or
    None to read the window topic. The other arguments are as for ``Inspector``.
    """
    window: WindowView
    if description.final_window is FinalWindow.TRACKER:
        tracker = partial(TrackerWindow, client, admin, description, now_ms, most_journal_records)
        window = tracker()
        if live is not None:
            window = LiveWindow(admin, description, live, tracker)
    else:
        targets = description.targets if target is None else (target,)
        window = BrokerWindow(admin, description, targets, now_ms)
    # Levels before the window, in the direction of messages: one that a mover forwards meanwhile is
    # in one of the ranges, or in both.
    levels = pending_ranges(admin, [description], now_ms, due=due, slack_ms=slack_ms)
    ranges = [*levels, *window.ranges(due)]
    cancelled = None
    if description.cancellable:
        cancelled = CancelledMessages(description, window.cancelled())
    return PendingSnapshot(client, admin, description, target, window, ranges, cancelled)


def observe(found: RawMessage, own: str) -> Observation:
    """Return the facts about a message; ``own`` is the topic in which it waits."""
    message, ledger, entry, batch = found
    properties = properties_of(message)
    target = properties.get(TARGET) or own
    due_ms = (cancelled_due_ms if is_cancellation(properties) else due_of)(properties)
    key = text_of(message.partition_key)
    return Observation(ledger, entry, batch, due_ms, target, key, properties)


def own_topic(source: SourcePartition) -> str:
    """Return the full name of the topic to which a partition belongs."""
    return source.name.without_partition.full
