"""Pending messages and their due times: ten million messages in a few megabytes."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from delaylevel.errors import InvalidInputError

from .buckets import SPLIT_ROWS, BucketStore, first_position
from .rows import (
    DUE,
    ENTRY,
    LEDGER,
    Int64s,
    Key,
    Rows,
    checked_integers,
    empty_rows,
    find_key,
    key_at,
    sort_rows,
    without_row,
)

#: Approximate number of rows that are merged at once; a get seldom waits for more.
_SLICE_ROWS = 6144
#: Sampling interval within each run when the edge of the next slice is chosen.
_STRIDE = 128
_MAX_RUNS = 128

_LOWEST: Key = (-(1 << 63), -1, -1)


class NearRows:
    """Decoded rows: a sorted slice to return next, and sorted runs of later rows."""

    def __init__(self) -> None:
        self._runs: list[Rows] = []
        self._slice = empty_rows()
        self._edge: Key = _LOWEST  # every row below it is in the slice, every other row in a run
        self.rows = 0

    def add(self, rows: Rows) -> None:
        """Add rows in the order of their keys; merge those below the edge into the slice."""
        n = rows.shape[1]
        if not n:
            return
        self.rows += n
        below = find_key(rows, self._edge)
        if below:
            # A get takes the slice first, so what is below its edge must not wait in a run.
            self._slice = sort_rows(np.concatenate((self._slice, rows[:, :below]), axis=1))
            self._shorten_slice()
        if below < n:
            self._runs.append(rows[:, below:])
            if len(self._runs) > _MAX_RUNS:
                self._merge_small_runs()

    def take(self, limit: int, end: Key, bound: Key | None) -> Rows:
        """Remove and return up to ``limit`` rows below ``end``, in the order of their keys."""
        # All rows below the bound are here, or all without one.
        if bound is not None:
            end = min(end, bound)
        parts: list[Rows] = []
        # From a slice, not from the runs: a get of a few rows must not search a hundred of them.
        while limit > 0:
            if not self._slice.shape[1] and self._runs:
                self._cut_slice(limit, bound)
            below = min(find_key(self._slice, end), limit)
            if not below:
                break
            parts.append(self._slice[:, :below])
            self._slice = self._slice[:, below:]
            limit -= below
            self.rows -= below
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts, axis=1) if parts else empty_rows()

    def remove(self, key: Key) -> bool:
        """Remove one row; return False if there is none with this key."""
        parts = [self._slice, *self._runs]
        for index, part in enumerate(parts):
            rest = without_row(part, key)
            if rest is not None:
                parts[index] = rest
                self._slice, *runs = parts
                self._runs = [run for run in runs if run.shape[1]]
                self.rows -= 1
                return True
        return False

    def parts(self) -> list[Rows]:
        """Return all rows, in parts that are each in the order of their keys."""
        parts = [self._slice] if self._slice.shape[1] else []
        return parts + self._runs

    def min_due(self) -> int | None:
        """Return the earliest due time, ms; None without rows."""
        if self._slice.shape[1]:
            return int(self._slice[DUE, 0])
        return min((int(run[DUE, 0]) for run in self._runs), default=None)

    def _shorten_slice(self) -> None:
        # Each add below the edge sorts the whole slice again.
        if self._slice.shape[1] > 4 * _SLICE_ROWS:
            rest = self._slice[:, _SLICE_ROWS:].copy()
            self._edge = key_at(rest, 0)
            # Rows equal to the edge belong behind it.
            keep = find_key(self._slice, self._edge)
            self._runs.append(np.concatenate((self._slice[:, keep:_SLICE_ROWS], rest), axis=1))
            self._slice = self._slice[:, :keep].copy()

    def _cut_slice(self, limit: int, bound: Key | None) -> None:
        """Fill the empty slice with the lowest rows of all runs that are below the bound."""
        # Also with rows that are not due yet: many small calls would search all runs otherwise.
        edge = self._sampled_edge(max(limit, _SLICE_ROWS))
        if bound is not None:
            edge = min(edge, bound)
        parts, runs = [], []
        for run in self._runs:
            below = find_key(run, edge)
            if below:
                parts.append(run[:, :below])
            if below < run.shape[1]:
                runs.append(run[:, below:])
        if not parts:
            return
        self._edge = edge
        self._runs = runs
        self._slice = sort_rows(np.concatenate(parts, axis=1))

    def _sampled_edge(self, want: int) -> Key:
        """Return a key with about ``want`` rows below it, and at least one, from a sample."""
        if sum(run.shape[1] for run in self._runs) > want + want // 2:
            marks = [run[:, _STRIDE - 1 :: _STRIDE] for run in self._runs]
            sample = sort_rows(np.concatenate(marks, axis=1))
            if sample.shape[1]:
                index = min(want // _STRIDE, sample.shape[1]) - 1
                due, ledger, entry = key_at(sample, index)
                return due, ledger, entry + 1
        return (1 << 63) - 1, 0, 0

    def _merge_small_runs(self) -> None:
        # The smaller half only: a large run would be copied again and again.
        self._runs.sort(key=lambda run: run.shape[1], reverse=True)
        small = self._runs[_MAX_RUNS // 2 :]
        del self._runs[_MAX_RUNS // 2 :]
        self._runs.append(sort_rows(np.concatenate(small, axis=1)))


#: Rows that single adds collect before they are sorted into their buckets.
_STAGE_ROWS = 4096
#: Rows of a large batch that are processed at once.
_BATCH_ROWS = 8192
#: Rows that are decoded ahead at once, at the end of a get.
_LOAD_ROWS = 4096
#: Time before its due time at which a row is decoded.
_LOOKAHEAD_MS = 5_000
_LIMIT = 1 << 62
_ROW = struct.Struct("=3q")


def present_ms() -> int:
    """Return the present time, ms since the epoch."""
    return time.time_ns() // 1_000_000


class TimeBucketTracker:
    """Positions of messages by due time, truncated to a power of two milliseconds.

    Far-off rows are packed in coarse buckets; near-due rows are in sorted arrays. Rows with equal
    due times are returned in the order of their positions, which is the order of the topic. A row
    that is added twice is returned twice. Not thread-safe.

    Source: the TimeBucket algorithm of Apache Pulsar (PR 23611), with another layout: see
    docs/inside.md.
    """

    def __init__(self, precision_ms: int = 1024, clock: Callable[[], int] = present_ms) -> None:
        """Create an empty tracker.

        Args:
            precision_ms: 1 for exact times, or a power of two, ms; rows are returned early by
                less than this.
            clock: function that returns the current time, ms since the epoch.

        Raises:
            InvalidInputError: ``precision_ms`` is not a power of two up to 2**40.
        """
        if precision_ms not in {1 << bit for bit in range(41)}:
            raise InvalidInputError(
                f"precision_ms must be 1 or a power of two up to 2**40, not {precision_ms!r}"
            )
        self.precision_ms = precision_ms
        self._mask = -precision_ms
        self._shift = precision_ms.bit_length() - 1
        self._clock = clock
        self._stage = bytearray(_STAGE_ROWS * _ROW.size)
        self._pack = _ROW.pack_into
        self.clear()

    def clear(self) -> None:
        """Remove all rows."""
        self._store = BucketStore(self._shift)
        self._near = NearRows()
        self._staged = 0
        self._stage_due = _LIMIT

    def __len__(self) -> int:
        """Return the number of tracked rows."""
        return self._staged // _ROW.size + self._near.rows + self._store.rows

    def add_message(self, ledger_id: int, entry_id: int, deliver_at_ms: int) -> bool:
        """Track one message; amortised O(log rows).

        Args:
            ledger_id: ledger of the message, in [0, 2**62).
            entry_id: entry of the message, in [0, 2**62); with batch index: entry << 10 | index.
            deliver_at_ms: due time, ms since the epoch.

        Returns:
            True if the message is tracked; False if it is due already.

        Raises:
            InvalidInputError: an argument is not an integer in its range.
        """
        try:
            due = deliver_at_ms & self._mask
            if due <= self._clock():
                return False
            if not (0 <= ledger_id < _LIMIT and 0 <= entry_id < _LIMIT and due < _LIMIT):
                raise ValueError
            self._pack(self._stage, self._staged, due, ledger_id, entry_id)
        except (TypeError, ValueError, struct.error):
            raise InvalidInputError(
                "ledger_id and entry_id must be integers in [0, 2**62), and deliver_at_ms an "
                f"integer below 2**62; got {ledger_id!r}, {entry_id!r}, {deliver_at_ms!r}"
            ) from None
        self._staged += 24  # as a literal: this runs for each message
        if due < self._stage_due:
            self._stage_due = due
        if self._staged == _STAGE_ROWS * 24:
            self._flush()
        return True

    def add_messages(
        self,
        ledger_ids: npt.ArrayLike,
        entry_ids: npt.ArrayLike,
        deliver_at_ms: npt.ArrayLike,
    ) -> int:
        """Track many messages, as ``add_message`` does, but read the clock only once.

        Args:
            ledger_ids: integers, shape (n,).
            entry_ids: integers, shape (n,).
            deliver_at_ms: due times, ms since the epoch, shape (n,).

        Returns:
            The number of tracked messages; messages that are due already are not tracked.

        Raises:
            InvalidInputError: a value is out of range, or the shapes differ; nothing was tracked.
        """
        ledgers = _column(ledger_ids, "ledger_ids", 0)
        entries = _column(entry_ids, "entry_ids", 0)
        dues = _column(deliver_at_ms, "deliver_at_ms", -_LIMIT)
        if not ledgers.shape == entries.shape == dues.shape:
            raise InvalidInputError(
                "ledger_ids, entry_ids and deliver_at_ms must have the same length, "
                f"not {ledgers.size}, {entries.size} and {dues.size}"
            )
        now = self._clock()
        tracked = 0
        for start in range(0, dues.size, _BATCH_ROWS):
            part = slice(start, start + _BATCH_ROWS)
            rows: Rows = np.array((dues[part] & self._mask, ledgers[part], entries[part]))
            pending = rows[DUE] > now
            self._insert(rows if pending.all() else rows[:, pending], now)
            tracked += int(np.count_nonzero(pending))
        return tracked

    def put(self, rows: Rows) -> None:
        """Track many messages, also those that are due already; the caller checks their range."""
        now = self._clock()
        for start in range(0, rows.shape[1], _BATCH_ROWS):
            part = rows[:, start : start + _BATCH_ROWS].copy()
            part[DUE] &= self._mask
            self._insert(part, now)

    def get_scheduled_messages(
        self, max_messages: int, now_ms: int | None = None
    ) -> tuple[Int64s, Int64s]:
        """Remove and return due messages, in the order (truncated due time, ledger, entry).

        Finally decode some of the next rows, so that later calls need not wait for that.

        Args:
            max_messages: maximum number of messages.
            now_ms: current time, ms since the epoch; None for the clock's time.

        Returns:
            Ledger IDs and entry IDs, each of shape (k,).
        """
        rows = self.take(max_messages, now_ms)
        return rows[LEDGER].copy(), rows[ENTRY].copy()  # a view would keep further rows

    def take(self, max_messages: int, now_ms: int | None = None) -> Rows:
        """Remove and return due messages as `get_scheduled_messages`, with truncated due times."""
        if max_messages < 0:
            raise InvalidInputError(f"max_messages must not be negative, got {max_messages}")
        now = self._clock() if now_ms is None else now_ms
        if self._stage_due <= now:
            self._flush()
        parts: list[Rows] = []
        need = max_messages
        end = (now + 1, -1, -1)
        while need:
            bound = self._store.bound()
            rows = self._near.take(need, end, bound)
            if rows.shape[1]:
                parts.append(rows)
                need -= rows.shape[1]
            if not need or bound is None or bound[0] > now:
                break
            # What is at the bound is due, but still packed: nothing behind it may go first.
            self._near.add(self._store.load(_LOAD_ROWS, now))
        self._look_ahead(now, max(_LOAD_ROWS, 2 * (max_messages - need)))
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts, axis=1) if parts else empty_rows()

    def _look_ahead(self, now: int, max_rows: int) -> None:
        """Decode about ``max_rows`` rows due within the next seconds."""
        horizon = now + _LOOKAHEAD_MS
        bound = self._store.bound()
        if bound is None or bound[0] > now + _LOOKAHEAD_MS // 2:
            return  # so that a call decodes many rows, or none
        while max_rows > 0 and bound is not None and bound[0] <= horizon:
            if self._near.rows >= SPLIT_ROWS:
                break  # they are enough for many gets, and take 24 bytes each
            rows = self._store.load(_LOAD_ROWS, horizon)
            self._near.add(rows)
            max_rows -= rows.shape[1]
            bound = self._store.bound()

    def remove(self, ledger_id: int, entry_id: int, deliver_at_ms: int) -> bool:
        """Stop tracking one message; decode a few chunks if it is far off.

        Args:
            ledger_id, entry_id, deliver_at_ms: the same values as in ``add_message``.

        Returns:
            False if no such message is tracked.
        """
        self._flush()  # staged rows are not in order, so they cannot be searched
        key = (deliver_at_ms & self._mask, ledger_id, entry_id)
        if max(key) >= _LIMIT or min(key) < -_LIMIT:
            return False
        return self._near.remove(key) or self._store.remove(key)

    def next_deliver_at_ms(self) -> int | None:
        """Return the earliest time, ms, at which a get returns a message; None without rows."""
        bound = self._store.bound()
        dues = [self._near.min_due(), None if bound is None else bound[0]]
        dues.append(self._stage_due if self._staged else None)
        return min((due for due in dues if due is not None), default=None)

    def has_message_available(self, now_ms: int | None = None) -> bool:
        """Return whether a message is due at ``now_ms`` (None for the clock's time)."""
        due = self.next_deliver_at_ms()
        return due is not None and due <= (self._clock() if now_ms is None else now_ms)

    def first_pending(self) -> tuple[int, int] | None:
        """Return the lowest tracked (ledger, entry), or None; O(chunks)."""
        self._flush()
        lows = [self._store.first_position(), *map(first_position, self._near.parts())]
        return min(filter(None, lows), default=None)

    def counts(self, edges_ms: npt.ArrayLike) -> Int64s:
        """Count the pending messages between given times.

        Args:
            edges_ms: ascending times, ms since the epoch, shape (k + 1,), k at least 1.

        Returns:
            Numbers of messages with a truncated due time in [edges_ms[i], edges_ms[i + 1]),
            shape (k,).

        Raises:
            InvalidInputError: fewer than two edges, or edges that do not ascend.
        """
        edges = _column(edges_ms, "edges_ms", -_LIMIT)
        if edges.size < 2 or bool((edges[1:] <= edges[:-1]).any()):
            raise InvalidInputError("edges_ms must be at least two ascending times in ms")
        self._flush()
        counts = np.zeros(edges.size + 1, dtype=np.int64)
        for rows in self._near.parts():
            index = edges.searchsorted(rows[DUE], side="right")
            counts += np.bincount(index, minlength=counts.size)
        self._store.count_into(edges, counts)
        return counts[1:-1]

    def _flush(self) -> None:
        """Sort in the rows that single adds have collected."""
        if not self._staged:
            return
        staged = np.frombuffer(self._stage, dtype=np.int64, count=self._staged // 8)
        rows = np.ascontiguousarray(staged.reshape(-1, 3).T)
        self._staged = 0
        self._stage_due = _LIMIT
        self._insert(rows, self._clock())

    def _insert(self, rows: Rows, now: int) -> None:
        near = rows[DUE] <= now + _LOOKAHEAD_MS
        if near.any():
            self._near.add(sort_rows(rows[:, near]))
            rows = rows[:, ~near]
        if rows.shape[1]:
            self._store.add(rows)


def _column(values: npt.ArrayLike, name: str, least: int) -> Int64s:
    return checked_integers(values, name, least, 62).astype(np.int64, copy=False)
