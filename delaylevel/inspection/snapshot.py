"""The pending messages of a level topic at one moment: ranges to read, and the window's view.

The rest of inspection knows the final window only as a ``WindowView``.

Running dispatchers name the positions of the pending messages. The messages themselves are read
from the topic, at these positions only, so that their rows are the same as without a dispatcher.
What was stored after a dispatcher's last look is read from the topic as well.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, pairwise
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from delaylevel.cluster.port import LedgerInfo, TopicAdmin
from delaylevel.cluster.reader import RECEIVER_QUEUE_SIZE, messages_in_range
from delaylevel.cluster.threads import in_parallel
from delaylevel.errors import MissingExtraError, NotFoundError
from delaylevel.model.envelope import TARGET, due_of, is_control
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Role
from delaylevel.model.message import RawMessage, properties_of, text_of
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

from .cancelled import (
    CancelledIdentities,
    CancelledMessages,
    Messages,
    cancelled_due_ms,
    is_cancellation,
)
from .distribution import Observation
from .live import LiveDispatchers

if TYPE_CHECKING:
    from .released import JournalView

StoredRule: TypeAlias = Callable[[Messages], list[bool]]
# Threads that import the same module at once see it half-initialized if the import fails.
_IMPORTING = Lock()


class WindowView(Protocol):
    """View of the final window of a level topic. Several threads may use it at the same time."""

    def ranges(self, due: Window) -> list[PendingRange]:
        """Return ranges with all pending messages that are due in a window, and maybe others."""

    def stored(self, source: SourcePartition) -> StoredRule:
        """Return the function that tells which messages of a partition are not done with."""

    def cancelled(self) -> Mapping[int, CancelledIdentities]:
        """Return the cancelled messages of the partitions that have any, by their numbers."""

    def exact(self, source: SourcePartition) -> bool:
        """Return True if :meth:`stored` is exact for a partition, False if the clock decides."""


class BrokerWindow:
    """View with final window ``broker``: messages of business topics that are not due yet.

    They were published when they were near-due, so only that time is read back. ``targets`` are the
    business topics to read.
    """

    def __init__(
        self,
        admin: TopicAdmin,
        description: LevelTopicDescription,
        targets: Sequence[str],
        now_ms: int,
    ) -> None:
        self._admin = admin
        self._description = description
        self._targets = targets
        self._now_ms = now_ms

    def ranges(self, due: Window) -> list[PendingRange]:
        from_ms = max(self._now_ms, due.from_ms if due.from_ms is not None else self._now_ms)
        since_ms = from_ms - _longest_stay_ms(self._description)
        if since_ms > self._now_ms or (due.before_ms is not None and due.before_ms <= from_ms):
            return []
        found = []
        for target in self._targets:
            for index, partition in enumerate(_partitions(self._admin, TopicName.parse(target))):
                source = SourcePartition(
                    self._description.topic, partition.full, Role.WINDOW, -1, index, 0
                )
                item = published_since(self._admin, source, EARLIEST, since_ms)
                if item is not None:
                    found.append(item)
        return found

    def stored(self, source: SourcePartition) -> StoredRule:
        return partial(_due_after, time_ms=self._now_ms)

    def cancelled(self) -> Mapping[int, CancelledIdentities]:
        return {}

    def exact(self, source: SourcePartition) -> bool:
        return True  # the broker itself delivers by the clock


class TrackerWindow:
    """View with final window ``tracker``: unacknowledged messages that no journal has as released.

    If the journal of a partition has more than ``most_journal_records``, messages that were due
    when its last record was written count as released, because dispatchers release in due order.
    With such a limit and without the extra that reads journals, messages that are due now count as
    released. ``partitions`` are the window partitions to view, by default all.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        description: LevelTopicDescription,
        now_ms: int,
        most_journal_records: int | None,
        partitions: Sequence[int] | None = None,
    ) -> None:
        self._client = client
        self._admin = admin
        self._description = description
        self._now_ms = now_ms
        self._most_journal_records = most_journal_records
        count = description.window_partitions
        self._partitions = range(count) if partitions is None else partitions
        # By partition: the journal, which tells released positions, or else the time until which
        # everything counts as released.
        self._released: dict[int, JournalView] = {}
        self._released_until_ms: dict[int, int] = {}

    def ranges(self, due: Window) -> list[PendingRange]:
        since_ms = None
        if due.from_ms is not None:
            since_ms = due.from_ms - _longest_stay_ms(self._description)
            if since_ms > self._now_ms:
                return []
        # Journals are read before ranges: a message that is released in between is still shown,
        # and one that was released earlier is not.
        in_parallel(self._read_journal, self._partitions)
        found = in_parallel(lambda i: self._range(i, since_ms), self._partitions)
        return [item for item in found if item is not None]

    def stored(self, source: SourcePartition) -> StoredRule:
        released = self._released.get(source.partition)
        if released is None:
            return partial(_due_after, time_ms=self._released_until_ms[source.partition])
        return partial(_not_released, released)

    def cancelled(self) -> Mapping[int, CancelledIdentities]:
        found = {index: journal.cancelled for index, journal in self._released.items()}
        return {index: cancelled for index, cancelled in found.items() if cancelled}

    def exact(self, source: SourcePartition) -> bool:
        return source.partition in self._released

    def _range(self, index: int, since_ms: int | None) -> PendingRange | None:
        source = window_source(self._description, index)
        start = pending_start(self._admin, source.name)
        return published_since(self._admin, source, start, since_ms)

    def _read_journal(self, index: int) -> None:
        """Read which positions of a window partition are released, or until when."""
        most = self._most_journal_records
        try:
            with _IMPORTING:
                from .released import LongJournalError, last_written_ms, released_by_journal
        except (ModuleNotFoundError, MissingExtraError) as error:
            if most is not None:
                self._released_until_ms[index] = self._now_ms
                return
            raise MissingExtraError(
                "the window's journal cannot be read without "
                f"{error.name or 'numpy and pyroaring'}: "
                "pip install 'delaylevel[window]'"
            ) from error
        journal = self._description.journal_topic.partition(index)
        try:
            self._released[index] = released_by_journal(self._client, self._admin, journal, most)
        except LongJournalError:
            written_ms = last_written_ms(self._client, self._admin, journal)
            self._released_until_ms[index] = min(written_ms, self._now_ms)


