"""The pending messages: a tracker determines what is due, and segments hold the records."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from delaylevel.dispatcher.journal.records import ENTRY_BITS, unpack
from delaylevel.errors import DelayLevelError, InvalidInputError
from delaylevel.structures.rows import DUE, ENTRY, LEDGER, Int64s, Rows
from delaylevel.structures.segments.pending import PendingSegments
from delaylevel.structures.timebucket.tracker import TimeBucketTracker

from .attribute import MessageAttribute
from .batches import MessageRecord
from .packing import PACKED_FIELDS, STORED, packed, unpacked

#: Approximate memory of a row outside the segments: tracker, set of open positions, and IDs.
_ROW_BYTES = 20


class PendingIndex:
    """Records that wait for their due time; they come out in the order (due time, position).

    Attributes:
        segments: the records, which also answer queries by due time and attribute.
        last_due_ms: highest due time so far, ms since the epoch.
        attribute: attribute of the messages for queries; None for the sizes of the stored records.

    Raises:
        InvalidInputError: the segments have another precision than 1 ms, or are not empty.
    """

    def __init__(self, segments: PendingSegments) -> None:
        if segments._mask != -1:
            raise InvalidInputError("the segments must have precision_ms=1")
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

    def put(
        self,
        rows: Rows,
        records: list[MessageRecord],
        attribute: npt.NDArray[np.float64] | None,
        *,
        force: bool = False,
    ) -> None:
        """Add records: all of them, or none.

        Args:
            rows: due times, ledger IDs and entry IDs, shape (3, n), n > 0.
            records: list of n records.
            attribute: numbers, shape (n,); None for those of the attribute of this instance.
            force: True for records that were in memory before; the budget does not refuse them.

        Raises:
            InvalidInputError: a record cannot be stored.
            SpillWriteError: the disk is full or fails, and the memory budget is used up.
        """
        if attribute is None and self.attribute is not None:
            attribute = self.attribute.of(records)
        payloads = [
            each[STORED] if len(each) == PACKED_FIELDS else packed(each) for each in records
        ]
        self.segments.append(rows[DUE], rows[LEDGER], rows[ENTRY], payloads, attribute, force=force)
        self.last_due_ms = max(self.last_due_ms, int(rows[DUE].max()))
        self._changed = True

    def put_again(self, due_ms: Int64s, positions: Int64s, records: list[MessageRecord]) -> None:
        """Add records that were in memory; the budget does not refuse them.

        Args:
            due_ms: due times, shape (n,).
            positions: packed positions, shape (n,).
            records: list of n plain tuples; may be empty.
        """
        if records:
            rows: Rows = np.array([due_ms, *unpack(positions)], dtype=np.int64)
            self.put(rows, records, None, force=True)

    def take(self, now_ms: int, count: int) -> tuple[Int64s, Int64s, list[MessageRecord]]:
        """Remove messages that are due; return their due times, packed positions and records.

        Args:
            now_ms: latest due time, ms since the epoch.
            count: maximum number of messages.

        Raises:
            DamagedSegmentError: a spill file is gone.
            DelayLevelError: the tracker has a message that the segments do not have.
        """
        self._changed = True
        expected = len(self.tracker)
        found = self.segments.read_due(now_ms, count)
        if expected - len(self.tracker) != len(found.payloads):
            raise DelayLevelError(
                f"tracker and segments disagree on the messages due at {now_ms}; none of them was "
                "released: start again from the journal, and report this as a defect"
            )
        positions = found.ledger_ids << ENTRY_BITS | found.entry_ids
        return found.due_ms, positions, list(map(unpacked, found.payloads))
