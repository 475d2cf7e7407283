"""The messages of one delay queue at one moment."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from delaylevel.dispatcher.delay_queue import DelayQueue
from delaylevel.dispatcher.journal.records import unpack
from delaylevel.dispatcher.record import MessageAttribute, MessageRecord
from delaylevel.dispatcher.turns import TURNS
from delaylevel.structures.rows import Int64s, Rows
from delaylevel.structures.segments.cursors import PayloadRows
from delaylevel.structures.segments.frozen import FrozenSegments

#: Rank of queries among the turns: behind all partitions that publish or are read.
_QUERYING = 1 << 20


def working() -> AbstractContextManager[None]:
    """Return a context for a slice of the work of a query."""
    return TURNS.take(_QUERYING)


class DueRange(NamedTuple):
    """A range of due times and attributes.

    Attributes:
        from_ms, before_ms: due times, ms since the epoch, [from, before).
        least, most: attributes, both inclusive.
    """

    from_ms: int
    before_ms: int
    least: float = -np.inf
    most: float = np.inf


class Loose(NamedTuple):
    """Messages outside the segments: in flight, or waiting for their target."""

    due_ms: Int64s
    positions: Int64s
    records: list[MessageRecord]


def loose_messages(delay_queue: DelayQueue) -> list[Loose]:
    """Return the messages outside the segments, in lists that never change."""
    found = [
        Loose(batch.due_ms, batch.positions, batch.records)
        for batch in delay_queue._in_flight.batches()
    ]
    found += [Loose(*each) for each in delay_queue.waiting.loose()]
    return [*found, Loose(*delay_queue._unresolved.loose())]


class QueueView:
    """The messages of a delay queue that are not released, as they are when it is made.

    Its thread makes it; another thread asks the questions, and closes it. These messages count:
    those that wait for their due time, or for their target, and those in flight until their commit.
    A message without a readable due time has the due time 0. A cancelled message is there until its
    due time, and so is a cancellation that waits for its message.

    Attributes:
        cancellations: number of cancellations that wait for their message.
        read_to: packed position of the last message that was read; all before it are known.

    Args:
        wanted: the range; rows outside it may be left out.
    """

    def __init__(self, delay_queue: DelayQueue, wanted: DueRange) -> None:
        self._wanted = wanted
        self.attribute = delay_queue.pending.attribute or MessageAttribute()
        self.read_to = delay_queue._open.last_offered
        self.cancelled = delay_queue.cancelling.cancelled
        self.cancellations = delay_queue.cancelling.waiting
        self._loose = loose_messages(delay_queue)
        self._frozen = [
            index.segments.freeze(wanted.from_ms, wanted.before_ms)
            for index in (delay_queue.pending, *delay_queue.waiting.overflows())
        ]
        for frozen in self._frozen:
            frozen.working = working

    def close(self) -> None:
        """Close the files."""
        for frozen in self._frozen:
            frozen.close()

    @property
    def most_rows(self) -> int:
        """A number of messages that is not exceeded; it costs next to nothing."""
        return sum(frozen.most_rows for frozen in self._sources())

    @property
    def span(self) -> tuple[int, int] | None:
        """Bounds of the due times, [first, last], ms since the epoch; None without messages."""
        spans = [span for frozen in self._sources() if (span := frozen.span) is not None]
        if not spans:
            return None
        return min(first for first, _ in spans), max(last for _, last in spans)

    def table(self, before_ms: int | None = None) -> pa.Table:
        """Return the messages in due order, equal due times by position.

        Args:
            before_ms: an earlier end of the range, ms since the epoch.

        Returns:
            Columns due_ms, ledger_id, entry_id (entry << 10 | batch index) and attribute.

        Raises:
            FileNotFoundError: a file was used up meanwhile; ask again.
        """
        least, most = self._wanted.least, self._wanted.most
        found = [frozen.table(least, most, before_ms) for frozen in self._sources()]
        whole = pa.concat_tables(found)
        if sum(bool(each.num_rows) for each in found) > 1:
            whole = whole.sort_by([(name, "ascending") for name in whole.column_names[:3]])
        return whole

    def attributes(self) -> npt.NDArray[np.float64]:
        """Return the attributes of the messages, in any order; errors as for `table`."""
        least, most = self._wanted.least, self._wanted.most
        return np.concatenate([frozen.attributes(least, most) for frozen in self._sources()])

    def counts(self, edges_ms: Int64s) -> Int64s:
        """Return the number of messages due before each ascending edge; errors as for `table`."""
        counted = [frozen.counts(edges_ms) for frozen in self._sources()]
        total: Int64s = np.sum(counted, axis=0, dtype=np.int64)
        return total

    def _sources(self) -> list[FrozenSegments]:
        parts = []
        for loose in self._loose:
            if loose.records:
                rows: Rows = np.array([loose.due_ms, *unpack(loose.positions)], dtype=np.int64)
                parts.append(PayloadRows(rows, self.attribute.of(loose.records), []))
        self._loose = []
        if parts:
            joined = PayloadRows.join_columns(parts)
            wanted = self._wanted
            more = FrozenSegments(wanted.from_ms, wanted.before_ms, [joined], (), ())
            self._frozen.append(more)
        return self._frozen
