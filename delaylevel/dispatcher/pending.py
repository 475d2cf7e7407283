"""The messages of a window partition that wait: for their due time, a target, or a resume.

A tracker determines what is due, and segments hold the records, in memory and on disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np

from delaylevel.cluster.targets.pool import TargetKey
from delaylevel.dispatcher.journal.records import ENTRY_BITS, unpack
from delaylevel.errors import DelayLevelError, InvalidInputError
from delaylevel.model.clock import Clock
from delaylevel.model.level_topic import LevelTopicDescription, Spread
from delaylevel.structures.rows import DUE, Int64s, Rows
from delaylevel.structures.segments.pending import PendingSegments
from delaylevel.structures.tracker import TimeBucketTracker

from .host import Host
from .record import (
    PACKED_FIELDS,
    STORED,
    Columns,
    DueBatch,
    MessageAttribute,
    MessageRecord,
    joined,
    packed,
    unpacked,
)
from .turns import TURNS

_LEAST_BYTES = 1 << 20
#: Approximate memory of a row outside the segments: tracker, set of open positions, and IDs.
_ROW_BYTES = 20
#: Partitions in the keys of queues: of messages that wait until the number of their target's
#: partitions is known, for the end of a pause, and for room to be set aside.
UNKNOWN_PARTITION, PAUSED_PARTITION, ASIDE_PARTITION = -2, -3, -4
# A target that is being opened needs no more than this; a slow one may use the disk.
_IN_MEMORY = 2_000
_BYTES_IN_MEMORY = 2 << 20
_MESSAGE_BYTES = 500  # a message without its payload


def pending_segments(
    directory: Path | None, budget_bytes: int, description: LevelTopicDescription, clock: Clock
) -> PendingSegments:
    """Return segments for the pending messages of one partition owner.

    Args:
        directory: directory for spill files, which nothing else may use; None for no files.
    """
    return PendingSegments(
        directory,
        budget_bytes=max(budget_bytes, _LEAST_BYTES),
        bucket_ms=_bucket_ms(description),
        clock=clock.now_ms,
        writing=TURNS.pause,
    )


def overflow_segments(directory: Path | None, clock: Clock) -> Callable[[], PendingSegments]:
    """Return a function that returns segments for the due messages of a slow target."""
    numbers = count(1)
    return lambda: PendingSegments(
        None if directory is None else directory / f"slow-{next(numbers)}",
        budget_bytes=_LEAST_BYTES,
        bucket_ms=65_536,
        clock=clock.now_ms,
    )


def _bucket_ms(description: LevelTopicDescription) -> int:
    """Return the range of due times of one spill file; the window gets some hundreds of files."""
    longest = max(level.near_due_ms for level in list(description.levels)[-1:])
    return min(max(longest // 512, 4_096), 65_536)


class PendingIndex:
    """Records that wait for their due time; they come out in the order (due time, position).

    Attributes:
        last_due_ms: highest due time so far, ms since the epoch.
        attribute: attribute of the messages for queries; None for the sizes of the stored records.
    """

    def __init__(self, segments: PendingSegments) -> None:
        if len(segments):
            raise InvalidInputError("the segments must be empty")
        self.segments = segments
        self.last_due_ms = 0
        self.attribute: MessageAttribute | None = None
        self._next_due_ms: int | None = None
        self._changed = False

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.segments)

    @property
    def tracker(self) -> TimeBucketTracker:
        """The due times of the records."""
        return self.segments.tracker

    @property
    def memory_bytes(self) -> int:
        """Approximate memory in use."""
        return self.segments.memory_bytes + _ROW_BYTES * len(self.tracker)

    @property
    def next_due_ms(self) -> int | None:
        """Earliest due time, ms since the epoch; None without records."""
        if self._changed:  # it is asked for several times between two changes
            self._next_due_ms = self.tracker.next_deliver_at_ms()
            self._changed = False
        return self._next_due_ms

    def put(self, rows: Rows, records: list[MessageRecord], *, force: bool = False) -> None:
        """Add records: all of them, or none.

        Args:
            rows: due times, ledger IDs and entry IDs, shape (3, n), n > 0.
            force: True for records that were in memory before; the budget does not refuse them.

        Raises:
            SpillWriteError: the disk is full or fails, and the memory budget is used up.
        """
        attribute = None if self.attribute is None else self.attribute.of(records)
        payloads = [
            each[STORED] if len(each) == PACKED_FIELDS else packed(each) for each in records
        ]
        self.segments.append(rows, payloads, attribute, force=force)
        self.last_due_ms = max(self.last_due_ms, int(rows[DUE].max()))
        self._changed = True

    def put_again(self, due_ms: Int64s, positions: Int64s, records: list[MessageRecord]) -> None:
        """Add records that were in memory; the budget does not refuse them."""
        if records:
            rows: Rows = np.array([due_ms, *unpack(positions)], dtype=np.int64)
            self.put(rows, records, force=True)

    def take(self, now_ms: int, count: int) -> tuple[Int64s, Int64s, list[MessageRecord]]:
        """Remove messages that are due; return their due times, packed positions and records."""
        self._changed = True
        expected = len(self.tracker)
        rows, payloads = self.segments.read_due(now_ms, count)
        if expected - len(self.tracker) != len(payloads):
            raise DelayLevelError(
                f"tracker and segments disagree on the messages due at {now_ms}; none of them was "
                "released: start again from the journal, and report this as a defect"
            )
        due_ms, ledgers, entries = rows
        return due_ms, ledgers << ENTRY_BITS | entries, list(map(unpacked, payloads))


def paused_key(key: TargetKey) -> TargetKey:
    """Return the key of the queue in which messages wait for the end of a pause."""
    return key._replace(partition=PAUSED_PARTITION)


# Messages of a paused target wait in a queue of their own. After the pause, this queue is emptied
# at once, or evenly over the time that `resume` was given. Until then, a message that was due
# before the end of the pause joins the queue. With a time, later messages pass it.
class PauseGate:
    """The decision which due messages wait for the end of a pause.

    Args:
        waiting: function that returns the number of messages in a queue.
    """

    def __init__(self, host: Host, waiting: Callable[[TargetKey], int]) -> None:
        self._description = host.description
        self._waiting = waiting
        self._clock = host.clock
        self._released_ms: dict[TargetKey, int] = {}

    def is_paused(self, topic: str) -> bool:
        """Return True if nothing is released to a target now."""
        pauses = self._description().pauses
        return bool(pauses.paused) and pauses.paused_since_ms(topic) is not None

    def is_open(self, key: TargetKey) -> bool:
        """Return True if no message of a target has to wait."""
        return not self.is_paused(key.topic) and not self._waiting(paused_key(key))

    def waits(self, batch: DueBatch, key: TargetKey) -> Int64s:
        """Return the indices of the messages of a batch that have to wait, ascending."""
        size = len(batch)
        if self.is_paused(key.topic):
            return np.arange(size)
        spread = self._spread(key)
        if spread is not None:
            return np.flatnonzero(batch.due_ms < spread.begin_ms)
        return np.arange(size if self._waiting(paused_key(key)) else 0)

    def rests(self, key: TargetKey) -> bool:
        """Return True if no message of a queue may leave now, whatever its target does."""
        if self.is_paused(key.topic):
            return True
        return key.partition == PAUSED_PARTITION and self._spread(key) is not None

    def next_ms(self, key: TargetKey) -> int | None:
        """Return the time of the next release of a spread queue, ms since the epoch, or None."""
        if key.partition != PAUSED_PARTITION or self.is_paused(key.topic):
            return None
        spread = self._spread(key)
        if spread is None:
            return None
        return spread.next_ms(self._waiting(key), self._released_ms.get(key, 0))

    def count(self, key: TargetKey) -> int:
        """Return the number of messages that may leave a queue now."""
        left = self._waiting(key)
        if self.is_paused(key.topic) or not left:
            self._released_ms.pop(key, None)
            return 0
        spread = self._spread(key)
        if spread is None:
            self._released_ms.pop(key, None)
            return left
        now_ms = self._clock.now_ms()
        # A new owner begins with what is left, and does not make up for what it did not release.
        last_ms = self._released_ms.get(key, now_ms)
        count, self._released_ms[key] = spread.take(left, last_ms, now_ms)
        return count

    def _spread(self, key: TargetKey) -> Spread | None:
        pauses = self._description().pauses
        return pauses.spread(key.topic, self._clock.now_ms()) if pauses.resumed else None


class WaitingQueue:
    """Messages of one target, which come out in the order in which they were put in.

    The first ones are kept in memory, and the rest in segments, which may spill.

    Args:
        overflow: function that returns empty segments; None to keep everything in memory.
    """

    def __init__(
        self,
        clock: Clock,
        overflow: Callable[[], PendingSegments] | None,
        attribute: MessageAttribute | None = None,
    ) -> None:
        self._clock = clock
        self._overflow = overflow
        self._attribute = attribute
        self._batches: deque[Columns] = deque()
        self._count = self._bytes = 0
        self._rest: PendingIndex | None = None

    def __len__(self) -> int:
        """Return the number of messages."""
        return self._count + (0 if self._rest is None else len(self._rest))

    @property
    def memory_bytes(self) -> int:
        """Approximate memory in use."""
        return self._bytes + (0 if self._rest is None else self._rest.memory_bytes)

    @property
    def disk_bytes(self) -> int:
        """Total size of the spill files."""
        return 0 if self._rest is None else self._rest.segments.disk_bytes

    @property
    def first_due_ms(self) -> int | None:
        """Due time of the first message, ms since the epoch; None without messages."""
        if self._batches:
            return int(self._batches[0][0][0])
        return None if self._rest is None else self._rest.next_due_ms

    def put(self, batch: DueBatch) -> None:
        """Add messages: all of them, or none."""
        full = self._count >= _IN_MEMORY or self._bytes >= _BYTES_IN_MEMORY
        if self._overflow is None or not (full or self._rest):
            self._batches.append((batch.due_ms, batch.positions, batch.records))
            self._count += len(batch)
            self._bytes += sum(map(_size, batch.records))
            return
        if self._rest is None:
            self._rest = PendingIndex(self._overflow())
            self._rest.attribute = self._attribute
        ledgers, entries = unpack(batch.positions)
        rows: Rows = np.array([batch.due_ms, ledgers, entries], dtype=np.int64)
        self._rest.put(rows, batch.records)

    def loose(self) -> list[Columns]:
        """Return the messages that are kept in memory."""
        return list(self._batches)

    @property
    def overflow(self) -> PendingIndex | None:
        """The segments with the other messages; None without any."""
        return self._rest

    def take(self, count: int) -> Columns:
        """Remove the first messages; return due times, packed positions and records."""
        if not self._batches:
            assert self._rest is not None
            # All are due, whatever the clock says now.
            return self._rest.take(max(self._clock.now_ms(), self._rest.last_due_ms), count)
        taken: list[Columns] = []
        while self._batches and count > 0:
            due_ms, positions, records = self._batches.popleft()
            if len(records) > count:
                self._batches.appendleft((due_ms[count:], positions[count:], records[count:]))
                due_ms, positions, records = due_ms[:count], positions[:count], records[:count]
            taken.append((due_ms, positions, records))
            count -= len(records)
            self._count -= len(records)
            self._bytes -= sum(map(_size, records))
        return joined(taken)

    def close(self) -> None:
        """Delete the spill files."""
        if self._rest is not None:
            self._rest.segments.close()


def _size(record: MessageRecord) -> int:
    return _MESSAGE_BYTES + sum(len(value) for value in record if type(value) is bytes)


class WaitingQueues:
    """The waiting queues of all targets.

    Args:
        overflow: function that returns empty segments; None to keep everything in memory.
    """

    def __init__(self, clock: Clock, overflow: Callable[[], PendingSegments] | None) -> None:
        self._clock = clock
        self._overflow = overflow
        self.attribute: MessageAttribute | None = None
        self._queues: dict[TargetKey, WaitingQueue] = {}

    def __len__(self) -> int:
        """Return the number of messages."""
        return sum(map(len, self._queues.values()))

    @property
    def memory_bytes(self) -> int:
        """Approximate memory in use."""
        return sum(queue.memory_bytes for queue in self._queues.values())

    @property
    def disk_bytes(self) -> int:
        """Total size of the spill files."""
        return sum(queue.disk_bytes for queue in self._queues.values())

    @property
    def first_due_ms(self) -> int | None:
        """Earliest due time of the first messages, ms since the epoch; None without messages.

        Those that wait for the end of a pause, and not for their target, do not count.
        """
        found = (
            queue.first_due_ms
            for key, queue in self._queues.items()
            if key.partition != PAUSED_PARTITION
        )
        return min((due_ms for due_ms in found if due_ms is not None), default=None)

    def loose(self) -> list[Columns]:
        """Return the messages that are kept in memory, without their segments."""
        return [batch for queue in self._queues.values() for batch in queue.loose()]

    def overflows(self) -> list[PendingIndex]:
        """Return the segments that keep the other messages."""
        found = (queue.overflow for queue in self._queues.values())
        return [index for index in found if index is not None]

    @property
    def targets(self) -> list[TargetKey]:
        """The targets that messages wait for."""
        return list(self._queues)

    def count(self, target: TargetKey) -> int:
        """Return the number of messages that wait for a target."""
        queue = self._queues.get(target)
        return 0 if queue is None else len(queue)

    def put(self, target: TargetKey, batch: DueBatch) -> None:
        """Add messages: all of them, or none."""
        queue = self._queues.get(target)
        if queue is None:
            # What waits for room to be set aside has found the disk full, or is little: nothing
            # else is taken meanwhile.
            in_memory = target.partition == ASIDE_PARTITION
            overflow = None if in_memory else self._overflow
            queue = WaitingQueue(self._clock, overflow, self.attribute)
            self._queues[target] = queue
        queue.put(batch)

    def take(self, target: TargetKey, count: int) -> Columns:
        """Remove the first messages of a target; return due times, packed positions and records."""
        queue = self._queues[target]
        taken = queue.take(count)
        if not len(queue):
            queue.close()
            del self._queues[target]
        return taken

    def close(self) -> None:
        """Delete the spill files."""
        for queue in self._queues.values():
            queue.close()
