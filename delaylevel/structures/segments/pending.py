"""The bytes of what is pending: in memory up to a budget, beyond it in files by coarse due time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from delaylevel.errors import DelayLevelError, InvalidInputError
from delaylevel.structures.rows import ENTRY, LEDGER, Int64s, Key, Rows

from .cursors import Cursor, Part, cut, join
from .directory import SpillDirectory
from .file import Columns, DamagedSegmentError, Floats, SegmentState, inspect_segment
from .memory import Memory
from .queries import ATTRIBUTE, Discarded, Range, average_of, rows_of

__all__ = [
    "DamagedSegmentError",
    "DueRows",
    "IntakeStoppedError",
    "PendingSegments",
    "SegmentState",
    "inspect_segment",
]

#: What a row costs in memory beside its payload: columns, a list's slot, a bytes object's header.
_ROW_BYTES = 96
_SLICE_ROWS = 16_384
_LOOKAHEAD_MS = 1_000
_RETRY_MS = 1_000
_LIMIT = 1 << 62
_MOST_BYTES = (1 << 31) - 1  # of one payload, for Arrow's offsets


class IntakeStoppedError(DelayLevelError):
    """The disk is full and the budget used up: nothing of this call was taken, all else is kept.

    Attributes:
        reason: what the disk said.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class DueRows(NamedTuple):
    """What ``read_due`` returns, n rows in due order.

    Attributes:
        due_ms: exact due times, shape (n,).
        ledger_ids, entry_ids: positions, shape (n,).
        attribute: shape (n,).
        payloads: n of them.
    """

    due_ms: Int64s
    ledger_ids: Int64s
    entry_ids: Int64s
    attribute: Floats
    payloads: list[bytes]


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _append_to(path: Path) -> Any:
    return path.open("ab", buffering=0)


