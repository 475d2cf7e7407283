"""Payloads of pending messages: in memory up to a budget, then in files by coarse due time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from pathlib import Path

import numpy as np

from delaylevel.errors import DelayLevelError, InvalidInputError
from delaylevel.structures.positions import ENTRY_BITS, unpack
from delaylevel.structures.rows import (
    DUE,
    ENTRY,
    LEDGER,
    Key,
    Rows,
    argsort_columns,
    find_key,
    key_at,
)
from delaylevel.structures.tracker import TimeBucketTracker, present_ms

from .cursors import ROW_BYTES, Cursor, FileCursor, MemoryRuns, PayloadRows, take_lowest
from .file import (
    Columns,
    Floats,
    Run,
    SegmentFile,
    SpillWriteError,
    is_full,
    make_private_folder,
    make_spill_folder,
    payload_sizes,
    reason_of,
)
from .frozen import FrozenRows

_SUFFIX = ".arrows"
#: Limits of one run: rows, and the bounds of its payload size, which depends on the budget.
_RUN_ROWS = 8192
_RUN_BYTES = 64 << 10, 4 << 20

#: Memory of a row in addition to its payload: that of `ROW_BYTES`, and its objects in the index.
OPEN_ROW_BYTES = ROW_BYTES + 192


class OpenRows:
    """Rows without an order of their own: a tracker decides which of them are due."""

    # A dictionary, and no arrays: mostly a few rows are taken at once, for which numpy costs
    # several times as much.
    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop all rows."""
        # Due time, attribute and payload, by packed position.
        self._rows: dict[int, tuple[int, float, bytes]] = {}
        self.payload_bytes = 0

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self._rows)

    @property
    def memory_bytes(self) -> int:
        """Memory in use, in bytes."""
        return self.payload_bytes + OPEN_ROW_BYTES * len(self._rows)

    def add(self, part: PayloadRows) -> None:
        """Add rows in any order."""
        dues, numbers = part.rows[DUE].tolist(), part.attribute.tolist()
        values = zip(dues, numbers, part.payloads, strict=True)
        self._rows.update(zip(_places(part.rows), values, strict=True))
        self.payload_bytes += part.payload_bytes

    def take(self, rows: Rows) -> list[bytes] | None:
        """Remove rows, and return their payloads in this order; None if one of them is not here."""
        try:
            found = list(map(self._rows.pop, _places(rows)))
        except KeyError:
            return None  # some are removed by now: the caller gives up the whole structure
        payloads = [payload for _, _, payload in found]
        self.payload_bytes -= sum(map(len, payloads))
        if not self._rows:
            self.clear()
        return payloads

    def take_after(self, count: int) -> PayloadRows:
        """Remove and return all rows but the ``count`` first to be due, in due order."""
        rows, attribute = self.frozen()()
        payloads = self.take(rows[:, count:])
        assert payloads is not None
        return PayloadRows(rows[:, count:], attribute[count:], payloads)

    def frozen(self) -> Callable[[], Columns]:
        """Return a function that sorts the rows as they are now, in another thread."""
        return partial(_in_due_order, self._rows.copy())


def _places(rows: Rows) -> list[int]:
    """Return the packed positions of rows; the caller has checked that they fit."""
    packed: list[int] = (rows[LEDGER] << ENTRY_BITS | rows[ENTRY]).tolist()
    return packed


def _in_due_order(found: Mapping[int, tuple[int, float, bytes]]) -> Columns:
    """Return rows by due time and position."""
    rows = np.empty((3, len(found)), dtype=np.int64)
    rows[DUE] = [due for due, _, _ in found.values()]
    rows[LEDGER], rows[ENTRY] = unpack(np.fromiter(found, np.int64, len(found)))
    attribute = np.array([number for _, number, _ in found.values()], dtype=np.float64)
    order = argsort_columns(*rows)
    return Columns(rows, attribute) if order is None else Columns(rows[:, order], attribute[order])


