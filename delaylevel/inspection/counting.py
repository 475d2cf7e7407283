"""Exact distributions of due times: every pending message is read, and none is kept."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from itertools import islice

from delaylevel.topics.scan import PendingRange

from .distribution import CountedDistribution
from .parallel import ReadProgress, read_in_parallel
from .snapshot import PendingSnapshot, observe, own_topic

_CHUNK = 2000


def count(
    snapshot: PendingSnapshot, edges_ms: Sequence[int], progress: ReadProgress
) -> Generator[tuple[PendingRange, CountedDistribution], None, None]:
    """Count the messages of each range of a snapshot, and yield ranges in any order.

    ``edges_ms`` are the only times for which the result has counts.
    """

    def read(item: PendingRange) -> Iterator[tuple[PendingRange, CountedDistribution]]:
        counted = CountedDistribution(edges_ms)
        own = own_topic(item.source)
        with closing(snapshot.read(item)) as messages:
            while True:
                found = [observe(one, own) for one in islice(messages, _CHUNK)]
                if not found:
                    break
                progress.add(len(found))
                counted.looked_at += len(found)
                for one in snapshot.select(item.source, found):
                    counted.add(one.due_ms, one.target)
        yield item, counted

    return read_in_parallel(snapshot.ranges, read)
