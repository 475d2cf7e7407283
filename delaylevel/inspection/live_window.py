"""View of the final window through the dispatchers that own its partitions.

The dispatchers name the positions of the pending messages. The messages themselves are read from
the topic, at these positions only, so that their rows are the same as without a dispatcher. What
was stored after a dispatcher's last look is read from the topic as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from delaylevel.cluster.port import TopicAdmin
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.position import EARLIEST, Position
from delaylevel.model.source_partition import SourcePartition
from delaylevel.topics.scan import PendingRange, Window, pending_start

from .cancelled import CancelledIdentities
from .live import LiveDispatchers
from .window_view import Messages, WindowView, published_since, window_source

#: Number of messages above which reading the topic is no slower.
MOST_MESSAGES = 100_000
#: Number of ranges in which the messages of a partition are read; between them, others are skipped.
_RANGES = 24
#: Number of entries up to which reading them is faster than a further range.
_GAP_ENTRIES = 2_000


class _Known(NamedTuple):
    """The pending messages of one window partition.

    Attributes:
        positions: (ledger, entry, batch index or 0) of each.
        read_to: position of the last message that the dispatcher has read; the rest is pending.
    """

    positions: frozenset[tuple[int, int, int]]
    read_to: tuple[int, int, int]


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
        # The message of a cancellation that waits there is elsewhere, perhaps in a level.
        self._known = {
            index: _known(index, answer)
            for index, answer in answers.items()
            if not answer.get("cancellations")
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

    def pending(self, source: SourcePartition, messages: Messages) -> list[bool]:
        known = self._known.get(source.partition)
        if known is None:
            assert self._others is not None
            return self._others.pending(source, messages)
        places = [(each.ledger, each.entry, max(each.batch, 0)) for each in messages]
        return [place in known.positions or place > known.read_to for place in places]

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
