"""Due messages that wait for their target: it is being opened, or takes them slowly."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from delaylevel.cluster.targets.pool import TargetKey
from delaylevel.dispatcher.journal.records import unpack
from delaylevel.model.clock import Clock
from delaylevel.structures.rows import Rows
from delaylevel.structures.segments.pending import PendingSegments

from .attribute import MessageAttribute
from .batches import Columns, DueBatch, MessageRecord, joined
from .pause_gate import PAUSED_PARTITION
from .pending import PendingIndex

# A target that is being opened needs no more than this; a slow one may use the disk.
_IN_MEMORY = 2_000
_BYTES_IN_MEMORY = 2 << 20
_MESSAGE_BYTES = 500  # a message without its payload


class WaitingQueue:
    """Messages of one target, which come out in the order in which they were put in.

    The first ones are kept in memory, and the rest in segments, which may spill.

    Args:
        overflow: function that returns empty segments; None to keep everything in memory.
        attribute: attribute of the messages for live queries.
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
        """Add messages: all of them, or none.

        Raises:
            SpillFullError: the disk is full.
        """
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
        self._rest.put(rows, batch.records, None)

    def loose(self) -> list[Columns]:
        """Return the messages that are kept in memory."""
        return list(self._batches)

    @property
    def overflow(self) -> PendingIndex | None:
        """The segments with the other messages; None without any."""
        return self._rest

    def take(self, count: int) -> Columns:
        """Remove the first messages; return due times, packed positions and records.

        Args:
            count: maximum number of messages, at least 1.

        Raises:
            DamagedSegmentError: a spill file is gone.
        """
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

    Attributes:
        attribute: attribute of the messages for live queries.
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
        """Add messages: all of them, or none.

        Raises:
            SpillError: the disk is full, or cannot be written.
        """
        queue = self._queues.get(target)
        if queue is None:
            queue = WaitingQueue(self._clock, self._overflow, self.attribute)
            self._queues[target] = queue
        queue.put(batch)

    def take(self, target: TargetKey, count: int) -> Columns:
        """Remove the first messages of a target; return due times, packed positions and records.

        Args:
            count: maximum number of messages, at least 1.

        Raises:
            DamagedSegmentError: a spill file is gone.
        """
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