class SpillDirectory:
    """Spill files by bucket; runs that are opened for reading leave the directory."""

    def __init__(
        self,
        path: Path | None,
        bucket_ms: int,
        budget_bytes: int,
        writing: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Create the directory, or delete the spill files in it."""
        self._path = path
        # A write needs a thirtieth of the budget for a moment.
        self._run_bytes = max(_RUN_BYTES[0], min(budget_bytes // 64, _RUN_BYTES[1]))
        self._bucket_ms = bucket_ms
        self._writing = writing
        self._files: dict[int, SegmentFile] = {}
        self._serial = 0
        if path is not None:
            make_spill_folder(path)
            for old in path.glob(f"*{_SUFFIX}"):
                _delete(old)

    @property
    def size_bytes(self) -> int:
        """Total size of the files."""
        return sum(file.size for file in self._files.values())

    def write(self, memory: PayloadRows, start: int) -> tuple[int, OSError | None]:
        """Move payloads of sorted rows to files; return the first that is left, and its error."""
        bucket = memory.rows[DUE] // self._bucket_ms * self._bucket_ms
        sizes = payload_sizes(memory.payloads)
        while start < memory.count:
            low = int(bucket[start])
            count = int(bucket[start : start + _RUN_ROWS].searchsorted(low, side="right"))
            ends = sizes[start : start + count].cumsum()
            stop = start + min(max(1, int(ends.searchsorted(self._run_bytes, side="right"))), count)
            try:
                self._write_run(low, memory.between(start, stop))
            except OSError as error:
                return start, error
            memory.payloads[start:stop] = [b""] * (stop - start)
            start = stop
        return start, None

    def _write_run(self, low: int, part: PayloadRows) -> None:
        file = self._files.get(low)
        if file is None:
            assert self._path is not None
            # A program that cleans up has removed it, or it was not made.
            if not self._path.is_dir():
                make_private_folder(self._path)
            self._serial += 1
            path = self._path / f"due-{low}-{self._serial}{_SUFFIX}"
            file = SegmentFile(path)
        try:
            file.append(part.rows, part.attribute, part.payloads, self._writing())
        finally:
            if file.runs:
                self._files[low] = file
            else:  # each attempt on a full disk would leave an empty file
                _delete(file.path)

    def first_key(self, horizon: int) -> Key | None:
        """Return the lowest key of all runs; None if it is due after ``horizon``, ms."""
        low = min(self._files, default=horizon + 1)
        if low > horizon:
            return None
        key = min(run.first_key for run in self._files[low].runs)
        return key if key[0] <= horizon else None

    def open(self, count: int, horizon: int) -> list[FileCursor]:
        """Forget the first runs of a file that begin by ``horizon``; return cursors over them."""
        low = min(self._files)
        file = self._files[low]
        # Runs are in the order of the spills, and each spill begins with what was due first then.
        runs = sorted(file.runs, key=_FIRST_KEY)
        chosen = [run for run in runs[:count] if run.first_key[0] <= horizon]
        cursors = [FileCursor(file, run) for run in chosen]
        file.runs = runs[len(chosen) :]
        if not file.runs:
            # The cursors keep the file open; it needs no name any more.
            _delete(file.path)
            del self._files[low]
        return cursors

    def files_between(self, start: int, stop: int) -> list[tuple[Path, list[Run]]]:
        """Return paths and runs of the files with rows due in [start, stop), ms since the epoch."""
        return [
            (file.path, file.runs)
            for low, file in self._files.items()
            if start < low + self._bucket_ms and low < stop
        ]

    def delete(self) -> None:
        """Delete all files."""
        for file in self._files.values():
            _delete(file.path)
        self._files = {}


def _delete(path: Path) -> None:
    """Delete a file; if the disk does not allow it, its rows can still be used."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


_FIRST_KEY = attrgetter("first_key")
_SLICE_ROWS = 16_384
_MIN_SLICE_ROWS = 4
_LOOKAHEAD_MS = 1_000
#: Size of the payloads from which a read takes no further slice.
_FETCH_BYTES = 16 << 20
#: Pause between attempts to write to a disk that is full or failing.
_RETRY_MS = 1_000
_LIMIT = 1 << 62


class PendingSegments:
    """Payloads by due time, to the millisecond, each read once, in the order of the tracker.

    They lie where they arrived, in memory or in files, roughly by due time. Those that are due next
    are open: they are looked up by their positions. Not thread-safe.
    """

    def __init__(
        self,
        directory: str | Path | None,
        *,
        budget_bytes: int = 256 << 20,
        bucket_ms: int = 65_536,
        clock: Callable[[], int] = present_ms,
        writing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Delete the spill files in a directory, and use it; without one, ignore the budget."""
        if budget_bytes < 1 << 20 or bucket_ms < 1:
            raise InvalidInputError("budget_bytes must be at least 1 MiB, bucket_ms at least 1")
        self.directory = None if directory is None else Path(directory)
        self.budget_bytes = budget_bytes if directory is not None else _LIMIT
        self._clock = clock
        self.tracker = TimeBucketTracker(1, clock)
        self.spilled = SpillDirectory(self.directory, bucket_ms, budget_bytes, writing)
        self._memory = MemoryRuns()
        self._cursors: list[FileCursor] = []  # the open runs
        # The next rows. All rows below the edge are in the slice, all others elsewhere.
        self._slice = OpenRows()
        self._edge: Key = (-_LIMIT, 0, 0)
        self._ahead_bytes = 0  # memory of the open cursors
        self._error: OSError | None = None  # of the last write
        self._failed_ms = 0

    def __len__(self) -> int:
        """Return the number of pending rows."""
        return len(self.tracker)

    @property
    def state(self) -> str:
        """``"open"``; ``"disk full"`` or ``"disk error"`` if rows over the budget are refused."""
        if self._error is None:
            return "open"
        return "disk full" if is_full(self._error) else "disk error"

    @property
    def memory_bytes(self) -> int:
        """Memory in use, as counted by this class."""
        read_ahead = sum(cursor.memory_bytes for cursor in self._cursors)
        return self._memory.memory_bytes + self._slice.memory_bytes + read_ahead

    def append(
        self,
        rows: Rows,
        payloads: Sequence[bytes],
        attribute: Floats | None = None,
        *,
        force: bool = False,
    ) -> None:
        """Add rows in any order, with their payloads: all of them, or none.

        The attribute is the size by default. ``force`` is for rows that are in memory already,
        wherever they wait: no SpillWriteError says that disk and budget are used up.
        """
        if not payloads:
            return
        found = payload_sizes(payloads) if attribute is None else attribute
        numbers = np.array(found, dtype=np.float64)
        rows = rows.copy()  # the caller may change its arrays
        fresh = PayloadRows(rows, numbers, list(payloads))
        cost = fresh.memory_bytes
        reading = self._ahead_bytes + self._slice.memory_bytes
        # Half of what is left, because a spill needs memory to sort and write the rows.
        limit = max((self.budget_bytes - reading) // 2, self.budget_bytes // 8)
        if self._memory.memory_bytes + cost > limit:
            self._spill()
        if self._error is not None and not force:
            # A full disk never refuses a single row for its size alone.
            counted = cost if fresh.count > 1 else min(cost, self.budget_bytes // 2)
            if self.memory_bytes + counted > self.budget_bytes:
                raise self._refused(self._error)
        # Below the edge, everything has to be open: the tracker may name it with the next rows.
        near, far = fresh.split_below(self._edge)
        if near.count:
            self._slice.add(near)
            self._shorten_slice()
        if far.count:
            self._memory.add(far)
        self.tracker.put(rows)
        if cost > limit:
            self._spill()

    def refusal(self) -> SpillWriteError | None:
        """Try to write what is over the budget; return the error while that fails, None if not."""
        if self._error is not None and self.memory_bytes > self.budget_bytes:
            self._spill()
            if self._error is not None and self.memory_bytes > self.budget_bytes:
                return self._refused(self._error)
        return None

    def read_due(self, now_ms: int | None = None, max_rows: int = 1000) -> tuple[Rows, list[bytes]]:
        """Remove and return due rows, in due order, and their payloads; large ones end it early."""
        now = self._clock() if now_ms is None else now_ms
        rows = self.tracker.take(max_rows, now)
        payloads = self._fetch(rows, now)
        # The tracker has given up these rows, so those without payloads have to go back.
        if len(payloads) < rows.shape[1]:
            self.tracker.put(rows[:, len(payloads) :])
        return rows[:, : len(payloads)], payloads

    def freeze(self, rows: FrozenRows) -> None:
        """Add the rows as they are now, for another thread."""
        parts = [Columns(run.rows, run.attribute) for run in self._memory.runs]
        files = self.spilled.files_between(rows.wanted.from_ms, rows.wanted.before_ms)
        rows.add(parts, self._slice.frozen(), self._cursors, files)

    def close(self) -> None:
        """Delete the spill files, and drop the rows in memory."""
        for cursor in self._cursors:
            cursor.file.release()
        self._cursors = []
        self._ahead_bytes = 0
        self.spilled.delete()
        self._memory.clear()
        self._slice.clear()
        self.tracker.clear()

    def _sources(self) -> list[Cursor]:
        """Return the open runs in files and the runs in memory."""
        return [*self._cursors, *self._memory.runs]

    def _fetch(self, rows: Rows, now: int) -> list[bytes]:
        """Remove and return the payloads of the lowest rows of the tracker, up to some MiB."""
        payloads: list[bytes] = []
        size = 0
        while rows.shape[1] and size < _FETCH_BYTES:
            below = find_key(rows, self._edge)
            if not below:
                self._next_slice(max(now, rows.item(DUE, 0)))
                below = find_key(rows, self._edge)
            size += self._slice.payload_bytes
            found = self._slice.take(rows[:, :below])
            size -= self._slice.payload_bytes
            if found is None or not below:
                raise DelayLevelError(
                    f"tracker and segments disagree on the messages due at {now}; none of them was "
                    "released: start again from the journal, and report this as a defect"
                )
            payloads += found
            rows = rows[:, below:]
        return payloads

    def _next_slice(self, now: int) -> None:
        """Open the lowest rows; those that are open now are not pending any more."""
        horizon = now + _LOOKAHEAD_MS
        end: Key = (horizon + 1, -1, -1)
        opened = 1
        while (start := self.spilled.first_key(horizon)) is not None:
            if sum(cursor.find(start) for cursor in self._sources()) >= self._slice_rows():
                end = start  # enough rows come before this run, which stays closed
                break
            # Those of a slow target follow each other. In the others, due times are mixed.
            self._cursors += self.spilled.open(opened, horizon)
            opened *= 2
        self._edge, parts = take_lowest(self._sources(), self._slice_rows(), end)
        self._memory.drop_empty()
        for cursor in self._cursors:
            if not cursor.count:
                cursor.file.release()
        self._cursors = [cursor for cursor in self._cursors if cursor.count]
        self._ahead_bytes = sum(cursor.memory_bytes for cursor in self._cursors)
        self._slice.clear()
        for part in parts:
            self._slice.add(part)

    def _shorten_slice(self) -> None:
        """Move the last rows of a slice that has grown too large to those that may be spilled."""
        open_ = self._slice
        keep = max(_MIN_SLICE_ROWS, self.budget_bytes // 8 // (open_.memory_bytes // open_.count))
        if keep < open_.count and open_.memory_bytes > self.budget_bytes // 4:
            rest = open_.take_after(keep)
            self._edge = key_at(rest.rows, 0)
            self._memory.add(rest)

    def _slice_rows(self) -> int:
        """Return the number of rows of a slice: an eighth of the budget, if they are as others."""
        sources = self._sources()
        rows = sum(source.count for source in sources)
        mean = OPEN_ROW_BYTES + sum(source.payload_bytes for source in sources) // max(rows, 1)
        return min(_SLICE_ROWS, max(_MIN_SLICE_ROWS, self.budget_bytes // 8 // mean))

    def _spill(self) -> None:
        """Write the rows in memory to files; keep the first to be due, an eighth of the budget."""
        now = self._clock()
        # A clock that was set back must not delay the next attempt.
        if self._error is not None and 0 <= now - self._failed_ms < _RETRY_MS:
            return
        memory = self._memory.take_all()
        mean = max(1, memory.memory_bytes // max(1, memory.count))
        keep = min(self.budget_bytes // 8 // mean, memory.count)
        done = keep
        try:
            done, error = self.spilled.write(memory, keep)
            if error is not None or done > keep:  # without a write, the disk may still be full
                self._error = error
        finally:
            for kept in (memory.between(0, keep), memory.between(done, memory.count)):
                if kept.count:
                    self._memory.add(kept)
        self._failed_ms = now

    def _refused(self, error: OSError) -> SpillWriteError:
        remedy = "free some space" if is_full(error) else "check the disk and the permissions"
        refused = SpillWriteError(
            f"the spill directory {self.directory} cannot be written ({reason_of(error)}) and the "
            f"memory budget of {self.budget_bytes} bytes is used up: {remedy}, or wait until "
            "messages are released",
            reason=reason_of(error),
        )
        refused.state = self.state
        return refused