def _longest_stay_ms(description: LevelTopicDescription) -> int:
    """Return the longest time before its due time at which a message can enter the window, in ms.

    It allows for a producer's clock that is off by less than the lead.
    """
    finest = description.levels[len(description.levels) - 1]
    return finest.near_due_ms + finest.lead_ms


def _not_released(released: JournalView, messages: Messages) -> list[bool]:
    return [not one for one in released([(m.ledger, m.entry, m.batch) for m in messages])]


def _due_after(messages: Messages, time_ms: int) -> list[bool]:
    return [one.due_ms is not None and one.due_ms > time_ms for one in messages]


def _partitions(admin: TopicAdmin, topic: TopicName) -> list[TopicName]:
    found = metadata_of(admin, topic)
    if found is None:
        return []
    return [topic.partition(index) for index in range(found.partitions)] or [topic]


def window_source(description: LevelTopicDescription, index: int) -> SourcePartition:
    """Return a partition of the window topic."""
    name = description.window_topic.partition(index).full
    return SourcePartition(description.topic, name, Role.WINDOW, -1, index, 0)


def published_since(
    admin: TopicAdmin, source: SourcePartition, start: Position, since_ms: int | None
) -> PendingRange | None:
    """Return the range of a partition from a position and publish time on; None if it is empty."""
    try:
        found = published_range(admin, source, Window(since_ms, None), start, 0)
    except NotFoundError:
        return None  # a deleted target
    return found if found.start < found.end else None


#: Number of messages above which reading the topic is no slower.
MOST_MESSAGES = 100_000
#: Number of ranges in which the messages of a partition are read; between them, others are skipped.
_RANGES = 24
#: Number of entries up to which reading them is faster than a further range.
_GAP_ENTRIES = 2_000


class _Known(NamedTuple):
    """The pending messages of one window partition.

    Attributes:
        read_to: position of the last message that the dispatcher has read; the rest is pending.
    """

    positions: frozenset[tuple[int, int, int]]
    read_to: tuple[int, int, int]

    def stored(self, messages: Messages) -> list[bool]:
        """Return which messages are not done with."""
        places = [(each.ledger, each.entry, max(each.batch, 0)) for each in messages]
        return [place in self.positions or place > self.read_to for place in places]


