"""The pending messages of a level topic at one moment: ranges to read, and which of them count."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.reader import RECEIVER_QUEUE_SIZE, messages_in_range
from delaylevel.model.envelope import TARGET, due_of, is_control
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Role
from delaylevel.model.message import RawMessage, properties_of, text_of
from delaylevel.model.position import Position, SourcePartition
from delaylevel.topics.scan import ALWAYS, PendingRange, Window, pending_ranges

from .cancelled import CancelledMessages, cancelled_due_ms, is_cancellation
from .distribution import Messages, Observation
from .live import LiveDispatchers
from .window import StoredRule, broker_window, live_window, tracker_window


@dataclass(frozen=True)
class PartitionRule:
    """The rule that tells which messages of one partition are pending. It can be pickled.

    Attributes:
        source: the partition.
        not_done: the rule of a window partition; None elsewhere, where all are pending.
        cancelled: as in :class:`PendingSnapshot`.
    """

    source: SourcePartition
    not_done: StoredRule | None
    cancelled: CancelledMessages | None

    def stored(self, messages: Messages) -> list[bool]:
        """Return which messages and cancellations are not done with."""
        return [True] * len(messages) if self.not_done is None else self.not_done(messages)

    def pending(self, messages: Messages) -> list[bool]:
        """Return which messages are pending."""
        found = self.stored(messages)
        if self.cancelled is None:
            return found
        cancelled = self.cancelled.among(self.source, messages)
        return [here and not gone for here, gone in zip(found, cancelled, strict=True)]


@dataclass(frozen=True)
class PendingSnapshot:
    """The pending messages of a level topic at one moment.

    The ranges contain all pending messages, and maybe others. ``target`` is the full name of the
    only business topic to include, or None for all. ``window_rules`` are those of the window's
    partitions, see :class:`.window.WindowContents`. ``cancelled`` are the messages to leave out, or
    None if messages of the level topic cannot be cancelled.
    """

    client: Any
    admin: TopicAdmin
    description: LevelTopicDescription
    target: str | None
    ranges: Sequence[PendingRange]
    window_rules: Mapping[int, StoredRule]
    cancelled: CancelledMessages | None = None

    def read(
        self, item: PendingRange, start: Position | None = None, queue: int = RECEIVER_QUEUE_SIZE
    ) -> Generator[RawMessage, None, None]:
        """Yield the messages of a range, or those from a position in it on.

        The client prefetches ``queue`` messages.
        """
        start = item.start if start is None else start
        return messages_in_range(self.client, item.source.topic, start, item.end, queue=queue)

    def rule(self, source: SourcePartition) -> PartitionRule:
        """Return the rule that tells which messages of a partition are pending."""
        in_window = source.role is Role.WINDOW
        not_done = self.window_rules[source.partition] if in_window else None
        return PartitionRule(source, not_done, self.cancelled)

    def cancelling(
        self, source: SourcePartition, found: Sequence[Observation]
    ) -> list[Observation]:
        """Return the observed cancellations that are pending, for the requested target."""
        if self.cancelled is None or source.role is Role.HELD:
            return []
        chosen = [
            one for one in found if one.due_ms is not None and is_cancellation(one.properties)
        ]
        pending = compress(chosen, self.rule(source).stored(chosen)) if chosen else ()
        return [one for one in pending if self.target in (None, one.target)]

    def select(self, source: SourcePartition, found: Sequence[Observation]) -> list[Observation]:
        """Return the observed messages that are pending, and are for the requested target."""
        pending = compress(found, self.rule(source).pending(found))
        messages = (one for one in pending if not is_control(one.properties))
        return [one for one in messages if self.target in (None, one.target)]


def take_snapshot(
    client: Any,
    admin: TopicAdmin,
    description: LevelTopicDescription,
    now_ms: int,
    *,
    target: str | None,
    slack_ms: int,
    due: Window = ALWAYS,
    live: LiveDispatchers | None = None,
    wanted: Callable[[SourcePartition], bool] = lambda _: True,
) -> PendingSnapshot:
    """Find the ranges of all pending messages that are due in a window.

    ``live`` are the dispatchers to ask, or None to read the window topic. ``wanted`` is a condition
    for partitions; the others are left out. The other arguments are as for ``Inspector``.
    """
    # Levels before the window, in the direction of messages: one that a mover forwards meanwhile is
    # in one of the ranges, or in both.
    levels = pending_ranges(admin, description, now_ms, due=due, wanted=wanted, slack_ms=slack_ms)
    if description.final_window is FinalWindow.TRACKER:
        read = partial(tracker_window, client, admin, description)
        if live is not None:
            window = live_window(admin, description, live, due, read)
        else:
            window = read(range(description.window_partitions))
    else:
        targets = description.targets if target is None else (target,)
        window = broker_window(admin, description, targets, now_ms, due)
    ranges = [*levels, *(item for item in window.ranges if wanted(item.source))]
    cancelled = None
    if description.cancellable:
        journals = {index: each for index, each in window.journals.items() if each.cancels}
        cancelled = CancelledMessages(description, journals)
    return PendingSnapshot(client, admin, description, target, ranges, window.rules, cancelled)


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
