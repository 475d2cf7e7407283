"""The messages of a window partition that wait: for their due time, a target, or a resume.

A tracker determines what is due, and segments hold the records, in memory and on disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from delaylevel.cluster.targets.pool import TargetKey
from delaylevel.errors import DelayLevelError, InvalidInputError
from delaylevel.model.clock import Clock
from delaylevel.structures.positions import ENTRY_BITS
from delaylevel.structures.segments.pending import PendingSegments

from .record import STORED, Batch, attributes, packed, unpacked

#: Approximate memory of a row outside the segments: tracker, set of open positions, and IDs.
_ROW_BYTES = 20
#: Partitions in the keys of queues: of messages that wait until the number of their target's
#: partitions is known, for the end of a pause, for room to be set aside, and those of which the
#: disk takes no more.
UNKNOWN_PARTITION, PAUSED_PARTITION, ASIDE_PARTITION, DISK_FULL_PARTITION = -2, -3, -4, -5
# A target that is being opened needs no more than this; a slow one may use the disk.
_IN_MEMORY = 2_000
_LEAST_BYTES = 64 << 10  # budget for the rest of a target, if there are many
_MESSAGE_BYTES = 500  # a message without its payload


class PendingIndex:
    """Records that wait for their due time; they come out in the order (due time, position)."""

    def __init__(self, segments: PendingSegments, attribute: str) -> None:
        if len(segments):
            raise InvalidInputError("the segments must be empty")
        self.segments = segments
        self.last_due_ms = 0  # highest due time so far
        self.attribute = attribute  # of the messages, for queries
        self._next_due_ms: int | None = None
        self._changed = False

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.segments)

    @property
    def memory_bytes(self) -> int:
        """Approximate memory in use."""
        return self.segments.memory_bytes + _ROW_BYTES * len(self.segments)

    @property
    def next_due_ms(self) -> int | None:
        """Earliest due time, ms since the epoch; None without records."""
        if self._changed:  # it is asked for several times between two changes
            self._next_due_ms = self.segments.tracker.next_deliver_at_ms()
            self._changed = False
        return self._next_due_ms

    def put(self, batch: Batch, *, force: bool = True) -> None:
        """Add records; without ``force``, none if memory is used up and the disk takes no more."""
        records = batch.records
        if not records:
            return
        attribute = attributes(self.attribute, records)
        payloads = [each[STORED] if type(each) is tuple else packed(each) for each in records]
        self.segments.append(batch.rows, payloads, attribute, force=force)
        self.last_due_ms = max(self.last_due_ms, int(batch.due_ms.max()))
        self._changed = True

    def take(self, now_ms: int, count: int) -> Batch:
        """Remove and return messages that are due."""
        self._changed = True
        expected = len(self.segments)
        rows, payloads = self.segments.read_due(now_ms, count)
        if expected - len(self.segments) != len(payloads):
            raise DelayLevelError(
                f"tracker and segments disagree on the messages due at {now_ms}; none of them was "
                "released: start again from the journal, and report this as a defect"
            )
        due_ms, ledgers, entries = rows
        return Batch(due_ms, ledgers << ENTRY_BITS | entries, list(map(unpacked, payloads)))


@dataclass(slots=True)
class _Queue:
    """Messages of one target: the first ones in memory, and the rest in segments."""

    batches: deque[Batch] = field(default_factory=deque)
    count: int = 0  # of messages in memory
    rest: PendingIndex | None = None

    def __len__(self) -> int:
        """Return the number of messages."""
        return self.count + (0 if self.rest is None else len(self.rest))


class WaitingQueues:
    """The due messages that wait, in a queue for each target.

    Messages come out of a queue in the order in which they were put in.

    Args:
        overflow: function that returns an empty index, for what memory has no room for.
        budget: memory limit of all targets together, but for some KiB of each, in bytes.
    """

    def __init__(self, clock: Clock, overflow: Callable[[], PendingIndex], budget: int) -> None:
        self._clock = clock
        self._overflow = overflow
        self._budget = budget
        self._size = 0  # of what is kept in memory outside the segments
        self._queues: dict[TargetKey, _Queue] = {}

    def __len__(self) -> int:
        """Return the number of messages."""
        return sum(map(len, self._queues.values()))

    @property
    def targets(self) -> list[TargetKey]:
        """The targets that messages wait for."""
        return list(self._queues)

    @property
    def memory_bytes(self) -> int:
        """Approximate memory in use."""
        return self._size + sum(each.memory_bytes for each in self.overflows)

    @property
    def disk_bytes(self) -> int:
        """Total size of the spill files."""
        return sum(each.segments.spilled.size_bytes for each in self.overflows)

    def first_due_ms(self, target: TargetKey) -> int | None:
        """Return the due time of a target's first message, ms since the epoch."""
        each = self._queues[target]
        if each.batches:
            return int(each.batches[0].due_ms[0])
        return None if each.rest is None else each.rest.next_due_ms

    @property
    def loose(self) -> list[Batch]:
        """The messages that are kept in memory."""
        return [batch for each in self._queues.values() for batch in each.batches]

    @property
    def overflows(self) -> list[PendingIndex]:
        """The segments that keep the other messages."""
        return [each.rest for each in self._queues.values() if each.rest is not None]

    def count(self, target: TargetKey) -> int:
        """Return the number of messages that wait for a target."""
        found = self._queues.get(target)
        return 0 if found is None else len(found)

    def put(self, target: TargetKey, batch: Batch) -> None:
        """Add messages that are not launched; a SpillError means that none of them is added."""
        each = self._queues.get(target) or _Queue()
        # What has found the disk full is little: nothing else is taken meanwhile.
        in_memory = target.partition == DISK_FULL_PARTITION
        full = each.count >= _IN_MEMORY or self._size >= self._budget
        if in_memory or not (full or each.rest):
            each.batches.append(batch)
            each.count += len(batch)
            self._size += _size(batch)
        else:
            each.rest = each.rest if each.rest is not None else self._overflow()
            share = max(self._budget // (len(self._queues) + 1), _LEAST_BYTES)
            each.rest.segments.budget_bytes = min(each.rest.segments.budget_bytes, share)
            each.rest.put(batch, force=False)
        self._queues[target] = each

    def take(self, target: TargetKey, count: int) -> Batch:
        """Remove and return the first messages of a target."""
        each = self._queues[target]
        taken: list[Batch] = []
        if not each.batches:
            assert each.rest is not None
            # All are due, whatever the clock says now.
            taken.append(each.rest.take(max(self._clock.now_ms(), each.rest.last_due_ms), count))
        while each.batches and count > 0:
            batch = each.batches.popleft()
            if len(batch) > count:
                batch, rest = batch.divide([range(count), range(count, len(batch))])
                each.batches.appendleft(rest)
            taken.append(batch)
            count -= len(batch)
            each.count -= len(batch)
            self._size -= _size(batch)
        if not len(each):
            if each.rest is not None:
                each.rest.segments.close()
            del self._queues[target]
        return Batch.join(taken)

    def close(self) -> None:
        """Delete the spill files."""
        for each in self.overflows:
            each.segments.close()


def _size(batch: Batch) -> int:
    return sum(_MESSAGE_BYTES + len(each.value or b"") for each in batch.messages)
