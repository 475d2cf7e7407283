"""What waits in a window: due times in a tracker, records in segments, each saying the same."""

from __future__ import annotations

import marshal

import numpy as np
import numpy.typing as npt

from delaylevel.dispatcher.journal.records import ENTRY_BITS
from delaylevel.errors import DelayLevelError, InvalidInputError
from delaylevel.model.clock import Clock
from delaylevel.structures.rows import DUE, ENTRY, LEDGER, Int64s, Rows, sort_rows
from delaylevel.structures.segments.pending import PendingSegments
from delaylevel.structures.timebucket.near_rows import NearRows
from delaylevel.structures.timebucket.tracker import TimeBucketTracker

from .columns import MessageRecord

#: The format without references between values: faster for records that share none.
_MARSHAL = 2
#: What a row costs beside the segments, about: the tracker, the set of open positions, the ids.
_ROW_BYTES = 20


class PendingIndex:
    """Records that wait for their due time; they come out in the order (due, position).

    Args:
        segments: empty, with precision_ms=1; of this alone from now on.
        tracker: empty, with precision_ms=1; a new one where None.
        clock: the present time.

    Raises:
        InvalidInputError: tracker or segments are not exact, or not empty.
    """

    def __init__(
        self, segments: PendingSegments, tracker: TimeBucketTracker | None, clock: Clock
    ) -> None:
        self._clock = clock
        self._lowest_due: int | None = None
        if tracker is None:
            tracker = TimeBucketTracker(precision_ms=1, clock=self._tracker_now)
        if tracker.precision_ms != 1 or segments._mask != -1:
            raise InvalidInputError("tracker and segments must have precision_ms=1")
        if len(tracker) or len(segments):
            raise InvalidInputError("tracker and segments must be empty")
        self.segments = segments
        self._tracker = tracker
        self._late = NearRows()  # what a tracker with a clock of its own has refused

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.segments)

    @property
    def memory_bytes(self) -> int:
        """About what is held in memory."""
        rows = len(self._tracker) + self._late.rows
        return self.segments.memory_bytes + _ROW_BYTES * rows

    def put(
        self,
        rows: Rows,
        records: list[MessageRecord],
        attribute: npt.NDArray[np.float64] | None,
    ) -> None:
        """Let records wait.

        Args:
            rows: due times, ledgers and packed entries, shape (3, n).
            records: n plain tuples.
            attribute: shape (n,); the size of the stored record where None.

        Raises:
            InvalidInputError: a record cannot be stored.
            SpillFullError: the disk is full. In either case nothing was taken.
        """
        try:
            payloads = [marshal.dumps(record, _MARSHAL) for record in records]
        except ValueError as error:
            raise InvalidInputError(f"a record of an arrival cannot be stored: {error}") from None
        dues = rows[DUE]
        self.segments.append(dues, rows[LEDGER], rows[ENTRY], payloads, attribute)
        self._lowest_due = int(dues.min())
        refused = dues.size - self._tracker.add_messages(rows[LEDGER], rows[ENTRY], dues)
        self._lowest_due = None
        if refused:  # the earliest of them
            edge = np.partition(dues, refused - 1)[refused - 1]
            self._late.add(sort_rows(rows[:, dues <= edge]))

    def take(self, now_ms: int, count: int) -> tuple[Int64s, Int64s, list[MessageRecord]]:
        """Return due times, packed positions and records of what is due, and drop them.

        Args:
            now_ms: nothing that is due later comes out.
            count: at most so many.

        Raises:
            DamagedSegmentError: a spill file is gone.
            DelayLevelError: tracker and segments differ.
        """
        found = self.segments.read_due(now_ms, count)
        size = len(found.payloads)
        positions = found.ledger_ids << ENTRY_BITS | found.entry_ids
        late = np.empty(0, dtype=np.int64)
        if size and self._late.rows:
            last = int(found.due_ms[-1]), int(found.ledger_ids[-1]), int(found.entry_ids[-1]) + 1
            part = self._late.take(size, last)
            late = part[LEDGER] << ENTRY_BITS | part[ENTRY]
        ledgers, entries = self._tracker.get_scheduled_messages(size - late.size, now_ms)
        tracked = ledgers << ENTRY_BITS | entries
        if late.size:
            agree = np.array_equal(np.sort(np.concatenate((late, tracked))), np.sort(positions))
        else:
            agree = np.array_equal(tracked, positions)
        if not agree:
            raise DelayLevelError(
                f"tracker and segments disagree on what is due at {now_ms}; nothing of it was "
                "released: start again from the log, and report this as a defect"
            )
        return found.due_ms, positions, [marshal.loads(payload) for payload in found.payloads]

    def next_due_ms(self) -> int | None:
        """Return the due time of what comes out next, None where nothing waits."""
        dues = (self._tracker.next_deliver_at_ms(), self._late.min_due())
        return min((due for due in dues if due is not None), default=None)

    def counts(self, edges_ms: npt.ArrayLike, more: Int64s) -> Int64s:
        """Count what waits between given times.

        Args:
            edges_ms: ascending times, ms, shape (k + 1,), k from 1.
            more: due times that are counted too, shape (m,).

        Returns:
            Shape (k,): how many are due in [edges_ms[i], edges_ms[i + 1]).
        """
        counts = self._tracker.counts(edges_ms)
        edges = np.asarray(edges_ms, dtype=np.int64)
        dues = [more, *(rows[DUE] for rows in self._late.parts())]
        index = edges.searchsorted(np.concatenate(dues), side="right")
        found: Int64s = counts + np.bincount(index, minlength=edges.size + 1)[1:-1]
        return found

    def _tracker_now(self) -> int:
        """Return the time, but no later than just before what is being added: all is tracked."""
        now = self._clock.now_ms()
        return now if self._lowest_due is None else min(now, self._lowest_due - 1)
