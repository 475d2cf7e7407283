"""Where in the source partitions a pending message can stand, given when it is due.

A message that was published at p into partition k of a level with unit u is due in
[p + (k+1)u, p + (k+2)u], because producer and mover choose the partition by their own clock at
that moment. So a window of due times is a window of publish times, and the broker searches by
those. Three things widen it:

- A last partition takes every longer delay too, so that it is bounded on one side only. So does
  one that was the last before its level topic was expanded: what it took then may still lie
  there, and producers that do not know of the expansion yet go on using it.
- A mover that repeats a batch after an outage routes by the time of its first try: the message is
  due sooner after p, by as long as the outage was.
- Publish times are the clocks of those who published. Where they do not rise, a binary search is
  off by at most the difference of any two clocks.

The last two together are the *slack*. Outages and differences of clocks that add up to less than
it hide nothing. Held messages may be due at any time: their partition is always read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from delaylevel.cluster.port import TopicAdmin
from delaylevel.errors import NotFoundError
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription, Role
from delaylevel.model.position import EARLIEST, Position
from delaylevel.model.source_partition import SourcePartition, source_partitions
from delaylevel.model.strategy import Levels
from delaylevel.model.topic_name import TopicName

# A clock that is set to a wrong time zone and an outage over night are within it.
DEFAULT_SLACK_MS = 86_400_000
_THREADS = 8


@dataclass(frozen=True)
class Window:
    """A range of times, in ms since the epoch.

    Attributes:
        from_ms: the first time in it; None for no bound.
        before_ms: the first time behind it; None for no bound.
    """

    from_ms: int | None = None
    before_ms: int | None = None

    @property
    def bounded(self) -> bool:
        """Whether any time is outside."""
        return self.from_ms is not None or self.before_ms is not None

    def __contains__(self, time_ms: int) -> bool:
        return (self.from_ms is None or self.from_ms <= time_ms) and (
            self.before_ms is None or time_ms < self.before_ms
        )

    def intersect(self, other: Window) -> Window:
        """Return the times that are in both."""
        lower = [time for time in (self.from_ms, other.from_ms) if time is not None]
        upper = [time for time in (self.before_ms, other.before_ms) if time is not None]
        return Window(max(lower, default=None), min(upper, default=None))


ALWAYS = Window()


@dataclass(frozen=True)
class PendingRange:
    """What is pending in one source partition, as far as it can be in a window.

    Attributes:
        source: the partition.
        start: the first position.
        end: the first position behind the range.
    """

    source: SourcePartition
    start: Position
    end: Position


def publish_window(
    levels: Levels, source: SourcePartition, due: Window, slack_ms: int = DEFAULT_SLACK_MS
) -> Window:
    """Return when the messages of a partition that are due in a window can have been published.

    Args:
        levels: of its level topic.
        source: the partition.
        due: the window of due times.
        slack_ms: see the module.
    """
    if source.role is not Role.LEVEL:
        return ALWAYS
    level = levels[source.level]
    least_ms = (source.partition + 1) * level.unit_ms
    from_ms = before_ms = None
    if due.from_ms is not None and not source.takes_longer:
        from_ms = due.from_ms - least_ms - level.unit_ms - slack_ms
    if due.before_ms is not None:
        before_ms = due.before_ms - least_ms + slack_ms
    return Window(from_ms, before_ms)


def pending_ranges(
    admin: TopicAdmin,
    descriptions: Iterable[LevelTopicDescription],
    now_ms: int,
    *,
    due: Window = ALWAYS,
    wanted: Callable[[SourcePartition], bool] = lambda _: True,
    slack_ms: int = DEFAULT_SLACK_MS,
) -> list[PendingRange]:
    """Return where everything stands that is pending now and due in a window.

    Pending is what stands behind the acknowledged front of the subscription. The fronts of all
    partitions are read before the ends of any: what a mover takes from one partition into another
    meanwhile is in one of the ranges, or in both. Nothing is acknowledged, locked or moved.

    Args:
        admin: the cluster.
        descriptions: the level topics.
        now_ms: the present time, ms since the epoch.
        due: the window of due times; the ranges may hold messages that are due outside of it.
        wanted: says whether a partition is to be looked at.
        slack_ms: outages and differences of clocks that the ranges allow for; see the module.

    Raises:
        BrokerError: a partition cannot be asked.
    """
    chosen: list[tuple[SourcePartition, Window]] = []
    for description in descriptions:
        for source in source_partitions(description):
            published = publish_window(description.levels, source, due, slack_ms)
            # What can only be published in the future is not there.
            if wanted(source) and (published.from_ms is None or published.from_ms <= now_ms):
                chosen.append((source, published))
    if not chosen:
        return []
    with ThreadPoolExecutor(min(_THREADS, len(chosen)), "delaylevel-pending") as pool:
        sources = [source for source, _ in chosen]
        starts = list(pool.map(lambda source: pending_start(admin, source.name), sources))
        ends = list(pool.map(lambda source: _behind_last(admin, source), sources))
        items = [
            (PendingRange(source, start, end), published)
            for (source, published), start, end in zip(chosen, starts, ends, strict=True)
            if start < end
        ]
        found: Sequence[PendingRange] = list(
            pool.map(lambda item: _narrow(admin, item[0], item[1], now_ms), items)
        )
    return [item for item in found if item.start < item.end]


def pending_start(admin: TopicAdmin, partition: TopicName) -> Position:
    """Return the position behind everything that the mover or dispatcher has acknowledged."""
    try:
        return admin.mark_delete_position(partition, SUBSCRIPTION).next_entry
    except NotFoundError:
        return EARLIEST  # nothing is acknowledged; a missing topic shows when its end is read


def _behind_last(admin: TopicAdmin, source: SourcePartition) -> Position:
    last = admin.last_message_id(source.name)
    return EARLIEST if last is None or last.entry < 0 else last.next_entry


def _narrow(admin: TopicAdmin, item: PendingRange, published: Window, now_ms: int) -> PendingRange:
    start, end = item.start, item.end
    if published.from_ms is not None and published.from_ms > 0:
        first = admin.message_id_at(item.source.name, published.from_ms)
        start = end if first is None else max(start, first.entry_start)
    # A bound in the future excludes next to nothing: the search is spared.
    if published.before_ms is not None and published.before_ms <= now_ms and start < end:
        behind = admin.message_id_at(item.source.name, published.before_ms)
        end = end if behind is None else min(end, behind.entry_start)
    return PendingRange(item.source, start, end)
