"""Ranges of the source partitions in which messages with given due times can be.

A message that was published at p to partition k of a level with unit u is due in
[p + (k+1)u, p + (k+2)u], because producer and mover choose the partition by their own clock at
that moment. So a range of due times is a range of publish times, which the broker can search for.
Three things widen it:

- A last partition also takes every longer delay, so it has only one bound. The same applies to a
  partition that was the last one before an expansion: older messages may still be there, and
  producers that do not know of the expansion yet continue to use it.
- A mover that repeats a batch after an outage routes by the time of its first try: the message is
  due sooner after p, by the duration of the outage.
- Publish times are the publishers' own clocks. If they are not in order, a binary search is off by
  at most the difference of any two clocks.

The sum of the last two is the *slack*. Outages and clock differences within it hide nothing. Held
messages may be due at any time: their partition is always read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.threads import in_parallel
from delaylevel.errors import NotFoundError
from delaylevel.model.level_topic import SUBSCRIPTION, LevelTopicDescription, Role
from delaylevel.model.position import EARLIEST, Position, SourcePartition, source_partitions
from delaylevel.model.strategy import Levels
from delaylevel.model.topic_name import TopicName

# Enough for a clock in a wrong time zone and an outage overnight.
DEFAULT_SLACK_MS = 86_400_000


@dataclass(frozen=True)
class Window:
    """A range of times, in ms since the epoch; None for no bound."""

    from_ms: int | None = None  # the first time in it
    before_ms: int | None = None  # the first time after it

    def __contains__(self, time_ms: int) -> bool:
        return (self.from_ms is None or self.from_ms <= time_ms) and (
            self.before_ms is None or time_ms < self.before_ms
        )


ALWAYS = Window()


@dataclass(frozen=True)
class PendingRange:
    """Positions [start, end) of a partition that include all pending messages of a window."""

    source: SourcePartition
    start: Position
    end: Position


def publish_window(
    levels: Levels, source: SourcePartition, due: Window, slack_ms: int = DEFAULT_SLACK_MS
) -> Window:
    """Return the possible publish times of a partition's messages that are due in a window."""
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
    description: LevelTopicDescription,
    now_ms: int,
    *,
    due: Window = ALWAYS,
    wanted: Callable[[SourcePartition], bool] = lambda _: True,
    slack_ms: int = DEFAULT_SLACK_MS,
) -> list[PendingRange]:
    """Return ranges that include all messages that are pending now and due in a window."""
    chosen: list[tuple[SourcePartition, Window]] = []
    for source in source_partitions(description):
        published = publish_window(description.levels, source, due, slack_ms)
        # Messages that can only be published in the future do not exist yet.
        if wanted(source) and (published.from_ms is None or published.from_ms <= now_ms):
            chosen.append((source, published))
    # All starts before all ends: a message that moves on in between is in one of its partitions.
    starts = in_parallel(lambda item: pending_start(admin, item[0].name), chosen)

    def find(item: tuple[tuple[SourcePartition, Window], Position]) -> PendingRange:
        (source, published), start = item
        return published_range(admin, source, published, start, now_ms)

    found = in_parallel(find, list(zip(chosen, starts, strict=True)))
    return [item for item in found if item.start < item.end]


def pending_start(admin: TopicAdmin, partition: TopicName) -> Position:
    """Return the position behind everything that the mover or dispatcher has acknowledged."""
    try:
        return admin.mark_delete_position(partition, SUBSCRIPTION).next_entry
    except NotFoundError:
        return EARLIEST  # nothing is acknowledged; a missing topic shows when its end is read


def published_range(
    admin: TopicAdmin, source: SourcePartition, published: Window, start: Position, now_ms: int
) -> PendingRange:
    """Return the range of a partition from a position on, narrowed to a window of publish times."""
    last = admin.last_message_id(source.name)
    end = EARLIEST if last is None else last.next_entry
    if published.from_ms is not None and published.from_ms > 0 and start < end:
        first = admin.message_id_at(source.name, published.from_ms)
        start = end if first is None else max(start, first)
    # A bound in the future excludes next to nothing, so the search is not worth a request.
    if published.before_ms is not None and published.before_ms <= now_ms and start < end:
        behind = admin.message_id_at(source.name, published.before_ms)
        end = end if behind is None else min(end, behind)
    return PendingRange(source, start, end)
