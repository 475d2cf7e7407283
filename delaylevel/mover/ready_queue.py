"""The order in which movers serve ready partitions: earliest due first.

The order matters in a backlog. Of messages that became ready together, those of a fine level are
due before those of a coarse one, because its lead is shorter. A coarse partition cannot starve: its
due time is fixed, and those of the others grow as they are served.

The exact due times in a partition are unknown before it is read, so its first message counts with
the earliest due time that it can have. A mover hands off a portion of the most urgent partition,
and then compares again.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

from delaylevel.cluster.port import TopicAdmin
from delaylevel.model.level_topic import LevelTopicDescription
from delaylevel.model.position import Position
from delaylevel.model.source_partition import SourcePartition

from .ready import EntryTimes, ReadyBound, ready_bound

# As for the Spark job: a fifth of the lead is left for other delays.
_SHORTEST_TRIGGER_MS, _LONGEST_TRIGGER_MS = 200, 5_000
#: Messages that become ready in a pass may be more urgent than the rest of a backlog. So a longer
#: pass ends, and the next one looks for them at once: as often as with the longest trigger.
LONGEST_PASS_S = _LONGEST_TRIGGER_MS / 1000
# In a backlog, the others might be served for ever.
_LONGEST_POSTPONED_S = 60.0


@dataclass(frozen=True)
class ReadyRange:
    """The ready messages of a partition.

    Attributes:
        source: the partition.
        bound: the end of the ready messages.
        due_ms: the earliest due time of the first message that was not handed off, ms since the
            epoch.
    """

    source: SourcePartition
    bound: ReadyBound
    due_ms: int

    def rest(self, published_ms: int, now_ms: int) -> ReadyRange:
        """Return the rest after a message that was handed off.

        Args:
            published_ms: publish time of this message, ms since the epoch.
        """
        ready_ms = self.source.ready_ms(published_ms)
        return replace(self, due_ms=first_due_ms(self.source, ready_ms, now_ms))


class ReadyQueue:
    """The ready ranges of a level topic, the most urgent first.

    Attributes:
        postponed: monotonic time in s at which a partition has failed, by topic. It is served after
            the others, the last one that failed at the end.
    """

    def __init__(self) -> None:
        self._ranges: dict[str, ReadyRange] = {}
        self._heap: list[tuple[float, int, int, str]] = []
        self._count = 0
        self.postponed: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._ranges)

    def __contains__(self, topic: str) -> bool:
        return topic in self._ranges

    def add(self, item: ReadyRange) -> None:
        """Add a range of a partition that has none here."""
        topic = item.source.topic
        self._ranges[topic] = item
        self._count += 1  # partitions with one due time keep their order
        heapq.heappush(self._heap, (*self._urgency(item), self._count, topic))

    def is_first(self, item: ReadyRange) -> bool:
        """Return True if a range, which is not here, is at least as urgent as all others."""
        return not self._heap or self._urgency(item) <= self._heap[0][:2]

    def take(self) -> ReadyRange:
        """Remove the most urgent range and return it."""
        return self._ranges.pop(heapq.heappop(self._heap)[-1])

    def fail(self, topic: str, now_s: float) -> None:
        """Discard all ranges, and serve a partition after the others, until `succeed` or `forgive`.

        A partition that cannot be handed off is the most urgent one before long, and would keep all
        others waiting. If the failure was that of another one, that one fails next, and is last.
        """
        self.clear()
        last_s = max(self.postponed.values(), default=now_s)
        self.postponed[topic] = max(now_s, last_s + 0.001)

    def succeed(self, topic: str) -> None:
        """Serve a partition by its due times again: something of it was handed off."""
        self.postponed.pop(topic, None)

    def forgive(self, now_s: float) -> None:
        """Serve partitions by their due times again that have failed long ago."""
        found = [
            topic
            for topic, failed_s in self.postponed.items()
            if now_s - failed_s > _LONGEST_POSTPONED_S
        ]
        for topic in found:
            del self.postponed[topic]
        if found:
            self.clear()

    def clear(self) -> None:
        """Discard all ranges."""
        self._ranges.clear()
        self._heap.clear()

    def _urgency(self, item: ReadyRange) -> tuple[float, int]:
        return self.postponed.get(item.source.topic, float("-inf")), item.due_ms


def first_due_ms(source: SourcePartition, ready_ms: int, now_ms: int) -> int:
    """Return the earliest due time of a message that became ready at a time, ms since the epoch.

    Args:
        ready_ms: this time, or an earlier one. If it is later than now, it comes from a wrong
            publish time, and counts as now: the partition must not wait for it.
    """
    return min(ready_ms, now_ms) + source.lead_ms


def ready_range(
    admin: TopicAdmin,
    times: EntryTimes,
    source: SourcePartition,
    start: Position,
    now_ms: int,
    lead_ms: int,
    next_check_ms: int,
) -> ReadyRange:
    """Return the ready messages of a partition, with their urgency.

    Args:
        times: as for :func:`delaylevel.mover.ready.ready_bound`.
        start: the first position that has not been handed off.
        now_ms, lead_ms: as for :func:`delaylevel.mover.ready.ready_bound`.
        next_check_ms: the partition's next check, before which nothing was ready; 0 if unknown: the
            first message is looked at then.

    Raises:
        BrokerError: the positions cannot be read.
    """
    bound = ready_bound(admin, times, source, start, now_ms, lead_ms)
    ready_ms = next_check_ms
    if not ready_ms and bound.end > start:
        first = times(start, start)
        ready_ms = source.ready_ms(first[0][1]) if first else 0
    return ReadyRange(source, bound, first_due_ms(source, ready_ms, now_ms))


def trigger_of(description: LevelTopicDescription) -> int:
    """Return the default time between two passes, in ms."""
    fifth_ms = description.levels.smallest_lead_ms // 5
    return max(_SHORTEST_TRIGGER_MS, min(_LONGEST_TRIGGER_MS, fifth_ms))
