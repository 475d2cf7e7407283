"""Acknowledgement of the window topic up to the low watermark."""

from __future__ import annotations

from delaylevel.cluster.partition_lock import PartitionLock
from delaylevel.dispatcher.journal.records import entry_of, pack
from delaylevel.dispatcher.journal.topic import Journal
from delaylevel.model.position import Position
from delaylevel.model.source_partition import SourcePartition

from .delay_queue import DelayQueue
from .fetcher import EntryEnd


class WindowAcknowledgement:
    """The low watermark of one window partition, in its journal and at its subscription.

    Attributes:
        entry_end: packed position of the last message that was read, if it is the last one of its
            entry; otherwise of an earlier one, or -1.
    """

    def __init__(
        self, queue: DelayQueue, journal: Journal, lock: PartitionLock, source: SourcePartition
    ) -> None:
        self._queue = queue
        self._journal = journal
        self._lock = lock
        self._source = source
        self.entry_end = -1
        self._acknowledged = Position(-1, -1)
        # Number of the journal's last record of a low watermark; 0 if it is acknowledged.
        self._record = 0

    @property
    def is_due(self) -> bool:
        """True if there is something to acknowledge, once the journal has confirmed it."""
        return bool(self._record)

    def take_entry_end(self, end: EntryEnd) -> None:
        """Take note that an entry is completely read."""
        self.entry_end = pack(end.ledger_id, end.entry_id)

    def write_watermark(self) -> None:
        """Write the low watermark to the journal if it has moved.

        Raises:
            BrokerError: an earlier record was not confirmed.
        """
        record = self._queue.checkpoint()
        if record is not None:
            self._record = self._journal.append_soon(record)

    def acknowledge(self) -> None:
        """Acknowledge everything below the low watermark once the journal has confirmed it."""
        position = self._queue.state.low_watermark
        if not position or self._journal.stored < self._record:
            return
        self._record = 0
        end = entry_of(position)
        if position == self.entry_end + 1:
            end = entry_of(self.entry_end).next_entry
        if end > self._acknowledged:
            self._lock.acknowledge(self._source, end)
            self._acknowledged = end