class LiveWindow:
    """View of the final window through running dispatchers, and another view of the others.

    Args:
        others: function that returns the view of partitions that no dispatcher answers for, given
            their numbers.
    """

    def __init__(
        self,
        admin: TopicAdmin,
        description: LevelTopicDescription,
        live: LiveDispatchers,
        others: Callable[[Sequence[int]], WindowView],
    ) -> None:
        self._admin = admin
        self._description = description
        self._live = live
        self._make_others = others
        self._others: WindowView | None = None
        self._known: dict[int, _Known] = {}

    def ranges(self, due: Window) -> list[PendingRange]:
        found = self._live.ask("pending", from_=due.from_ms, to=due.before_ms, limit=MOST_MESSAGES)
        answers = {} if any(each["more"] for each in found.answers) else found.owners
        # A dispatcher does not tell which of its rows are cancelled, and the message of a
        # cancellation that waits there is elsewhere, perhaps in a level.
        self._known = {
            index: _known(index, answer)
            for index, answer in answers.items()
            if not (answer.get("cancelled") or answer.get("cancellations"))
        }
        ranges: list[PendingRange] = []
        for index, known in sorted(self._known.items()):
            source = window_source(self._description, index)
            after = Position(*known.read_to).next
            for first, end in _clusters(known):
                ranges.append(PendingRange(source, first, min(end, after)))
            start = max(pending_start(self._admin, source.name), after)
            tail = published_since(self._admin, source, start, None)
            ranges += [] if tail is None else [tail]
        count = self._description.window_partitions
        missing = [index for index in range(count) if index not in self._known]
        if missing:
            self._others = self._make_others(missing)
            ranges += self._others.ranges(due)
        return ranges

    def stored(self, source: SourcePartition) -> StoredRule:
        known = self._known.get(source.partition)
        if known is None:
            assert self._others is not None
            return self._others.stored(source)
        return known.stored

    def cancelled(self) -> Mapping[int, CancelledIdentities]:
        return {} if self._others is None else self._others.cancelled()

    def exact(self, source: SourcePartition) -> bool:
        if source.partition in self._known:
            return True
        return self._others is not None and self._others.exact(source)


def _known(index: int, answer: Mapping[str, Any]) -> _Known:
    place = answer["read_to"][str(index)] or (EARLIEST.ledger, EARLIEST.entry, 0)
    found = frozenset(
        (ledger, entry, batch)
        for _, partition, ledger, entry, batch, _ in answer["rows"]
        if partition == index
    )
    return _Known(found, (place[0], place[1], place[2]))


def _clusters(known: _Known) -> list[tuple[Position, Position]]:
    """Return ranges of entries that contain all positions; the largest gaps are between them."""
    entries = sorted({(ledger, entry) for ledger, entry, _ in known.positions})
    if not entries:
        return []
    gaps = [
        (after[1] - before[1] if after[0] == before[0] else _GAP_ENTRIES + 1, number)
        for number, (before, after) in enumerate(pairwise(entries), 1)
    ]
    wide = sorted((gap for gap in gaps if gap[0] > _GAP_ENTRIES), reverse=True)[: _RANGES - 1]
    starts = [0, *sorted(number for _, number in wide)]
    ends = [*starts[1:], len(entries)]
    return [
        (Position(*entries[first]), Position(*entries[last - 1]).next_entry)
        for first, last in zip(starts, ends, strict=True)
    ]


class CountingAdmin(TopicAdmin, Protocol):
    """A cluster that counts messages and entries."""

    def contents(self, partition: TopicName) -> tuple[list[LedgerInfo], int]:
        """Return a partition's ledgers, and its entries since the broker opened it."""

    def messages_in(self, topic: TopicName) -> Mapping[TopicName, int]:
        """Return the number of messages of each partition since the broker opened it.

        A topic without partitions is its only one. The result is empty if there is no topic.
        """


@dataclass(frozen=True)
class PartitionRule:
    """The rule that tells which messages of one partition are pending. It can be pickled.

    Attributes:
        source: the partition.
        not_done: what the window view tells of a window partition; None elsewhere.
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
        not_done = self.window.stored(source) if source.role is Role.WINDOW else None
        return PartitionRule(source, not_done, self.cancelled)

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
        pending = compress(chosen, self.rule(source).stored(chosen)) if chosen else ()
        return [one for one in pending if self.target in (None, one.target)]

    def select(self, source: SourcePartition, found: Sequence[Observation]) -> list[Observation]:
        """Return the observed messages that are pending, and are for the requested target."""
        pending = compress(found, self.rule(source).pending(found))
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
    wanted: Callable[[SourcePartition], bool] = lambda _: True,
) -> PendingSnapshot:
    """Find the ranges of all pending messages that are due in a window.

    ``most_journal_records`` is as for ``TrackerWindow``. ``live`` are the dispatchers to ask, or
    None to read the window topic. ``wanted`` is a condition for partitions; the others are left
    out. The other arguments are as for ``Inspector``.
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
    levels = pending_ranges(admin, description, now_ms, due=due, wanted=wanted, slack_ms=slack_ms)
    ranges = [*levels, *(item for item in window.ranges(due) if wanted(item.source))]
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