class PendingSegments:
    """Payloads by due time, each read once, in the order (truncated due time, ledger, entry).

    That is the order of a TimeBucketTracker of the same precision. The files are a cache: what an
    earlier process left in the directory is deleted. Not safe for use by several threads at once.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        budget_bytes: int = 256 << 20,
        bucket_ms: int = 65_536,
        precision_ms: int = 1024,
        clock: Callable[[], int] = _now_ms,
        opener: Callable[[Path], Any] = _append_to,
    ) -> None:
        """Open a directory that nothing else uses, and delete the spill files in it.

        Args:
            directory: created where it is missing.
            budget_bytes: the most memory for payloads and their keys, from 1 MiB.
            bucket_ms: the range of due times of one file.
            precision_ms: as the tracker's.
            clock: returns the present time, ms since the epoch.
            opener: opens a file for unbuffered binary appending.

        Raises:
            InvalidInputError: a number is out of range.
        """
        if budget_bytes < 1 << 20 or bucket_ms < 1:
            raise InvalidInputError("budget_bytes must be 1 MiB or more, bucket_ms 1 or more")
        if precision_ms < 1 or precision_ms & (precision_ms - 1):
            raise InvalidInputError(f"precision_ms must be a power of two, not {precision_ms}")
        self.directory = Path(directory)
        self.budget_bytes = budget_bytes
        self._mask = -precision_ms
        self._clock = clock
        self._spilled = SpillDirectory(self.directory, bucket_ms, self._mask, opener, budget_bytes)
        self._memory = Memory(self._mask, _ROW_BYTES)
        self._cursors: list[Cursor] = []
        self._slice = Part.empty()
        self._edge: Key = (-_LIMIT, 0, 0)
        self._ahead_bytes = 0  # of the open cursors
        self._discarded = Discarded()
        self._rows = 0
        self._full = ""
        self._retry_ms = 0

    def __len__(self) -> int:
        """Return how many rows are pending."""
        return self._rows

    @property
    def state(self) -> str:
        """``"open"``, or ``"disk full"`` while spilling fails; then intake ends with the budget."""
        return "disk full" if self._full else "open"

    @property
    def memory_bytes(self) -> int:
        """What is held in memory, by this class's own count."""
        read_ahead = sum(cursor.memory_bytes for cursor in self._cursors)
        held = self._memory.size_bytes + self._slice.size_bytes(_ROW_BYTES)
        return held + read_ahead + self._spilled.memory_bytes

    @property
    def disk_bytes(self) -> int:
        """What the spill files hold."""
        return self._spilled.size_bytes

    def append(
        self,
        due_ms: npt.ArrayLike,
        ledger_ids: npt.ArrayLike,
        entry_ids: npt.ArrayLike,
        payloads: Sequence[bytes],
        attribute: npt.ArrayLike | None = None,
    ) -> None:
        """Add rows in any order; all of them, or none.

        Args:
            due_ms: exact due times, ms since the epoch, shape (n,).
            ledger_ids, entry_ids: positions, shape (n,); no position twice among what is pending.
            payloads: n of them.
            attribute: a number for each row, shape (n,); the payloads' sizes where None.

        Raises:
            InvalidInputError: the lengths differ, or a payload has 2 GiB or more.
            IntakeStoppedError: the disk is full, and the budget used up.
        """
        sizes = np.fromiter(map(len, payloads), dtype=np.int64, count=len(payloads))
        try:
            rows: Rows = np.array([due_ms, ledger_ids, entry_ids], dtype=np.int64)
            values = np.array(sizes if attribute is None else attribute, dtype=np.float64)
        except (TypeError, ValueError, OverflowError):
            raise InvalidInputError(
                "due_ms, ledger_ids and entry_ids must be integers, all of one length"
            ) from None
        if rows.shape != (3, sizes.size) or values.shape != sizes.shape:
            raise InvalidInputError("due_ms, ledger_ids, entry_ids, payloads: one length is needed")
        if not sizes.size:
            return
        if int(np.abs(rows).max()) >= _LIMIT:
            raise InvalidInputError("due times and positions must lie below 2**62")
        if int(sizes.max()) > _MOST_BYTES:
            raise InvalidInputError("a payload must be smaller than 2 GiB")
        fresh = Part(rows, values, list(payloads), int(sizes.sum()))
        cost = fresh.size_bytes(_ROW_BYTES)
        reading = self._ahead_bytes + self._slice.size_bytes(_ROW_BYTES)
        reading += self._spilled.memory_bytes
        room = max((self.budget_bytes - reading) // 2, self.budget_bytes // 8)
        if self._memory.size_bytes + cost > room:
            self._spill()
        if self._full and self.memory_bytes + cost > self.budget_bytes:
            raise IntakeStoppedError(
                f"the spill directory {self.directory} cannot be written ({self._full}) and the "
                f"memory budget of {self.budget_bytes} bytes is used up: free some space, or wait "
                "until messages have been released; nothing of this call was taken",
                reason=self._full,
            )
        self._rows += sizes.size
        near, far = fresh.split_below(self._edge, self._mask)
        if near.rows.shape[1]:
            self._slice = join([self._slice, near], self._mask)
        if far.rows.shape[1]:
            self._memory.add(far)

    def read_due(self, now_ms: int | None = None, max_rows: int = 1000) -> DueRows:
        """Return, once, what is due, in due order; rows that were discarded are left out.

        Args:
            now_ms: the present time; the clock's where None.
            max_rows: at most so many.

        Raises:
            DamagedSegmentError: a spill file was cut short or is gone.
        """
        now = self._clock() if now_ms is None else now_ms
        end: Key = (now + 1, -1, -1)
        parts: list[Part] = []
        while max_rows > 0:
            if not self._slice.payloads and not self._next_slice(now):
                break
            part = self._slice.pop_front(min(self._slice.find(end, self._mask), max_rows))
            if not part.payloads:
                break
            self._rows -= len(part.payloads)
            if self._discarded:
                part = self._without_discarded(part)
            max_rows -= len(part.payloads)
            parts.append(part)
        found = parts[0] if len(parts) == 1 else Part.concatenate(parts)
        due, ledgers, entries = found.rows
        return DueRows(due, ledgers, entries, found.attribute, found.payloads)

    def discard(self, ledger_id: int, entry_id: int) -> None:
        """Leave out one pending row from now on; ``len`` falls only when it would be read."""
        self._discarded.add(ledger_id, entry_id)

    def rows_between(
        self,
        due_from_ms: int,
        due_to_ms: int,
        attribute_min: float = -np.inf,
        attribute_max: float = np.inf,
    ) -> pa.Table:
        """Return what is pending in a range of due times and of the attribute, in due order.

        Args:
            due_from_ms, due_to_ms: [from, to), exact due times, ms.
            attribute_min, attribute_max: both included.

        Returns:
            Columns due_ms, ledger_id, entry_id, attribute; equal due times by position.
        """
        wanted = Range(due_from_ms, due_to_ms, attribute_min, attribute_max)
        # Each piece is a chunk of the table, sorted by itself. A second thread gains nothing: what
        # takes the time is many short calls.
        return pa.concat_tables(
            [
                rows_of(self._columns(piece), piece, self._discarded)
                for piece in self._spilled.pieces(wanted)
            ]
        )

    def average_between(
        self,
        due_from_ms: int,
        due_to_ms: int,
        attribute_min: float = -np.inf,
        attribute_max: float = np.inf,
    ) -> float | None:
        """Return the average attribute of what ``rows_between`` returns, None where empty."""
        wanted = Range(due_from_ms, due_to_ms, attribute_min, attribute_max)
        needed = LEDGER if self._discarded else ATTRIBUTE
        return average_of(self._columns(wanted, needed), wanted, self._discarded)

    def close(self) -> None:
        """Delete the spill files; what is in memory is dropped too."""
        for cursor in self._cursors:
            cursor.close()
        self._cursors = []
        self._ahead_bytes = 0
        self._spilled.delete()
        self._memory.clear()
        self._slice = Part.empty()
        self._rows = 0

    def _columns(self, wanted: Range, first: int = 0) -> Columns:
        """Return what is due in the range, unordered; the first columns may be left out."""
        held = [cursor.columns() for cursor in (*self._cursors, *self._memory.runs)]
        held.append(Columns(self._slice.rows, self._slice.attribute))
        # What was spilled came before what is in memory: equal due times need less sorting.
        return self._spilled.columns(wanted, held, first)

    def _without_discarded(self, part: Part) -> Part:
        dead = self._discarded.among(part.rows[LEDGER], part.rows[ENTRY])
        if not dead.size:
            return part
        self._discarded.forget(part.rows[1:, dead])
        return part.take(np.delete(np.arange(part.count), dead))

    def _next_slice(self, now: int) -> bool:
        """Fill the empty slice with the lowest rows; False where nothing is due."""
        horizon = now + _LOOKAHEAD_MS
        lows = self._spilled.lows(horizon)
        dues = [cursor.first_due for cursor in (*self._cursors, *self._memory.runs)]
        if not lows and min(dues, default=_LIMIT) > horizon:
            return False
        end_due = horizon + 1
        for low in lows:
            start: Key = (low, -1, -1)
            below = sum(cursor.find(start) for cursor in (*self._cursors, *self._memory.runs))
            if below >= _SLICE_ROWS:
                end_due = low  # enough lies before this file; it stays closed
                break
            self._cursors += self._spilled.open(low, horizon)
        rows = min(_SLICE_ROWS, max(16, self.budget_bytes // 8 // self._mean_bytes()))
        self._edge, parts = cut([*self._cursors, *self._memory.runs], rows, end_due)
        self._memory.settle()
        for cursor in self._cursors:
            if not cursor.left:
                cursor.close()
        self._cursors = [cursor for cursor in self._cursors if cursor.left]
        self._ahead_bytes = sum(cursor.memory_bytes for cursor in self._cursors)
        self._slice = join(parts, self._mask)
        return bool(parts)

    def _mean_bytes(self) -> int:
        cursors = [*self._cursors, *self._memory.runs]
        left = sum(cursor.left for cursor in cursors)
        return _ROW_BYTES + sum(c.payload_bytes for c in cursors) // max(left, 1)

    def _spill(self) -> None:
        """Write what is in memory to files, except the nearest eighth of the budget."""
        now = self._clock()
        if self._full and now < self._retry_ms:
            return
        self._full = ""
        memory = self._memory.whole()
        mean = max(1, memory.size_bytes(_ROW_BYTES) // max(1, memory.count))
        keep = min(self.budget_bytes // 8 // mean, memory.count)
        done = keep
        try:
            done, error = self._spilled.write(memory, keep)
        finally:
            for kept in (memory.between(0, keep), memory.between(done, memory.count)):
                if kept.count:
                    self._memory.add(kept)
        if error is not None:
            self._full = error.strerror or str(error)
            self._retry_ms = now + _RETRY_MS
