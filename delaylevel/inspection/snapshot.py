"""The pending messages of a level topic at one moment: ranges to read, and which of them count.

With the window ``tracker``, running dispatchers name the positions of the pending messages. The
messages themselves are read from the topic, at these positions only, so that their rows are the
same as without a dispatcher. What was stored after a dispatcher's last look, and partitions for
which no dispatcher answers, are read from the topic as well.

A message is cancelled if the journal of its window partition says so. It counts as cancelled from
the moment at which its cancellation is stored, too, if that names its ID, due time and key as they
are: the dispatcher will find it. Held messages cannot be cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.reader import RECEIVER_QUEUE_SIZE, messages_in_range
from delaylevel.cluster.threads import in_parallel
from delaylevel.errors import EnvelopeError, NotFoundError, from_extra
from delaylevel.model.envelope import (
    ATTEMPT,
    CANCEL,
    ID,
    KIND,
    TARGET,
    Envelope,
    is_control,
)
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Role
from delaylevel.model.message import ParkedMessage, RawMessage, properties_of, text_of
from delaylevel.model.position import EARLIEST, Position, SourcePartition
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.members import metadata_of
from delaylevel.topics.scan import (
    ALWAYS,
    PendingRange,
    Window,
    pending_ranges,
    pending_start,
    published_range,
)

from .live import LiveDispatchers, Place

if TYPE_CHECKING:
    from .released import JournalView

# -- messages, and those that are cancelled


#: Messages of a partition, or cancellations.
Messages: TypeAlias = Sequence[ParkedMessage]
#: Tells which messages of a partition are not done with. It can be pickled, and threads share it.
StoredRule: TypeAlias = Callable[[Messages], list[bool]]


def is_cancellation(properties: Mapping[str, str]) -> bool:
    """Return True for the properties of a cancellation, which is not a message."""
    return properties.get(KIND) == CANCEL


def message_named_by(cancellation: ParkedMessage) -> ParkedMessage | None:
    """Return what a cancellation says of its message; None if it cannot be read."""
    try:
        Envelope.read(cancellation.properties)
    except EnvelopeError:
        return None
    # It has the target, ID, due time and key of its message, which is no control record.
    named = {name: text for name, text in cancellation.properties.items() if name != KIND}
    return cancellation._replace(properties=named)


def name_of(target: str, message_id: str, due_ms: int | None, key: str) -> int:
    """Return a number for a message, valid in this process: half a million need little memory."""
    return hash((target, message_id, due_ms, key))


def own_topic(source: SourcePartition) -> str:
    """Return the full name of the topic to which a partition belongs."""
    return source.name.without_partition.full


def observe(found: RawMessage) -> ParkedMessage:
    """Return a message with nothing but what decides whether, when and for whom it is pending."""
    # An exact count reads every message. A copy of all of it would take three times as long.
    message, ledger, entry, batch = found
    key = text_of(message.partition_key)
    return ParkedMessage(ledger, entry, batch, 0, key, "", 0, properties_of(message), None)


@dataclass(frozen=True)
class PartitionRule:
    """The rule that tells which messages of one partition are pending. It can be pickled."""

    description: LevelTopicDescription
    source: SourcePartition
    not_done: StoredRule | None  # of a window partition; elsewhere, all are pending
    journals: Mapping[int, JournalView]  # with cancelled messages, by window partition
    parked: Collection[int]  # names of messages whose cancellations are stored and not decided

    def stored(self, messages: Messages) -> list[bool]:
        """Return which messages and cancellations are not done with."""
        return [True] * len(messages) if self.not_done is None else self.not_done(messages)

    def pending(self, messages: Messages) -> list[bool]:
        """Return which messages are pending; control records are not."""
        found = [
            here and not is_control(message.properties)
            for here, message in zip(self.stored(messages), messages, strict=True)
        ]
        if not self.journals and not self.parked:
            return found
        own = own_topic(self.source)
        return [
            here and not self._is_cancelled(own, message)
            for here, message in zip(found, messages, strict=True)
        ]

    def _is_cancelled(self, own: str, message: ParkedMessage) -> bool:
        properties = message.properties
        target = properties.get(TARGET) or own
        own_id = properties.get(ID) or message.stable_id(self.source.topic)
        attempt = properties.get(ATTEMPT, "0")
        key = message.key or ""
        name = name_of(target, own_id, message.due_ms, key)
        if attempt == "0" and self.source.role is not Role.HELD and name in self.parked:
            return True
        if not self.journals or not attempt.isdecimal():
            return False
        partition = self.source.partition
        if self.source.role is not Role.WINDOW:
            partition = self.description.window_partition(key, own_id)
        journal = self.journals.get(partition)
        return journal is not None and journal.is_cancelled(own_id, target, key, int(attempt))


# -- the final window

#: Number of messages above which reading the topic is no slower than asking dispatchers.
_MOST_MESSAGES = 100_000
#: Number of ranges in which the messages of a partition are read; between them, others are skipped.
_RANGES = 24
#: Number of entries up to which reading them is faster than a further range.
_GAP_ENTRIES = 2_000


@dataclass
class WindowContents:
    """Messages in the final window that may be pending; the mappings are by its partition."""

    ranges: list[PendingRange] = field(default_factory=list)
    rules: dict[int, StoredRule] = field(default_factory=dict)
    journals: dict[int, JournalView] = field(default_factory=dict)  # with cancelled messages


def _broker_window(
    admin: TopicAdmin,
    description: LevelTopicDescription,
    target: str | None,
    now_ms: int,
    due: Window,
) -> WindowContents:
    """Return the messages of business topics that are not due yet; the broker delays them."""
    found = WindowContents()
    from_ms = max(now_ms, due.from_ms if due.from_ms is not None else now_ms)
    # They were published when they were near-due, so only that time is read back, and a lead more
    # because of clocks that differ.
    finest = description.levels[-1]
    since_ms = from_ms - finest.near_due_ms - finest.lead_ms
    if since_ms > now_ms or (due.before_ms is not None and due.before_ms <= from_ms):
        return found
    for name in map(TopicName.parse, description.targets if target is None else (target,)):
        metadata = metadata_of(admin, name)
        if metadata is None:
            continue
        partitions = [name.partition(index) for index in range(metadata.partitions)] or [name]
        for index, partition in enumerate(partitions):
            source = SourcePartition(description.topic, partition.full, Role.WINDOW, -1, index, 0)
            found.rules[index] = partial(_due_after, time_ms=now_ms)
            found.ranges += _published_since(admin, source, EARLIEST, since_ms)
    return found


def _due_after(messages: Messages, time_ms: int) -> list[bool]:
    return [one.due_ms is not None and one.due_ms > time_ms for one in messages]


def _tracker_window(
    client: Any,
    admin: TopicAdmin,
    description: LevelTopicDescription,
    partitions: Sequence[int],
) -> WindowContents:
    """Return the unacknowledged messages of window partitions that no journal has as released."""
    # Whatever their due times: `levels drain` puts messages there long before.
    found = WindowContents()

    # Not in its threads: they would see a module half-initialized whose import fails.
    with from_extra("window", "the window's journal cannot be read without"):
        from .released import released_by_journal

    def read_journal(index: int) -> JournalView:
        return released_by_journal(client, admin, description.journal_topic.partition(index))

    def read_range(index: int) -> list[PendingRange]:
        source = _source(description, index)
        return _published_since(admin, source, pending_start(admin, source.name), None)

    # Journals are read before ranges: a message that is released in between is still shown, and one
    # that was released earlier is not.
    for index, journal in zip(partitions, in_parallel(read_journal, partitions), strict=True):
        found.rules[index] = journal.stored
        if journal.cancelled:
            found.journals[index] = journal
    found.ranges = [item for items in in_parallel(read_range, partitions) for item in items]
    return found


def _live_window(
    admin: TopicAdmin,
    description: LevelTopicDescription,
    live: LiveDispatchers,
    due: Window,
    others: Callable[[Sequence[int]], WindowContents],
) -> WindowContents:
    """Return what running dispatchers name as pending, and ``others`` where none answers."""
    asked = live.ask(due, _MOST_MESSAGES)
    # A dispatcher does not tell which of its rows are cancelled, and the message of a cancellation
    # that waits there is elsewhere, perhaps in a level.
    answers = {index: answer for index, answer in asked.items() if not answer.cancellations}
    if any(answer.more for answer in asked.values()):
        answers = {}
    missing = [index for index in range(description.window_partitions) if index not in answers]
    found = others(missing) if missing else WindowContents()
    for index, answer in sorted(answers.items()):
        source = _source(description, index)
        named = answer.named[index]
        read_to = answer.read_to[index] or (EARLIEST.ledger, EARLIEST.entry, 0)
        found.rules[index] = partial(_named_or_unread, named=named, read_to=read_to)
        after = Position(*read_to).next
        for first, end in _clusters(named):
            found.ranges.append(PendingRange(source, first, min(end, after)))
        start = max(pending_start(admin, source.name), after)
        found.ranges += _published_since(admin, source, start, None)
    return found


def _named_or_unread(messages: Messages, named: Collection[Place], read_to: Place) -> list[bool]:
    """Return which messages a dispatcher names, or has not read: its last one is ``read_to``."""
    places = [(each.ledger, each.entry, max(each.batch, 0)) for each in messages]
    return [place in named or place > read_to for place in places]


def _clusters(named: Collection[Place]) -> list[tuple[Position, Position]]:
    """Return ranges of entries with all places; the largest gaps are between them."""
    entries = sorted({(ledger, entry) for ledger, entry, _ in named})
    if not entries:
        return []
    gaps = [
        (after[1] - before[1] if after[0] == before[0] else _GAP_ENTRIES + 1, number)
        for number, (before, after) in enumerate(pairwise(entries), 1)
    ]
    # Each range costs a reader.
    wide = sorted((gap for gap in gaps if gap[0] > _GAP_ENTRIES), reverse=True)[: _RANGES - 1]
    starts = [0, *sorted(number for _, number in wide)]
    ends = [*starts[1:], len(entries)]
    return [
        (Position(*entries[first]), Position(*entries[last - 1]).next_entry)
        for first, last in zip(starts, ends, strict=True)
    ]


def _source(description: LevelTopicDescription, index: int) -> SourcePartition:
    """Return a partition of the window topic."""
    name = description.window_topic.partition(index).full
    return SourcePartition(description.topic, name, Role.WINDOW, -1, index, 0)


def _published_since(
    admin: TopicAdmin, source: SourcePartition, start: Position, since_ms: int | None
) -> list[PendingRange]:
    """Return the range of a partition from a position and publish time on; none if it is empty."""
    try:
        found = published_range(admin, source, Window(since_ms, None), start, 0)
    except NotFoundError:
        return []  # a deleted target
    return [found] if found.start < found.end else []


# -- everything that is pending


@dataclass(frozen=True)
class PendingSnapshot:
    """The pending messages of a level topic at one moment."""

    client: Any
    admin: TopicAdmin
    description: LevelTopicDescription
    target: str | None  # full name of the only business topic to include; None for all
    ranges: Sequence[PendingRange]  # they have all pending messages, and maybe others
    window: WindowContents
    parked: Collection[int] = frozenset()  # see `PartitionRule`

    def read(
        self, item: PendingRange, start: Position | None = None, queue: int = RECEIVER_QUEUE_SIZE
    ) -> Generator[RawMessage, None, None]:
        """Yield the messages of a range, or those from a position in it on; prefetch ``queue``."""
        start = item.start if start is None else start
        return messages_in_range(self.client, item.source.topic, start, item.end, queue=queue)

    def rule(self, source: SourcePartition) -> PartitionRule:
        """Return the rule that tells which messages of a partition are pending."""
        rules, journals = self.window.rules, self.window.journals
        not_done = rules[source.partition] if source.role is Role.WINDOW else None
        return PartitionRule(self.description, source, not_done, journals, self.parked)

    def cancelling(self, source: SourcePartition, found: Messages) -> list[ParkedMessage]:
        """Return the messages that pending cancellations name, for the requested target."""
        if not self.description.cancellable or source.role is Role.HELD:
            return []
        records = [one for one in found if is_cancellation(one.properties)]
        pending = compress(records, self.rule(source).stored(records)) if records else ()
        named = filter(None, map(message_named_by, pending))
        return self._for_target(source, named)

    def select(self, source: SourcePartition, found: Messages) -> list[ParkedMessage]:
        """Return the messages that are pending, and are for the requested target."""
        return self._for_target(source, compress(found, self.rule(source).pending(found)))

    def _for_target(
        self, source: SourcePartition, messages: Iterable[ParkedMessage]
    ) -> list[ParkedMessage]:
        if self.target is None:
            return list(messages)
        own = own_topic(source)
        return [one for one in messages if (one.properties.get(TARGET) or own) == self.target]


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
    """Find the ranges of all pending messages that are due in a window, in wanted partitions."""
    # Levels before the window, in the direction of messages: one that a mover forwards meanwhile is
    # in one of the ranges, or in both.
    levels = pending_ranges(admin, description, now_ms, due=due, wanted=wanted, slack_ms=slack_ms)
    read = partial(_tracker_window, client, admin, description)
    if description.final_window is not FinalWindow.TRACKER:
        window = _broker_window(admin, description, target, now_ms, due)
    elif live is not None:
        window = _live_window(admin, description, live, due, read)
    else:
        window = read(range(description.window_partitions))
    ranges = [*levels, *(item for item in window.ranges if wanted(item.source))]
    return PendingSnapshot(client, admin, description, target, ranges, window)
