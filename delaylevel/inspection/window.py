"""The messages in the final window that may be pending: ranges to read, and how to tell.

With the window ``tracker``, running dispatchers name the positions of the pending messages. The
messages themselves are read from the topic, at these positions only, so that their rows are the
same as without a dispatcher. What was stored after a dispatcher's last look, and partitions for
which no dispatcher answers, are read from the topic as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.threads import in_parallel
from delaylevel.errors import MissingExtraError, NotFoundError
from delaylevel.model.level_topic import LevelTopicDescription, Role
from delaylevel.model.position import EARLIEST, Position, SourcePartition
from delaylevel.model.topic_name import TopicName
from delaylevel.topics.members import metadata_of
from delaylevel.topics.scan import PendingRange, Window, pending_start, published_range

from .distribution import Messages
from .live import LiveDispatchers

if TYPE_CHECKING:
    from .released import JournalView

#: Tells which messages of a partition are not done with. It can be pickled, and threads share it.
StoredRule: TypeAlias = Callable[[Messages], list[bool]]
# Threads that import the same module at once see it half-initialized if the import fails.
_IMPORTING = Lock()
#: Number of messages above which reading the topic is no slower than asking dispatchers.
_MOST_MESSAGES = 100_000
#: Number of ranges in which the messages of a partition are read; between them, others are skipped.
_RANGES = 24
#: Number of entries up to which reading them is faster than a further range.
_GAP_ENTRIES = 2_000


@dataclass
class WindowContents:
    """Messages in the final window that may be pending.

    Attributes:
        ranges: ranges with all pending messages that are due in some time, and maybe others.
        rules: the rule of each partition that has a range, by its number.
        journals: the journals that were read, by the number of the partition.
    """

    ranges: list[PendingRange] = field(default_factory=list)
    rules: dict[int, StoredRule] = field(default_factory=dict)
    journals: dict[int, JournalView] = field(default_factory=dict)


def broker_window(
    admin: TopicAdmin,
    description: LevelTopicDescription,
    targets: Sequence[str],
    now_ms: int,
    due: Window,
) -> WindowContents:
    """Return the messages of business topics that are not due yet; the broker delays them.

    They were published when they were near-due, so only that time is read back, and a lead more
    because of clocks that differ.
    """
    found = WindowContents()
    from_ms = max(now_ms, due.from_ms if due.from_ms is not None else now_ms)
    finest = description.levels[len(description.levels) - 1]
    since_ms = from_ms - finest.near_due_ms - finest.lead_ms
    if since_ms > now_ms or (due.before_ms is not None and due.before_ms <= from_ms):
        return found
    for target in map(TopicName.parse, targets):
        metadata = metadata_of(admin, target)
        count = 0 if metadata is None else metadata.partitions
        names = [target.partition(index) for index in range(count)] or [target]
        for index, name in enumerate(names if metadata is not None else ()):
            source = SourcePartition(description.topic, name.full, Role.WINDOW, -1, index, 0)
            found.rules[index] = partial(_due_after, time_ms=now_ms)
            found.ranges += _published_since(admin, source, EARLIEST, since_ms)
    return found


def tracker_window(
    client: Any,
    admin: TopicAdmin,
    description: LevelTopicDescription,
    partitions: Sequence[int],
) -> WindowContents:
    """Return the unacknowledged messages of window partitions that no journal has as released."""
    # Whatever their due times: `levels drain` puts messages there long before.
    found = WindowContents()

    def read_journal(index: int) -> JournalView:
        try:
            with _IMPORTING:
                from .released import released_by_journal
        except (ModuleNotFoundError, MissingExtraError) as error:
            raise MissingExtraError(
                "the window's journal cannot be read without "
                f"{error.name or 'numpy and pyroaring'}: pip install 'delaylevel[window]'"
            ) from error
        return released_by_journal(client, admin, description.journal_topic.partition(index))

    def read_range(index: int) -> list[PendingRange]:
        source = _source(description, index)
        return _published_since(admin, source, pending_start(admin, source.name), None)

    # Journals are read before ranges: a message that is released in between is still shown, and one
    # that was released earlier is not.
    for index, journal in zip(partitions, in_parallel(read_journal, partitions), strict=True):
        found.journals[index] = journal
        found.rules[index] = journal.stored
    found.ranges = [item for items in in_parallel(read_range, partitions) for item in items]
    return found


def live_window(
    admin: TopicAdmin,
    description: LevelTopicDescription,
    live: LiveDispatchers,
    due: Window,
    others: Callable[[Sequence[int]], WindowContents],
) -> WindowContents:
    """Return the messages that running dispatchers name as pending.

    Args:
        others: function that returns what is in the partitions for which no dispatcher answers.
    """
    asked = live.ask("pending", from_=due.from_ms, to=due.before_ms, limit=_MOST_MESSAGES)
    # A dispatcher does not tell which of its rows are cancelled, and the message of a cancellation
    # that waits there is elsewhere, perhaps in a level.
    answers = {
        index: answer
        for index, answer in asked.items()
        if not (answer.get("cancelled") or answer.get("cancellations"))
    }
    if any(each["more"] for each in asked.values()):
        answers = {}
    missing = [index for index in range(description.window_partitions) if index not in answers]
    found = others(missing) if missing else WindowContents()
    for index, answer in sorted(answers.items()):
        known = _Known.of(index, answer)
        found.rules[index] = known.stored
        source = _source(description, index)
        after = Position(*known.read_to).next
        for first, end in known.clusters():
            found.ranges.append(PendingRange(source, first, min(end, after)))
        start = max(pending_start(admin, source.name), after)
        found.ranges += _published_since(admin, source, start, None)
    return found


class _Known(NamedTuple):
    """The pending messages of one window partition.

    Attributes:
        read_to: position of the last message that the dispatcher has read; the rest is pending.
    """

    positions: frozenset[tuple[int, int, int]]
    read_to: tuple[int, int, int]

    @classmethod
    def of(cls, index: int, answer: Mapping[str, Any]) -> _Known:
        """Return what the answer of a dispatcher says about a partition."""
        place = answer["read_to"][str(index)] or (EARLIEST.ledger, EARLIEST.entry, 0)
        found = frozenset(
            (ledger, entry, batch)
            for _, partition, ledger, entry, batch, _ in answer["rows"]
            if partition == index
        )
        return cls(found, (place[0], place[1], place[2]))

    def stored(self, messages: Messages) -> list[bool]:
        """Return which messages are not done with."""
        places = [(each.ledger, each.entry, max(each.batch, 0)) for each in messages]
        return [place in self.positions or place > self.read_to for place in places]

    def clusters(self) -> list[tuple[Position, Position]]:
        """Return ranges of entries with all positions; the largest gaps are between them."""
        entries = sorted({(ledger, entry) for ledger, entry, _ in self.positions})
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


def _due_after(messages: Messages, time_ms: int) -> list[bool]:
    return [one.due_ms is not None and one.due_ms > time_ms for one in messages]


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
