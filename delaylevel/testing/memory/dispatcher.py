"""Simple dispatcher of the final window, without journal, threads and files."""

from __future__ import annotations

import contextlib
import heapq
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from delaylevel.cluster.partition_lock import PartitionLock
from delaylevel.cluster.port import TopicAdmin
from delaylevel.cluster.reader import read_range
from delaylevel.errors import EnvelopeError
from delaylevel.model.clock import Clock
from delaylevel.model.level_topic import FinalWindow, LevelTopicDescription, Role
from delaylevel.model.message import ParkedMessage
from delaylevel.model.position import Position
from delaylevel.model.report import ForwardReport
from delaylevel.model.source_partition import SourcePartition
from delaylevel.mover import hop
from delaylevel.mover.forwarder import Forwarder


@dataclass
class ReleasedMessages:
    """Released messages, which a real dispatcher keeps in its journal.

    Attributes:
        positions: partition and position of released messages.
        ids: target, ``delaylevel.id`` and attempt of released messages.
    """

    positions: set[tuple[str, Position]] = field(default_factory=set)
    ids: set[tuple[str, str, int]] = field(default_factory=set)


class _WindowPartition:
    """Messages of one window partition that are read, but not released."""

    def __init__(self, source: SourcePartition, start: Position) -> None:
        self.source = source
        self.next = start
        # Heap of (due time, order of arrival, message).
        self.waiting: list[tuple[int, int, ParkedMessage]] = []
        self.unreleased: deque[Position] = deque()
        self.arrived = 0


class MemoryDispatcher:
    """Dispatcher of the window topic of one level topic, run step by step.

    Args:
        client: an in-memory client, which stays open.
        admin: admin interface of the same Pulsar.
        description: description of a level topic with a tracker.
        released: messages released so far, by this and earlier dispatchers.

    Raises:
        AlreadyRunningError: another dispatcher has the window topic.
    """

    def __init__(
        self,
        client: Any,
        admin: TopicAdmin,
        description: LevelTopicDescription,
        clock: Clock,
        released: ReleasedMessages,
    ) -> None:
        self._client = client
        self._admin = admin
        self._description = description
        self._clock = clock
        self._released = released
        window, finest = description.window_topic, len(description.levels) - 1
        sources = [
            SourcePartition(
                description.topic, window.partition(index).full, Role.WINDOW, finest, index, 0
            )
            for index in range(description.window_partitions)
        ]
        self._lock = PartitionLock(client, admin, sources, "dispatch")
        starts = self._lock.start_positions(sources)
        self._partitions = [_WindowPartition(source, starts[source.topic]) for source in sources]
        # With this description, the forwarder publishes due messages to the business topic.
        plain = replace(description, final_window=FinalWindow.BROKER)
        self._forwarder = Forwarder(client, admin, plain, clock)

    def run_once(self) -> ForwardReport:
        """Publish all messages that are due now, and acknowledge up to the first pending one.

        Returns:
            The outcomes of the messages.
        """
        total = ForwardReport()
        now_ms = self._clock.now_ms()
        # Publishing may call a listener, which may send another message that is due at once.
        while (due_ms := self.next_due_ms()) is not None and due_ms <= now_ms:
            for partition in self._partitions:
                self._release(partition, now_ms)
            total.add(self._forwarder.flush())
            self._forwarder.close_targets()
            for partition in self._partitions:
                self._acknowledge(partition)
        return total

    def next_due_ms(self) -> int | None:
        """Return the earliest due time in the window, ms since the epoch; None if it is empty."""
        for partition in self._partitions:
            self._read(partition)
        return min((item.waiting[0][0] for item in self._partitions if item.waiting), default=None)

    def close(self) -> None:
        """Close producers and consumers; another dispatcher may take over."""
        self._forwarder.close()
        self._lock.close()

    def __enter__(self) -> MemoryDispatcher:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _read(self, partition: _WindowPartition) -> None:
        source = partition.source
        last = self._admin.last_message_id(source.name)
        if last is None or last.entry < 0 or last.next_entry <= partition.next:
            return
        for message in read_range(self._client, source.topic, partition.next, last.next_entry):
            partition.unreleased.append(message.position)
            if (source.topic, message.position) in self._released.positions:
                continue
            due_ms = 0  # an invalid message: the forwarder sends it to the dead-letter topic
            with contextlib.suppress(EnvelopeError):
                due_ms = hop.open_envelope(self._description, source.topic, message).due_ms
            partition.arrived += 1
            heapq.heappush(partition.waiting, (due_ms, partition.arrived, message))
        partition.next = last.next_entry

    def _release(self, partition: _WindowPartition, now_ms: int) -> None:
        source, waiting, released = partition.source, partition.waiting, self._released
        while waiting and waiting[0][0] <= now_ms:
            message = heapq.heappop(waiting)[2]
            released.positions.add((source.topic, message.position))
            try:
                envelope = hop.open_envelope(self._description, source.topic, message)
            except EnvelopeError:
                self._forwarder.forward(source, message, now_ms)
                continue
            assert envelope.id is not None
            identity = (envelope.target, envelope.id, envelope.attempt)
            if identity not in released.ids:
                released.ids.add(identity)
                self._forwarder.forward(source, message, now_ms)

    def _acknowledge(self, partition: _WindowPartition) -> None:
        """Acknowledge up to the first pending message, which may be within a batch."""
        source, unreleased = partition.source, partition.unreleased
        front: Position | None = None
        while unreleased and (source.topic, unreleased[0]) in self._released.positions:
            front = unreleased.popleft()
        if front is None:
            return
        inside = bool(unreleased) and unreleased[0].entry_start == front.entry_start
        self._lock.acknowledge(source, front.entry_start if inside else front.next_entry)
